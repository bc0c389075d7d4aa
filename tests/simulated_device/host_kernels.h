// Every other operator: the host's kernel over the same bytes, when the current stream has carried out what it holds.
// As on a GPU, tensors of the host and of the device do not mix, nor do those of two devices.
#pragma once
#include "operators.h"
#include <ATen/core/op_registration/adaption.h>
#include <unordered_map>
#include <unordered_set>

namespace sim {

using torch::jit::Stack;

inline void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& see) {
  if (value.isTensor()) { if (value.toTensor().defined()) see(value.toTensor()); }
  else if (value.isTensorList()) { for (const at::Tensor& tensor : value.toTensorVector()) if (tensor.defined()) see(tensor); }
  else if (value.isList()) { for (const c10::IValue& item : value.toListRef()) if (item.isTensor() && item.toTensor().defined()) see(item.toTensor()); }
}

inline bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// One call of an operator: what it was given, and what stands for that on the host.
struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  Stack* stack;
  const std::string& name;
  size_t first;                    // of its arguments on the stack
  std::vector<c10::IValue> given;  // as they came
  int device = -1;
  std::unordered_map<c10::TensorImpl*, at::Tensor> views;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages;

  Call(const c10::OperatorHandle& op, Stack* stack)
      : op(op), schema(op.schema()), stack(stack), name(op.schema().name()), first(stack->size() - op.schema().arguments().size()),
        given(stack->begin() + first, stack->end()) {}

  bool starts_with(const char* text) const { return name.rfind(text, 0) == 0; }
  bool indexes(size_t i) const { return schema.arguments()[i].name() == "indices" && given[i].isList() && (name.find("index") != std::string::npos); }

  void look() {
    const auto& arguments = schema.arguments();
    const bool fused = starts_with("aten::_fused_adam") || starts_with("aten::_fused_sgd") || starts_with("aten::_fused_adagrad");
    for (size_t i = 0; i < given.size(); ++i)
      each_tensor(given[i], [&](const at::Tensor& tensor) {
        if (!tensor.is_privateuseone()) return;
        const int its = tensor.device().index();
        TORCH_CHECK(device < 0 || device == its, "Expected all tensors to be on the same device, but ", name, " got tensors of sim:", device, " and sim:", its);
        device = its;
      });
    for (size_t i = 0; i < given.size(); ++i) {
      if (given[i].isDevice() && device < 0) device = given[i].toDevice().has_index() ? given[i].toDevice().index() : current_device;
      if (indexes(i)) continue;  // the host may hold these
      each_tensor(given[i], [&](const at::Tensor& tensor) {
        const bool scalar = tensor.dim() == 0 && !writes(arguments[i]) && (!fused || arguments[i].name() == "lr");
        TORCH_CHECK(device < 0 || tensor.is_privateuseone() || scalar, "Expected all tensors to be on the same device, but ", name, " got ", arguments[i].name(),
            " on ", tensor.device(), " among tensors of sim:", device);
      });
    }
    if (device < 0) device = current_device;
    checked(device);
  }

  bool waits() const {
    static const std::unordered_set<std::string> always{"aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
        "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::equal", "aten::bincount", "aten::histc", "aten::_ctc_loss"};
    if (always.count(name)) return true;
    if (name == "aten::repeat_interleave") return given.back().isNone();  // the size of the result is read
    bool mask = false;
    for (size_t i = 0; i < given.size(); ++i)
      if (indexes(i)) each_tensor(given[i], [&](const at::Tensor& index) { mask = mask || index.scalar_type() == at::kBool || index.scalar_type() == at::kByte; });
    return mask;
  }

  at::Tensor on_host(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cpu()) return tensor;
    auto& view = views[tensor.unsafeGetTensorImpl()];
    if (view.defined()) return view;
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto found = storages.find(key);
    if (found == storages.end()) found = storages.emplace(key, host_storage(tensor.storage())).first;
    return view = host_view(tensor, found->second);
  }

  c10::IValue on_host(const c10::IValue& value) {
    if (value.isTensor()) return on_host(value.toTensor());
    if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(on_host(tensor));
      return all;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const c10::IValue& item : value.toListRef()) all.push_back(item.isTensor() ? std::optional<at::Tensor>(on_host(item.toTensor())) : std::nullopt);
      return all;
    }
    if (value.isDevice()) return c10::Device(at::kCPU);
    if (value.isGenerator()) return twister_of(value.toGenerator(), device);
    return value;
  }

  bool draws() const { return op.hasTag(at::Tag::nondeterministic_seeded); }

  void run(Stream& stream) {
    const auto& arguments = schema.arguments();
    carry_out(stream);
    const auto tick = issue(stream);
    for (const bool write : {false, true})
      for (size_t i = 0; i < given.size(); ++i)
        if (writes(arguments[i]) == write) each_tensor(given[i], [&](const at::Tensor& tensor) { touch(tensor, write, stream, tick, name); });
    raise_reported();
    bool lend = draws();
    for (size_t i = 0; i < given.size(); ++i) {
      (*stack)[first + i] = on_host(given[i]);
      if (arguments[i].name() != "generator") continue;
      lend = false;
      if (given[i].isNone() && draws()) (*stack)[first + i] = twister_of(default_generator(device), device);
    }
    at::AutoDispatchBelowADInplaceOrView plain;
    c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
    if (lend) {
      Lent lent(twister_of(default_generator(device), device));
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    } else {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    bring_back(stream, tick);
  }

  // Outputs that the kernel made larger, results that are arguments, views of arguments, and new tensors.
  void bring_back(Stream& stream, uint64_t tick) {
    const auto& arguments = schema.arguments();
    for (size_t i = 0; i < given.size(); ++i)
      if (writes(arguments[i])) each_tensor(given[i], [&](const at::Tensor& tensor) { take_size(tensor); });
    const size_t count = schema.returns().size(), from = stack->size() - count;
    for (size_t i = 0; i < count; ++i) {
      auto& value = (*stack)[from + i];
      const auto* alias = schema.returns()[i].alias_info();
      const c10::IValue* source = alias ? argument_of(*alias) : nullptr;
      if (source && alias->isWrite()) { value = *source; continue; }
      auto to_device = [&](const at::Tensor& result) {
        if (!result.defined()) return result;
        if (source && source->isTensor()) return view_of(source->toTensor(), result);
        check_dtype(result.scalar_type());
        auto made = at::empty_strided(result.sizes(), result.strides(), result.options().device(c10::Device(SIM, c10::DeviceIndex(device))).pinned_memory(std::nullopt));
        touch(made, true, stream, tick, name);
        carry_out(stream);
        copy_bytes(host_view(made), result);
        return made;
      };
      if (value.isTensor()) value = to_device(value.toTensor());
      else if (value.isTensorList()) {
        std::vector<at::Tensor> all;
        for (const at::Tensor& result : value.toTensorVector()) all.push_back(to_device(result));
        value = all;
      }
    }
  }

  const c10::IValue* argument_of(const c10::AliasInfo& alias) const {
    for (size_t i = 0; i < given.size(); ++i) {
      const auto* other = schema.arguments()[i].alias_info();
      if (!other) continue;
      for (const auto& set : alias.beforeSets()) if (other->beforeSets().count(set)) return &given[i];
    }
    return nullptr;
  }

  at::Tensor view_of(const at::Tensor& source, const at::Tensor& result) {
    auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(source.storage()), source.key_set(), result.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    return view;
  }

  void take_size(const at::Tensor& tensor) {
    if (tensor.is_cpu()) return;
    auto& view = views[tensor.unsafeGetTensorImpl()];
    if (!view.defined() || (view.sizes() == tensor.sizes() && view.strides() == tensor.strides() && view.storage().data() == tensor.storage().data())) return;
    if (view.storage().nbytes() > tensor.storage().nbytes()) resize_storage(tensor.storage(), view.storage().nbytes());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
    if (view.storage().data() != tensor.storage().data()) copy_bytes(host_view(tensor), view);
  }
};

inline void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, stack);
  if (call.name == "aten::_foreach_copy_") {  // may cross devices, tensor by tensor
    auto to = call.given[0].toTensorVector(), from = call.given[1].toTensorVector();
    bool crosses = false;
    for (size_t i = 0; i < to.size(); ++i) crosses = crosses || to[i].device() != from[i].device();
    if (crosses) {
      for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], call.given[2].toBool());
      stack->resize(call.first);
      return;
    }
  }
  call.look();
  OnDevice there(c10::Device(SIM, c10::DeviceIndex(call.device)));
  auto& stream = current(call.device);
  const bool waits = call.waits();
  if (waits) refuse_wait(call.name);
  call.run(stream);
  if (waits) synchronize(stream);
  raise_reported();
}

inline const c10::OperatorHandle& operator_named(const char* name) {
  static auto* found = new std::unordered_map<std::string, c10::OperatorHandle>();
  auto at = found->find(name);
  if (at == found->end()) at = found->emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first;
  return at->second;
}

// torch asks a backend for these two under names of their own.
inline void convolution(const c10::OperatorHandle&, Stack* stack) { run_on_host(operator_named("aten::convolution"), stack); }
inline void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  const size_t first = stack->size() - 10;
  const auto weight = (*stack)[first + 2].toTensor();
  const bool transposed = (*stack)[first + 6].toBool();
  const auto channels = transposed ? weight.size(1) * (*stack)[first + 8].toInt() : weight.size(0);
  stack->insert(stack->begin() + first + 3, c10::IValue(std::vector<int64_t>{channels}));
  run_on_host(operator_named("aten::convolution_backward"), stack);
}

}  // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", sim::empty_memory_format);
  m.impl("empty_strided", sim::empty_strided);
  m.impl("_copy_from", sim::copy_from);
  m.impl("_copy_from_and_resize", sim::copy_from_and_resize);
  m.impl("_local_scalar_dense", sim::local_scalar_dense);
  m.impl("resize_", sim::resize);
  m.impl("as_strided", sim::as_strided);
  m.impl("view", sim::view);
  m.impl("_reshape_alias", sim::reshape_alias);
  m.impl("set_.source_Storage_storage_offset", sim::set_storage_offset);
  m.impl("set_.source_Storage", sim::set_storage);
  m.impl("set_.source_Tensor", sim::set_tensor);
  m.impl("set_", sim::set_nothing);
  m.impl("record_stream", sim::record_stream);
  // The outputs that torch would make for these are resized by the kernels that fill them, which warns.
  for (const char* loss : {"mse_loss", "smooth_l1_loss"}) m.impl(loss, torch::CppFunction::makeFromBoxedFunction<&sim::run_on_host>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&sim::convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&sim::convolution_backward>());
}
