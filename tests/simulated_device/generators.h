// Random numbers of the device: Mersenne twisters of its own, seeded otherwise than the host's from the same seed.
#pragma once
#include "streams.h"
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace sim {

struct GeneratorImpl final : c10::GeneratorImpl {
  at::Generator twister = at::detail::createCPUGenerator();
  uint64_t given = c10::default_rng_seed_val;

  explicit GeneratorImpl(int device)
      : c10::GeneratorImpl(c10::Device(SIM, c10::DeviceIndex(device)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {
    set_current_seed(given);
  }
  void set_current_seed(uint64_t seed) override {
    given = seed;
    twister.set_current_seed(seed * 0x9E3779B97F4A7C15u + 0x2545F491u);
  }
  uint64_t current_seed() const override { return given; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return given;
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "sim: generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "sim: generators have no offset"); }

  // The twister's state, then the seed that was given.
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto inner = twister.get_state();
    auto state = at::empty({inner.numel() + 8}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.data_ptr(), inner.data_ptr(), inner.numel());
    std::memcpy(state.data_ptr<uint8_t>() + inner.numel(), &given, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    auto length = twister.get_state().numel();
    TORCH_CHECK_TYPE(state.dtype() == at::kByte && state.device().is_cpu(), "sim: a generator's state is a ByteTensor of the host");
    TORCH_CHECK(state.numel() == length + 8, "sim: a generator's state has ", length + 8, " bytes, not ", state.numel());
    const auto* bytes = static_cast<const uint8_t*>(state.data());
    auto inner = at::empty({length}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(inner.data_ptr(), bytes, length);
    twister.set_state(inner);
    std::memcpy(&given, bytes + length, 8);
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device().index());
    copy->set_state(*get_state());
    return copy;
  }
};

inline const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < MOST_DEVICES; ++i) made->push_back(at::make_generator<GeneratorImpl>(i));
    return made;
  }();
  return (*all)[device < 0 ? current_device : checked(device)];
}

inline at::Generator twister_of(const at::Generator& generator, int device) {
  TORCH_CHECK(generator.device().type() == SIM, "Expected a 'sim' device type for generator but found '", generator.device().type(), "'");
  TORCH_CHECK(generator.device().index() == device, "sim: a generator of sim:", int(generator.device().index()), " cannot draw for sim:", device);
  return static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->twister;
}

// Lends the device's state to the host's default generator, for kernels that take no generator.
struct Lent {
  static std::mutex& lock() { static auto* the = new std::mutex(); return *the; }
  std::lock_guard<std::mutex> alone{lock()};
  at::Generator host = at::detail::getDefaultCPUGenerator(), twister;
  at::Tensor kept;
  explicit Lent(at::Generator from) : twister(std::move(from)), kept(host.get_state()) { host.set_state(twister.get_state()); }
  ~Lent() {
    twister.set_state(host.get_state());
    host.set_state(kept);
  }
};

}  // namespace sim
