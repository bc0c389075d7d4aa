// The device's memory, handed out as a caching allocator hands it out, and pinned memory of the host.
//
// A freed block goes to the next request of the same size from the same stream, last one first, and is filled with 0xFF
// (NaN, -1). Each block remembers which stream has read and written what of it, so that an access which nothing orders
// after an earlier one is found, also where the memory has changed hands in between.
#pragma once
#include "streams.h"
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>

namespace sim {

constexpr int POISON = 0xFF;

struct Access {
  int place;  // of the stream
  uint64_t tick;
  size_t begin, end;
  bool write;
  const std::string* operation;
};

struct Block {
  std::shared_ptr<char> bytes;
  size_t size;
  int device;
  Stream* stream;  // the one that was current when it was handed out
  std::vector<Access> accesses;
  std::set<int> also_used_on;                       // record_stream
  std::vector<std::pair<int, uint64_t>> freed_under;  // what has to be done before it is handed out again
};

inline const std::string* interned(const std::string& text) {
  static auto* all = new std::set<std::string>();
  return &*all->insert(text).first;
}

inline bool ordered(const Access& access, const Stream& stream) {
  return access.place == stream.place || stream.clock[access.place] >= access.tick;
}

inline std::shared_ptr<char> host_memory(size_t size) {
  char* bytes = static_cast<char*>(std::aligned_alloc(512, size));
  TORCH_CHECK(bytes, "sim: the host has no ", size, " bytes left");
  return {bytes, std::free};
}

struct DeviceMemory final : c10::DeviceAllocator {
  using Key = std::tuple<int, Stream*, size_t>;
  static constexpr size_t MOST_CACHED = size_t(512) << 20;
  std::unordered_map<void*, std::unique_ptr<Block>> live;
  std::map<Key, std::vector<std::unique_ptr<Block>>> cached;
  std::vector<std::unique_ptr<Block>> waiting;  // freed while another stream was to use them
  std::array<c10::CachingDeviceAllocator::DeviceStats, MOST_DEVICES> stats{};
  std::array<size_t, MOST_DEVICES> limit{};  // 0: none
  size_t cached_bytes = 0;

  DeviceMemory() {
    const char* most = std::getenv("SIM_MEMORY");
    if (most) limit.fill(std::strtoull(most, nullptr, 10));
  }

  static void release(void* memory);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  static size_t all() { return static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE); }
  size_t allocated(int device) { return stats[device].allocated_bytes[all()].current; }
  size_t reserved(int device) { return stats[device].reserved_bytes[all()].current; }

  c10::DataPtr allocate(size_t asked) override {
    TORCH_CHECK(!world().bad_fork, "sim: cannot use the device in a forked process; use the start method 'spawn'");
    const int device = checked(current_device);
    world().used = true;
    if (asked == 0) return {nullptr, nullptr, &release, c10::Device(SIM, c10::DeviceIndex(device))};
    const size_t size = (asked + 511) / 512 * 512;
    auto& stream = current(device);
    Held held(world().lock);
    give_back_waiting();
    auto block = take_cached({device, &stream, size});
    const bool reused = bool(block);
    if (!block) block = take_new(device, size, asked);
    block->stream = &stream;
    join(stream.clock, world().host);
    if (reused) check_handed_out(*block, stream);
    poison(*block, stream);
    count(device, asked, size, true);
    void* memory = block->bytes.get();
    live[memory] = std::move(block);
    return {memory, memory, &release, c10::Device(SIM, c10::DeviceIndex(device))};
  }

  std::unique_ptr<Block> take_cached(const Key& key) {
    auto found = cached.find(key);
    if (found == cached.end() || found->second.empty()) return nullptr;
    auto block = std::move(found->second.back());
    found->second.pop_back();
    cached_bytes -= block->size;
    return block;
  }

  std::unique_ptr<Block> take_new(int device, size_t size, size_t asked) {
    auto room = [&] { return limit[device] == 0 || reserved(device) + size <= limit[device]; };
    if (!room()) {
      ++stats[device].num_alloc_retries;
      drop_cached(device);
    }
    if (!room()) {
      ++stats[device].num_ooms;
      using c10::CachingAllocator::format_size;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim: out of memory. Tried to allocate ", format_size(asked), ". sim:", device,
          " has a total capacity of ", format_size(limit[device]), " of which ", format_size(limit[device] - std::min(limit[device], reserved(device))),
          " is free. ", format_size(allocated(device)), " is allocated by PyTorch.");
    }
    auto block = std::make_unique<Block>();
    block->bytes = host_memory(size), block->size = size, block->device = device;
    ++stats[device].num_device_alloc;
    stats[device].reserved_bytes[all()].increase(size);
    stats[device].segment[all()].increase(1);
    return block;
  }

  // The stream that gets the block must have waited for whatever other streams did with it in its former life.
  void check_handed_out(Block& block, Stream& stream) {
    for (auto& access : block.accesses)
      if (!ordered(access, stream)) {
        report(*access.operation + " used memory on " + world().streams[access.place]->name() + " that was freed and handed out again on " +
               stream.name() + ", which has not waited for that: record_stream is missing, or a wait");
        break;
      }
    block.accesses.clear();
  }

  // In the order of the stream: copies that were put into it before still find what they were to find.
  static void poison(Block& block, Stream& stream) {
    auto fill = [bytes = block.bytes, size = block.size] { std::memset(bytes.get(), POISON, size); };
    if (stream.queue.empty()) fill();
    else stream.queue.push_back({stream.clock[stream.place], fill});
  }

  void free(void* memory) {
    Held held(world().lock);
    auto found = live.find(memory);
    if (found == live.end()) return;
    auto block = std::move(found->second);
    live.erase(found);
    count(block->device, block->size, block->size, false);
    for (int place : block->also_used_on) block->freed_under.emplace_back(place, world().streams[place]->clock[place]);
    block->also_used_on.clear();
    if (!block->freed_under.empty()) { waiting.push_back(std::move(block)); return; }
    bool in_order = true;
    join(block->stream->clock, world().host);
    for (auto& access : block->accesses) in_order = in_order && ordered(access, *block->stream);
    if (in_order) poison(*block, *block->stream);
    keep(std::move(block));
  }

  void keep(std::unique_ptr<Block> block) {
    cached_bytes += block->size;
    const int device = block->device;
    Key key{device, block->stream, block->size};
    cached[key].push_back(std::move(block));
    if (cached_bytes > MOST_CACHED) drop_cached(device);
  }

  // What record_stream named is done: the allocator has seen it, so nothing of it concerns the next owner.
  void give_back_waiting() {
    for (size_t i = 0; i < waiting.size();) {
      auto& block = *waiting[i];
      bool done = true;
      for (auto& [place, tick] : block.freed_under) done = done && carried_out(*world().streams[place], tick);
      if (!done) { ++i; continue; }
      for (auto& [place, tick] : block.freed_under) {
        const int at = place; const uint64_t until = tick;
        block.accesses.erase(std::remove_if(block.accesses.begin(), block.accesses.end(),
            [&](const Access& access) { return access.place == at && access.tick <= until; }), block.accesses.end());
      }
      block.freed_under.clear();
      keep(std::move(waiting[i]));
      waiting.erase(waiting.begin() + i);
    }
  }

  void drop_cached(int device) {
    for (auto& [key, blocks] : cached) {
      if (std::get<0>(key) != device) continue;
      for (auto& block : blocks) {
        cached_bytes -= block->size;
        stats[device].reserved_bytes[all()].decrease(block->size);
        stats[device].segment[all()].decrease(1);
        ++stats[device].num_device_free;
      }
      blocks.clear();
    }
  }

  void count(int device, size_t asked, size_t size, bool more) {
    auto& of = stats[device];
    auto change = [&](c10::CachingAllocator::StatArray& stat, size_t by) { more ? stat[all()].increase(by) : stat[all()].decrease(by); };
    change(of.allocation, 1), change(of.active, 1), change(of.allocated_bytes, size), change(of.active_bytes, size), change(of.requested_bytes, size);
  }

  Block* find(const void* memory) {
    auto found = live.find(const_cast<void*>(memory));
    return found == live.end() ? nullptr : found->second.get();
  }

  // An operation on `stream` reads or writes [begin, end) of the block. Call with the world's lock held.
  void touch(Block& block, size_t begin, size_t end, bool write, Stream& stream, uint64_t tick, const std::string& operation) {
    auto& all = block.accesses;
    for (size_t i = 0; i < all.size();) {
      auto& access = all[i];
      const bool overlaps = access.begin < end && begin < access.end;
      if (overlaps && (write || access.write) && !ordered(access, stream))
        report(operation + (write ? " writes" : " reads") + " on " + stream.name() + " what " + *access.operation + (access.write ? " writes" : " reads") +
               " on " + world().streams[access.place]->name() + ": nothing waits for it");
      const bool within = begin <= access.begin && access.end <= end;
      const bool replaced = within && (write || (!access.write && access.place == stream.place));
      if (replaced || world().host[access.place] >= access.tick) { access = all.back(); all.pop_back(); }
      else ++i;
    }
    if (all.size() > 512) all.erase(all.begin(), all.begin() + 256);
    all.push_back({stream.place, tick, begin, end, write, interned(operation)});
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Held held(world().lock);
    give_back_waiting();
    for (int device = 0; device < device_count(); ++device) drop_cached(device);
  }
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override { used_on(memory.get(), stream_of(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override { Held held(world().lock); return stats[checked(device)]; }
  template <typename Function>
  void each_stat(int device, Function function) {
    Held held(world().lock);
    auto& of = stats[checked(device)];
    for (auto* stat : {&of.allocation, &of.segment, &of.active, &of.allocated_bytes, &of.reserved_bytes, &of.active_bytes, &of.requested_bytes}) function((*stat)[all()]);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { each_stat(device, [](auto& stat) { stat.reset_accumulated(); }); }
  void resetPeakStats(c10::DeviceIndex device) override { each_stat(device, [](auto& stat) { stat.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Held held(world().lock);
    const size_t total = limit[checked(device)] ? limit[device] : size_t(16) << 30;
    return {total - std::min(total, reserved(device)), total};
  }
};

inline DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory();
  return *memory;
}

inline void DeviceMemory::release(void* memory) {
  if (memory && !world().bad_fork) device_memory().free(memory);
}

inline void used_on(void* memory, Stream& stream) {
  Held held(world().lock);
  if (auto* block = device_memory().find(memory); block && block->stream != &stream) block->also_used_on.insert(stream.place);
}

// Pinned memory: what a copy still reads or writes keeps its storage (transfers.h), so a block that is freed is free.
struct PinnedMemory final : at::HostAllocator {
  std::map<char*, std::shared_ptr<char>> live;  // by where it begins
  std::map<char*, size_t> sizes;
  std::map<size_t, std::vector<std::shared_ptr<char>>> cached;

  static void release(void* memory);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  c10::DataPtr allocate(size_t asked) override;
  bool record_event(void* memory, void*, c10::Stream) override { return holds(memory); }
  void empty_cache() override { Held held(world().lock); cached.clear(); }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  void free(void* memory) {
    Held held(world().lock);
    auto found = live.find(static_cast<char*>(memory));
    if (found == live.end()) return;
    const size_t size = sizes[found->first];
    std::memset(memory, POISON, size);
    cached[size].push_back(std::move(found->second));
    sizes.erase(found->first);
    live.erase(found);
  }
  bool holds(const void* memory) {
    Held held(world().lock);
    auto after = sizes.upper_bound(static_cast<char*>(const_cast<void*>(memory)));
    if (after == sizes.begin()) return false;
    --after;
    return static_cast<const char*>(memory) < after->first + after->second;
  }
};

inline PinnedMemory& pinned_memory() {
  static auto* memory = new PinnedMemory();
  return *memory;
}

inline void PinnedMemory::release(void* memory) {
  if (memory && !world().bad_fork) pinned_memory().free(memory);
}

}  // namespace sim
