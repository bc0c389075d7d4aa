// The operators that the device has itself: tensors are made, viewed, copied and read. All others: host_kernels.h.
#pragma once
#include "generators.h"
#include "transfers.h"
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace sim {

inline bool float64_refused = !switched_on("SIM_FLOAT64", true);

inline void check_dtype(at::ScalarType dtype) {
  if (!float64_refused) return;
  TORCH_CHECK_TYPE(dtype != at::kDouble && dtype != at::kComplexDouble,
      "Cannot convert a sim Tensor to ", dtype, " dtype as the sim framework doesn't support it. Please use float32 instead.");
}

struct OnDevice {  // allocates there
  int before = current_device;
  explicit OnDevice(std::optional<at::Device> device) { if (device && device->has_index()) current_device = checked(device->index()); }
  ~OnDevice() { current_device = before; }
};

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "sim: only strided tensors exist on the device");
  check_dtype(c10::dtype_or_default(dtype));
  OnDevice there(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory(), KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  check_dtype(c10::dtype_or_default(dtype));
  OnDevice there(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory(), KEYS, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool late) {
  if (!to.is_cpu()) check_dtype(to.scalar_type());
  auto source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  if (to.numel() > 0) {
    if (source.is_cpu()) copy_in(source, to, late);
    else if (to.is_cpu()) copy_out(source, to, late);
    else if (source.device() == to.device()) copy_within(source, to, late);
    else copy_across(source, to);
  }
  raise_reported();
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  world().scalars++;
  refuse_wait("a scalar is read");
  auto& stream = current(tensor.device().index());
  carry_out(stream);
  touch(tensor, false, stream, issue(stream), "item");
  synchronize(stream);
  raise_reported();
  return host_view(tensor).item();
}

void resize_storage(const c10::Storage& storage, size_t size) {
  auto* impl = storage.unsafeGetStorageImpl();
  OnDevice there(storage.device());
  auto& stream = current(current_device);
  carry_out(stream);
  auto bytes = device_memory().allocate(size);
  if (storage.data() && bytes) std::memcpy(bytes.get(), storage.data(), std::min(storage.nbytes(), size));
  impl->set_data_ptr_noswap(std::move(bytes));
  impl->set_nbytes(size);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  if (self.sizes() == size && !format) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t needed = (impl->numel() + impl->storage_offset()) * self.element_size();
  if (self.storage().nbytes() < needed) resize_storage(self.storage(), needed);
  return self;
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }
at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) { return at::native::_reshape_alias(self, size, stride); }
at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto count = int64_t(source.nbytes() / self.element_size());
  return at::native::set_storage_cpu_(self, source, 0, {count}, {});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  OnDevice there(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_memory().allocate(0), &device_memory(), true);
  return at::native::set_storage_cpu_(self, none, 0, {0}, {});
}
void record_stream(at::Tensor& self, at::Stream stream) { used_on(self.storage().mutable_data(), stream_of(stream)); }

}  // namespace sim
