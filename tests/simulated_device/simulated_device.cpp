// The simulated accelerator "sim" behind torch's PrivateUse1 key: what torch asks of a backend, and what Python calls.
#include <torch/extension.h>
#include "autocast.h"
#include "collectives.h"
#include "host_kernels.h"
#include "recurrent_cells.h"
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <pthread.h>
#include <torch/csrc/utils/pybind.h>
#include <pybind11/chrono.h>

namespace sim {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return device_count() > 0; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device); }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = checked(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = getCurrentDevice();
    if (index >= 0) setCurrentDevice(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return at::make_generator<GeneratorImpl>(index < 0 ? current_device : checked(index)); }
  at::Device getDeviceFromPtr(void* memory) const override {
    Held held(world().lock);
    auto* block = device_memory().find(memory);
    return {SIM, c10::DeviceIndex(block ? block->device : current_device)};
  }
  bool isPinnedPtr(const void* memory) const override { return pinned_memory().holds(memory); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(switched_on("SIM_PINNED", true), "sim: the device has no pinned memory");
    return &pinned_memory();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override { resize_storage(storage, size); }
};

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  c10::SetAllocator(SIM, &device_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  if (switched_on("SIM_PINNED", true)) at::setHostAllocator(SIM, &pinned_memory());
  pthread_atfork(nullptr, nullptr, [] { if (world().used) world().bad_fork = true; });

  m.def("device_count", [] { return device_count(); });
  m.def("is_in_bad_fork", [] { return world().bad_fork.load(); });
  m.def("is_initialized", [] { return world().used.load(); });
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) { current_device = checked(device); });
  m.def("default_generator", [](int device) { return default_generator(device); });

  m.def("violations", [] { Held held(world().lock); world().unread_violation = false; return world().violations; }, NoGil());
  m.def("clear_violations", [] { Held held(world().lock); world().unread_violation = false; world().violations.clear(); }, NoGil());
  m.def("raise_violations", [](bool on) { world().raise_violations = on; });

  m.def("counts", [] {
    auto& the = world();
    return std::make_tuple(the.copies_in.load(), the.copies_out.load(), the.scalars.load(), the.bytes_in.load(), the.bytes_out.load());
  });
  m.def("refuse", [](int what, bool warn) { world().refused = what; world().warn_of_waits = warn; });
  m.def("refused", [] { return std::make_pair(world().refused, world().warn_of_waits); });
  m.def("refuse_float64", [](bool on) { float64_refused = on; });
  m.def("pending", [](int device) {
    Held held(world().lock);
    size_t count = 0;
    for (int id = 0; id < STREAMS; ++id) count += stream_of(checked(device), id).queue.size();
    return count;
  }, NoGil());
  m.def("unread_violation", [] { return world().unread_violation; });
  m.def("look_once_more", [] {  // at pinned memory whose copies nobody has waited for
    Held held(world().lock);
    for (auto& transit : transits().all)
      if (!transit->out && digest(transit->host) != transit->digest) report("the host changed pinned memory, and never waited for the copy that reads it");
  }, NoGil());

  m.def("collectives", [](c10d::Backend* gloo, std::chrono::milliseconds timeout) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Collectives>(gloo, timeout));
  });

  m.def("set_memory_limit", [](size_t bytes, int device) { Held held(world().lock); device_memory().limit[checked(device)] = bytes; }, NoGil());
  m.def("mem_get_info", [](int device) { return device_memory().getMemoryInfo(c10::DeviceIndex(device)); }, NoGil());
}
