// Streams, events and what is known to have happened before what.
//
// A stream keeps the copies that were put into it in a queue and carries them out as late as its order allows: when a
// kernel follows on the same stream, when another stream waits for an event behind them, or when the host waits. Each
// stream has a clock with one place for every stream of every device: how far it has itself come, and how far the
// others had come where it waited for them. An access that is not covered by the clock of the next one is a race.
#pragma once
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int MOST_DEVICES = 8;
constexpr int POOL = 32, STREAMS = 1 + POOL + 16;  // the default one, those handed out in turn, and those of collectives
constexpr uint64_t ALL = ~uint64_t(0);

inline bool switched_on(const char* name, bool otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == 0 ? otherwise : std::string(value) != "0";
}

inline int device_count() {
  static const int count = [] {
    const char* value = std::getenv("SIM_DEVICES");
    return std::clamp(value ? std::atoi(value) : 2, 0, MOST_DEVICES);
  }();
  return count;
}

inline int checked(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "sim: device ", device, " does not exist; there are ", device_count());
  return device;
}

using Clock = std::vector<uint64_t>;

inline void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

struct Task {
  uint64_t tick;
  std::function<void()> run;
};

struct Stream {
  int device = 0, id = 0, place = 0;
  Clock clock;                    // its own place says how much was issued
  std::deque<Task> queue;         // issued, and not carried out yet
  std::recursive_mutex carrying;  // held while a task is carried out: one at a time, in order
  std::string name() const { return "stream " + std::to_string(id) + " of sim:" + std::to_string(device); }
};

// Everything that the device knows. It is never destroyed: tensors may outlive the interpreter.
struct World {
  std::recursive_mutex lock;
  std::vector<std::unique_ptr<Stream>> streams;
  Clock host;  // what the host has waited for
  std::vector<std::string> violations;
  bool unread_violation = false, raise_violations = true;
  std::atomic<long> copies_in{0}, copies_out{0}, scalars{0}, bytes_in{0}, bytes_out{0};
  int refused = 0;  // 0: the host may wait; 1: reads of the device are refused; 2: blocking copies to it as well
  bool warn_of_waits = false;
  std::atomic<bool> used{false}, bad_fork{false};
  std::array<std::atomic<int>, MOST_DEVICES> next_stream{}, next_collective{};

  World() {
    for (int device = 0; device < MOST_DEVICES; ++device)
      for (int id = 0; id < STREAMS; ++id) {
        auto stream = std::make_unique<Stream>();
        stream->device = device, stream->id = id, stream->place = device * STREAMS + id;
        stream->clock.resize(MOST_DEVICES * STREAMS);
        streams.push_back(std::move(stream));
      }
    host.resize(MOST_DEVICES * STREAMS);
    const char* mode = std::getenv("SIM_VIOLATIONS");
    raise_violations = mode == nullptr || std::string(mode) != "count";
  }
};

inline World& world() {
  static World* the = new World();
  return *the;
}

using Held = std::lock_guard<std::recursive_mutex>;

// ---- violations

inline void report(std::string text) {
  Held held(world().lock);
  auto& all = world().violations;
  world().unread_violation = true;
  if (all.size() < 1000) all.push_back(std::move(text));
}

inline void raise_reported() {
  if (!world().unread_violation || !world().raise_violations) return;
  Held held(world().lock);
  world().unread_violation = false;
  TORCH_CHECK(false, "sim: ", world().violations.back());
}

// ---- which device and stream the calling thread is on

inline thread_local int current_device = 0;
inline thread_local std::array<int, MOST_DEVICES> current_stream{};

inline Stream& stream_of(int device, int id) { return *world().streams[device * STREAMS + id]; }
inline Stream& stream_of(const c10::Stream& stream) { return stream_of(checked(stream.device_index()), int(stream.id())); }
inline Stream& current(int device) { return stream_of(device, current_stream[device]); }
inline c10::Stream as_torch(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(SIM, c10::DeviceIndex(stream.device)), stream.id);
}
inline Stream& new_stream(int device) {
  return stream_of(checked(device), 1 + world().next_stream[device]++ % POOL);
}
inline Stream& collective_stream(int device) {
  return stream_of(checked(device), 1 + POOL + world().next_collective[device]++ % (STREAMS - 1 - POOL));
}

// ---- order

// What the host hands to a stream comes after all that the host has waited for. Returns the place in the stream's order.
inline uint64_t issue(Stream& stream) {
  Held held(world().lock);
  join(stream.clock, world().host);
  return ++stream.clock[stream.place];
}

inline void put(Stream& stream, uint64_t tick, std::function<void()> run) {
  Held held(world().lock);
  stream.queue.push_back({tick, std::move(run)});
}

inline bool carried_out(const Stream& stream, uint64_t tick) {
  Held held(world().lock);
  return stream.queue.empty() || stream.queue.front().tick > tick;
}

// Without the world's lock around a task: one may wait for another process.
inline void carry_out(Stream& stream, uint64_t tick = ALL, long most = -1) {
  std::vector<std::function<void()>> over;  // let go of without a lock: a storage that Python knows takes its lock then
  Held alone(stream.carrying);
  while (most-- != 0) {
    std::function<void()> run;
    {
      Held held(world().lock);
      if (stream.queue.empty() || stream.queue.front().tick > tick) return;
      run = stream.queue.front().run;
    }
    auto done = [&] { Held held(world().lock); stream.queue.pop_front(); };
    try { run(); } catch (...) { done(); throw; }
    done();
    over.push_back(std::move(run));
  }
}

void host_learned();  // transfers.h: what has arrived by now is shown, what was changed too early is reported

inline void host_waits_for(const Clock& clock) {
  {
    Held held(world().lock);
    join(world().host, clock);
  }
  host_learned();
}

inline void refuse_wait(const std::string& what, bool read = true) {
  const auto& refused = world().refused;
  if (refused >= (read ? 1 : 2)) TORCH_CHECK(false, "sim: the host waits for the device: ", what);
  if (world().warn_of_waits) TORCH_WARN("called a synchronizing sim operation: ", what);
}

inline void synchronize(Stream& stream) {
  carry_out(stream);
  Clock seen;
  { Held held(world().lock); seen = stream.clock; }
  host_waits_for(seen);
}

inline void synchronize_device(int device) {
  for (int id = 0; id < STREAMS; ++id) {
    auto& stream = stream_of(device, id);
    if (stream.clock[stream.place] > 0) synchronize(stream);
  }
}

// A poll that is answered "no" lets one more task run, so that polling comes to an end.
inline bool finished(Stream& stream, uint64_t tick) {
  if (carried_out(stream, tick)) return true;
  carry_out(stream, tick, 1);
  return false;
}

struct Event {
  Stream* stream;
  uint64_t tick;
  Clock clock;
  std::chrono::steady_clock::time_point when;
};

inline void wait_for(Stream& stream, const Event& event) {
  carry_out(*event.stream, event.tick);
  Held held(world().lock);
  join(stream.clock, event.clock);
}

inline Event event_on(Stream& stream) {
  Held held(world().lock);
  join(stream.clock, world().host);
  return {&stream, stream.clock[stream.place], stream.clock, std::chrono::steady_clock::now()};
}

inline void wait_for(Stream& stream, Stream& other) { wait_for(stream, event_on(other)); }

inline bool host_finds(const Event& event) {  // that it is over
  if (!finished(*event.stream, event.tick)) return false;
  host_waits_for(event.clock);
  return true;
}

void used_on(void* memory, Stream& stream);  // memory.h

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Event* event(void* given) { return static_cast<Event*>(given); }
  static c10::Device device(int index) { return {SIM, c10::DeviceIndex(index)}; }
  c10::DeviceType type() const override { return SIM; }
  c10::Device getDevice() const override { return device(current_device); }
  void setDevice(c10::Device to) const override { current_device = to.has_index() ? checked(to.index()) : current_device; }
  void uncheckedSetDevice(c10::Device to) const noexcept override { if (to.has_index()) current_device = to.index(); }
  c10::Device exchangeDevice(c10::Device to) const override { auto old = getDevice(); setDevice(to); return old; }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(device_count()); }
  static int index(c10::Device of) { return of.has_index() ? checked(of.index()) : current_device; }

  c10::Stream getStream(c10::Device on) const override { return as_torch(current(index(on))); }
  c10::Stream getDefaultStream(c10::Device on) const override { return as_torch(stream_of(index(on), 0)); }
  c10::Stream getNewStream(c10::Device on, int) const override { return as_torch(new_stream(index(on))); }
  c10::Stream getStreamFromGlobalPool(c10::Device on, bool) const override { return as_torch(new_stream(index(on))); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto old = getStream(to.device());
    current_stream[index(to.device())] = int(to.id());
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &stream_of(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    auto event = event_on(stream_of(stream));
    return queryEvent(&event);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    refuse_wait("a stream is synchronized");
    synchronize(stream_of(stream));
    raise_reported();
  }

  void record(void** given, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto recorded = event_on(stream_of(stream));
    if (*given) *event(*given) = std::move(recorded);
    else *given = new Event(std::move(recorded));
  }
  void block(void* given, const c10::Stream& stream) const override { if (given) wait_for(stream_of(stream), *event(given)); }
  bool queryEvent(void* given) const override {
    if (!given) return true;
    return host_finds(*event(given));
  }
  void destroyEvent(void* given, const c10::DeviceIndex) const noexcept override { delete event(given); }
  void synchronizeEvent(void* given) const override {
    if (!given) return;
    refuse_wait("an event is synchronized");
    carry_out(*event(given)->stream, event(given)->tick);
    host_waits_for(event(given)->clock);
    raise_reported();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from && to, "sim: both events must be recorded before the time between them is asked for");
    return std::chrono::duration<double, std::milli>(event(to)->when - event(from)->when).count();
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    refuse_wait("the device is synchronized");
    synchronize_device(index < 0 ? current_device : checked(index));
    raise_reported();
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    used_on(memory.get(), stream_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace sim
