// Copies between the host and the device, and between devices.
//
// A non-blocking copy waits in its stream's queue, and its destination is filled with 0xFF at once. What it reads from
// pinned memory is read when it is carried out; a digest tells whether the host has changed it before it knew that the
// copy was over. What it writes to the host is shown when the host has waited for it, and not before.
#pragma once
#include "memory.h"
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace sim {

// A tensor over the same storage, which autograd knows nothing of.
inline at::Tensor detached(const at::Tensor& tensor) {
  const auto key = tensor.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::PrivateUse1;
  auto same = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), c10::DispatchKeySet(key), tensor.dtype());
  same.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return same;
}

// The device's bytes as a storage of the host, which does not own them.
inline c10::Storage host_storage(const c10::Storage& storage) {
  void* bytes = const_cast<void*>(storage.data());
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(bytes, at::kCPU), c10::GetCPUAllocator(), true);
}

inline at::Tensor host_view(const at::Tensor& tensor, const c10::Storage& storage) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

inline at::Tensor host_view(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.is_cpu() ? tensor : host_view(tensor, host_storage(tensor.storage()));
}

inline void copy_bytes(const at::Tensor& to, const at::Tensor& from) {  // both on the host
  at::AutoDispatchBelowADInplaceOrView plain;
  c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
  to.copy_(from);
}

struct Extent {
  size_t begin = 0, end = 0;  // in bytes of the storage
};

inline Extent extent(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {size_t(tensor.storage_offset() * tensor.element_size()), size_t((last + 1) * tensor.element_size())};
}

inline void touch(const at::Tensor& tensor, bool write, Stream& stream, uint64_t tick, const std::string& operation) {
  if (!tensor.defined() || tensor.is_cpu() || tensor.numel() == 0) return;
  Held held(world().lock);
  auto* block = device_memory().find(tensor.storage().data());
  if (!block) return;
  auto [begin, end] = extent(tensor);
  device_memory().touch(*block, begin, end, write, stream, tick, operation);
}

inline at::Tensor as_bytes(const at::Tensor& tensor) {  // of the host
  auto whole = tensor.is_contiguous() ? tensor : at::empty(tensor.sizes(), tensor.options());
  if (!tensor.is_contiguous()) copy_bytes(whole, tensor);
  return whole;
}

inline void poison(const at::Tensor& tensor) {
  auto view = host_view(tensor);
  if (view.is_non_overlapping_and_dense()) { std::memset(view.data_ptr(), POISON, view.nbytes()); return; }
  auto filled = at::empty(view.sizes(), view.options().requires_grad(false));
  std::memset(filled.data_ptr(), POISON, filled.nbytes());
  copy_bytes(view, filled);
}

inline uint64_t digest(const at::Tensor& tensor) {  // of the host
  at::AutoDispatchBelowADInplaceOrView plain;
  auto whole = as_bytes(tensor);
  const char* bytes = static_cast<const char*>(whole.data_ptr());
  const size_t size = whole.nbytes();
  uint64_t sum = size, word;
  for (size_t i = 0; i + 8 <= size; i += 8) {
    std::memcpy(&word, bytes + i, 8);
    sum = (sum ^ word) * 0x9E3779B97F4A7C15u;
    sum ^= sum >> 29;
  }
  for (size_t i = size / 8 * 8; i < size; ++i) sum = (sum ^ uint8_t(bytes[i])) * 0x100000001B3u;
  return sum;
}

// What a copy reads from pinned memory, or writes to the host, until the host knows that it is over.
struct Transit {
  at::Tensor host, staged;  // staged: what is to be shown to the host
  bool out, taken = false;
  uint64_t digest;
  Stream* stream;
  uint64_t tick;
};

struct Transits {
  std::deque<std::shared_ptr<Transit>> all;
};

inline Transits& transits() {
  static auto* the = new Transits();
  return *the;
}

inline void settle(Transit& transit) {
  if (digest(transit.host) != transit.digest)
    report(transit.out ? "the host wrote to the destination of a copy from the device before it had waited for the copy"
                       : "the host changed pinned memory before it had waited for the copy to the device that reads it");
  if (transit.out) copy_bytes(transit.host, transit.staged);
}

inline bool overlap(const at::Tensor& one, const at::Tensor& other) {
  if (one.storage().data() != other.storage().data()) return false;
  auto a = extent(one), b = extent(other);
  return a.begin < b.end && b.begin < a.end;
}

inline void host_learned() {
  std::vector<std::shared_ptr<Transit>> over;  // let go of without the lock
  Held held(world().lock);
  auto& all = transits().all;
  for (size_t i = 0; i < all.size();) {
    auto transit = all[i];
    if (world().host[transit->stream->place] < transit->tick || (transit->out && !transit->taken)) { ++i; continue; }
    settle(*transit);
    over.push_back(transit);
    all.erase(all.begin() + i);
  }
}

// Storages that nobody else holds any more, as an allocator of pinned memory looks after them.
inline void let_go_of_transits() {
  std::vector<std::shared_ptr<Transit>> over;
  Held held(world().lock);
  auto& all = transits().all;
  for (size_t i = 0; i < all.size();) {
    auto transit = all[i];
    if (transit->host.storage().use_count() > 1 || !carried_out(*transit->stream, transit->tick)) { ++i; continue; }
    if (!transit->out) settle(*transit);
    over.push_back(transit);
    all.erase(all.begin() + i);
  }
}

// A copy that follows in order reads or writes host memory that earlier ones are to read or write.
inline void make_way(const at::Tensor& host, bool write) {
  std::vector<std::shared_ptr<Transit>> before;
  {
    Held held(world().lock);
    for (auto& transit : transits().all)
      if (overlap(transit->host, host) && (write || transit->out)) before.push_back(transit);
  }
  for (auto& transit : before) {
    carry_out(*transit->stream, transit->tick);
    Held held(world().lock);
    auto& all = transits().all;
    auto found = std::find(all.begin(), all.end(), transit);
    if (found == all.end()) continue;
    all.erase(found);
    settle(*transit);
  }
}

inline void put_transit(const at::Tensor& host, bool out, Stream& stream, uint64_t tick, std::shared_ptr<Transit>& made) {
  made = std::make_shared<Transit>(Transit{host, {}, out, false, digest(host), &stream, tick});
  Held held(world().lock);
  transits().all.push_back(made);
}

inline c10::DataPtr PinnedMemory::allocate(size_t asked) {
  TORCH_CHECK(!world().bad_fork, "sim: cannot pin memory in a forked process");
  if (asked == 0) return {nullptr, nullptr, &release, at::kCPU};
  size_t size = 512;
  while (size < asked) size *= 2;  // to a power of two, as torch's allocators of pinned memory do
  let_go_of_transits();
  Held held(world().lock);
  auto& list = cached[size];
  if (list.empty()) list.push_back(host_memory(size));
  auto bytes = std::move(list.back());
  list.pop_back();
  std::memset(bytes.get(), POISON, size);
  char* begin = bytes.get();
  live[begin] = std::move(bytes);
  sizes[begin] = size;
  return {begin, begin, &release, at::kCPU};
}

// A copy still to come reads or writes the same bytes in the same stream: they cannot be filled with 0xFF before it is done.
inline void clear_the_way(const at::Tensor& tensor, Stream& stream) {
  {
    Held held(world().lock);
    if (stream.queue.empty()) return;
    auto* block = device_memory().find(tensor.storage().data());
    bool used = false;
    if (block)
      for (auto& access : block->accesses) used = used || (access.place == stream.place && access.tick >= stream.queue.front().tick);
    if (!used) return;
  }
  carry_out(stream);
}

inline void copy_in(const at::Tensor& host, const at::Tensor& device, bool late) {
  world().copies_in++, world().bytes_in += long(host.nbytes());
  auto& stream = current(device.device().index());
  if (!late) {
    refuse_wait("a copy to the device that is not non_blocking", false);
    carry_out(stream);
    make_way(host, false);
    touch(device, true, stream, issue(stream), "copy_");
    copy_bytes(host_view(device), host);
    synchronize(stream);
    return;
  }
  clear_the_way(device, stream);
  const auto tick = issue(stream);
  touch(device, true, stream, tick, "copy_(non_blocking=True)");
  let_go_of_transits();
  auto to = detached(device);
  poison(to);
  if (pinned_memory().holds(host.data_ptr())) {
    auto from = detached(host);
    std::shared_ptr<Transit> transit;
    {
      // A copy to the host that is still on its way fills this memory first: what it brings is what is read.
      Held held(world().lock);
      bool awaited = false;
      for (auto& other : transits().all) awaited = awaited || (other->out && overlap(other->host, from));
      if (!awaited) put_transit(from, false, stream, tick, transit);
    }
    put(stream, tick, [to, from, transit] {
      if (!transit) make_way(from, false);
      else if (digest(from) != transit->digest) {
        report("the host changed pinned memory before the copy to the device that reads it was carried out");
        transit->digest = digest(from);
      }
      copy_bytes(host_view(to), from);
    });
  } else {
    auto staged = at::empty(host.sizes(), host.options().requires_grad(false).pinned_memory(false));
    copy_bytes(staged, host);
    put(stream, tick, [to, staged] { copy_bytes(host_view(to), staged); });
  }
}

inline void copy_out(const at::Tensor& device, const at::Tensor& host, bool late) {
  world().copies_out++, world().bytes_out += long(device.nbytes());
  auto& stream = current(device.device().index());
  make_way(host, true);
  if (!late) {
    refuse_wait("a device tensor is copied to the host");
    carry_out(stream);
    touch(device, false, stream, issue(stream), "copy_");
    synchronize(stream);
    copy_bytes(host, host_view(device));
    return;
  }
  const auto tick = issue(stream);
  touch(device, false, stream, tick, "copy_(non_blocking=True)");
  auto to = detached(host), from = detached(device);
  poison(to);
  std::shared_ptr<Transit> transit;
  put_transit(to, true, stream, tick, transit);
  put(stream, tick, [from, transit] {
    at::AutoDispatchBelowADInplaceOrView plain;
    auto view = host_view(from);
    transit->staged = at::empty(view.sizes(), view.options());
    copy_bytes(transit->staged, view);
    transit->taken = true;
  });
}

inline void copy_within(const at::Tensor& from, const at::Tensor& to, bool late) {
  auto& stream = current(to.device().index());
  if (late && from.storage().data() != to.storage().data()) {
    clear_the_way(to, stream);
    const auto tick = issue(stream);
    touch(from, false, stream, tick, "copy_(non_blocking=True)");
    touch(to, true, stream, tick, "copy_(non_blocking=True)");
    auto source = detached(from), target = detached(to);
    poison(target);
    put(stream, tick, [source, target] { copy_bytes(host_view(target), host_view(source)); });
    return;
  }
  carry_out(stream);
  const auto tick = issue(stream);
  touch(from, false, stream, tick, "copy_");
  touch(to, true, stream, tick, "copy_");
  auto storage = host_storage(from.storage());
  const bool same = from.storage().data() == to.storage().data();
  copy_bytes(same ? host_view(to, storage) : host_view(to), host_view(from, storage));
}

// On the source's stream, which waits for the destination's before and is waited for by it after.
inline void copy_across(const at::Tensor& from, const at::Tensor& to) {
  auto& stream = current(from.device().index());
  auto& other = current(to.device().index());
  wait_for(stream, other);
  carry_out(stream);
  const auto tick = issue(stream);
  touch(from, false, stream, tick, "copy_");
  touch(to, true, stream, tick, "copy_");
  copy_bytes(host_view(to), host_view(from));
  wait_for(other, stream);
}

}  // namespace sim
