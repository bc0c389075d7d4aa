// Collectives between processes: gloo over the host's copies, in the order of the device's streams.
//
// A collective takes its inputs after what the current stream holds, fills its outputs with 0xFF, and is handed to gloo
// at once, since all ranks hand theirs over in one order. Its results are there for who has waited for the work, on a
// stream or on the host.
#pragma once
#include "transfers.h"
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <numeric>

namespace sim {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using Factor = c10d::NCCLPreMulSumSupplement;
#else
using Factor = c10d::PreMulSumSupplement;
#endif
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

inline c10::Device device_of(int index) { return {SIM, c10::DeviceIndex(index)}; }

struct Work final : c10d::Work {
  Event event;
  Tensors outputs;
  bool on_host;  // the host waits as well
  c10::intrusive_ptr<c10::ivalue::Future> future;

  Work(int rank, c10d::OpType type, Event at, Tensors results, bool on_host)
      : c10d::Work(rank, type), event(std::move(at)), outputs(std::move(results)), on_host(on_host) {
    std::vector<c10::Device> devices{device_of(event.stream->device)};
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    const int before = current_stream[event.stream->device];
    current_stream[event.stream->device] = event.stream->id;  // the future records its event there
    future->markCompleted(c10::IValue(outputs));
    current_stream[event.stream->device] = before;
  }
  bool isCompleted() override { return host_finds(event); }
  bool isSuccess() const override { return true; }
  std::vector<at::Tensor> result() override { return outputs; }
  void synchronize() override { wait(); }
  void blockCurrentStream() override { wait(); }
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    wait_for(current(event.stream->device), event);
    if (on_host) host_waits_for(event.clock);
    raise_reported();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

struct Collectives final : c10d::Backend {
  static constexpr const char* NAME = "simccl";
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::chrono::milliseconds timeout;
  std::array<Stream*, MOST_DEVICES> streams{};

  Collectives(c10d::Backend* over, std::chrono::milliseconds timeout)
      : c10d::Backend(over->getRank(), over->getSize()), gloo(c10::intrusive_ptr<c10d::Backend>::reclaim_copy(over)), timeout(timeout) {}

  const std::string getBackendName() const override { return NAME; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<Options>(NAME, timeout); }
  void setTimeout(std::chrono::milliseconds given) override { timeout = given; gloo->setTimeout(given); }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void abort() override { gloo->abort(); }
  void shutdown() override { gloo->shutdown(); }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  WorkPtr endCoalescing() override {
    auto& own = stream(current_device);
    return c10::make_intrusive<Work>(getRank(), c10d::OpType::COALESCED, event_on(own), Tensors{}, false);
  }

  Stream& stream(int device) {
    auto& own = streams[device];
    if (!own) own = &collective_stream(device);
    return *own;
  }

  static at::Tensor on_host(const at::Tensor& tensor, bool filled) {
    TORCH_CHECK(tensor.is_privateuseone(), "simccl takes tensors of the device, not of ", tensor.device());
    at::AutoDispatchBelowADInplaceOrView plain;
    auto copy = at::empty(tensor.sizes(), tensor.options().device(at::kCPU).requires_grad(false));
    if (filled) copy_bytes(copy, host_view(tensor));
    return copy;
  }

  // `launch` gets the host's inputs and outputs, and may put its results into either; `finish` sees the outputs once more.
  using Launch = std::function<std::vector<WorkPtr>(Tensors& inputs, Tensors& outputs)>;
  using Finish = std::function<void(at::Tensor&)>;
  WorkPtr run(c10d::OpType type, const Tensors& inputs, const Tensors& outputs, const Launch& launch, Finish finish = nullptr) {
    const int device = !inputs.empty() ? inputs[0].device().index() : !outputs.empty() ? outputs[0].device().index() : current_device;
    const auto name = "c10d::" + c10d::opTypeToString(type);
    auto& before = current(checked(device));
    auto& own = stream(device);
    carry_out(before);
    wait_for(own, before);
    const auto tick = issue(own);
    for (auto& tensor : inputs) touch(tensor, false, own, tick, name);
    for (auto& tensor : outputs) touch(tensor, true, own, tick, name);
    Tensors host_inputs, host_outputs, into;
    for (auto& tensor : inputs) host_inputs.push_back(on_host(tensor, true));
    for (auto& tensor : outputs) {
      // In place: what is an input as well is read and written in one piece of the host's memory.
      auto same = std::find_if(inputs.begin(), inputs.end(), [&](const at::Tensor& input) { return input.is_same(tensor); });
      host_outputs.push_back(same == inputs.end() ? on_host(tensor, false) : host_inputs[same - inputs.begin()]);
      into.push_back(detached(tensor));
    }
    at::AutoDispatchBelowADInplaceOrView plain;
    auto works = launch(host_inputs, host_outputs);
    for (auto& tensor : into) if (tensor.numel() > 0) poison(tensor);
    Tensors kept;  // their memory is not handed out before the collective is over
    for (auto& tensor : inputs) kept.push_back(detached(tensor));
    put(own, tick, [works, kept, host_inputs, host_outputs, into, finish]() mutable {
      for (auto& work : works) work->wait();
      for (size_t i = 0; i < into.size(); ++i) {
        if (finish) finish(host_outputs[i]);
        if (into[i].numel() > 0) copy_bytes(host_view(into[i]), host_outputs[i]);
      }
    });
    raise_reported();
    return c10::make_intrusive<Work>(getRank(), type, event_on(own), outputs, type == c10d::OpType::BARRIER);
  }

  // Gloo knows neither averages nor sums of multiples.
  template <typename Options>
  static std::pair<Options, Finish> reduction(const Options& options, Tensors& inputs, int size) {
    auto sum = options;
    Finish finish;
    if (options.reduceOp == c10d::ReduceOp::AVG) {
      sum.reduceOp = c10d::ReduceOp(c10d::ReduceOp::SUM);
      finish = [size](at::Tensor& tensor) { tensor.div_(size); };
    }
    return {sum, finish};
  }
  template <typename Options>
  static void scale(const Options& options, Options& plain, Tensors& inputs) {
    if (options.reduceOp != c10d::ReduceOp::PREMUL_SUM) return;
    auto* by = static_cast<Factor*>(options.reduceOp.supplement_.get());
    plain.reduceOp = c10d::ReduceOp(c10d::ReduceOp::SUM);
    for (auto& tensor : inputs) by->tensor_factor.defined() ? tensor.mul_(host_view(by->tensor_factor)) : tensor.mul_(by->double_factor);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(c10d::OpType::BROADCAST, tensors, tensors, [&](Tensors& in, Tensors&) {
      std::vector<WorkPtr> works;
      for (auto& tensor : in) { Tensors one{tensor}; works.push_back(gloo->broadcast(one, options)); }
      return works;
    });
  }
  WorkPtr reduce_all(c10d::OpType type, Tensors& tensors, const c10d::AllreduceOptions& options) {
    auto [sum, finish] = reduction(options, tensors, getSize());
    return run(type, tensors, tensors, [&, plain = sum](Tensors& in, Tensors&) mutable {
      scale(options, plain, in);
      std::vector<WorkPtr> works;
      for (auto& tensor : in) { Tensors one{tensor}; works.push_back(gloo->allreduce(one, plain)); }
      return works;
    }, finish);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override { return reduce_all(c10d::OpType::ALLREDUCE, tensors, options); }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return reduce_all(c10d::OpType::ALLREDUCE_COALESCED, tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto [sum, finish] = reduction(options, tensors, getSize());
    if (getRank() != options.rootRank) finish = nullptr;
    return run(c10d::OpType::REDUCE, tensors, tensors, [&, plain = sum](Tensors& in, Tensors&) mutable {
      scale(options, plain, in);
      return std::vector<WorkPtr>{gloo->reduce(in, plain)};
    }, finish);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(c10d::OpType::ALLGATHER, inputs, outputs.at(0), [&](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists{out};
      return std::vector<WorkPtr>{gloo->allgather(lists, in, options)};
    });
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Tensors flat;  // one list of a rank after another
    for (auto& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
    return run(c10d::OpType::ALLGATHER_COALESCED, inputs, flat, [&](Tensors& in, Tensors& out) {
      std::vector<WorkPtr> works;
      for (size_t i = 0; i < in.size(); ++i) {
        std::vector<Tensors> lists(1);
        Tensors one{in[i]};
        for (size_t rank = 0; rank < outputs.size(); ++rank) lists[0].push_back(out[rank * in.size() + i]);
        works.push_back(gloo->allgather(lists, one, options));
      }
      return works;
    });
  }
  // Gathers into one tensor, the ranks' parts one after another.
  static Tensors parts(const at::Tensor& whole, int size) {
    auto flat = whole.view({-1});
    Tensors all;
    for (int i = 0; i < size; ++i) all.push_back(flat.narrow(0, flat.numel() / size * i, flat.numel() / size));
    return all;
  }
  WorkPtr gather_into(c10d::OpType type, Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
    for (size_t i = 0; i < inputs.size(); ++i)
      TORCH_CHECK_VALUE(outputs.at(i).numel() == inputs[i].numel() * getSize(), "output tensor size must be equal to world_size times input tensor size");
    return run(type, inputs, outputs, [&](Tensors& in, Tensors& out) {
      std::vector<WorkPtr> works;
      for (size_t i = 0; i < in.size(); ++i) {
        std::vector<Tensors> lists{parts(out[i], getSize())};
        Tensors one{in[i].view({-1})};
        works.push_back(gloo->allgather(lists, one, options));
      }
      return works;
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return gather_into(c10d::OpType::_ALLGATHER_BASE, outputs, inputs, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return gather_into(c10d::OpType::COALESCED, outputs, inputs, options);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Tensors none;
    return run(c10d::OpType::GATHER, inputs, outputs.empty() ? none : outputs[0], [&](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists;
      if (!outputs.empty()) lists.push_back(out);
      return std::vector<WorkPtr>{gloo->gather(lists, in, options)};
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    Tensors none;
    return run(c10d::OpType::SCATTER, inputs.empty() ? none : inputs[0], outputs, [&](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists;
      if (!inputs.empty()) lists.push_back(in);
      return std::vector<WorkPtr>{gloo->scatter(out, lists, options)};
    });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto [sum, finish] = reduction(options, outputs, getSize());
    return run(c10d::OpType::REDUCE_SCATTER, inputs.at(0), outputs, [&, plain = sum](Tensors& in, Tensors& out) mutable {
      scale(options, plain, in);
      std::vector<Tensors> lists{in};
      return std::vector<WorkPtr>{gloo->reduce_scatter(out, lists, plain)};
    }, finish);
  }
  WorkPtr reduce_into(c10d::OpType type, Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
    for (size_t i = 0; i < inputs.size(); ++i)
      TORCH_CHECK_VALUE(inputs[i].numel() == outputs.at(i).numel() * getSize(), "input tensor must be the same size as output size times world size");
    auto [sum, finish] = reduction(options, outputs, getSize());
    return run(type, inputs, outputs, [&, plain = sum](Tensors& in, Tensors& out) mutable {
      scale(options, plain, in);
      std::vector<WorkPtr> works;
      for (size_t i = 0; i < in.size(); ++i) {
        std::vector<Tensors> lists{parts(in[i], getSize())};
        Tensors one{out[i].view({-1})};
        works.push_back(gloo->reduce_scatter(one, lists, plain));
      }
      return works;
    }, finish);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_into(c10d::OpType::_REDUCE_SCATTER_BASE, outputs, inputs, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return reduce_into(c10d::OpType::COALESCED, outputs, inputs, options);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return run(c10d::OpType::ALLTOALL_BASE, {input}, {output}, [&](Tensors& in, Tensors& out) {
      return std::vector<WorkPtr>{gloo->alltoall_base(out[0], in[0], output_sizes, input_sizes, options)};
    });
  }
  // Gloo lacks this one: the parts go as one tensor. It takes the sizes away from who gives them.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    std::vector<int64_t> to, from;
    for (auto& tensor : inputs) to.push_back(tensor.numel());
    for (auto& tensor : outputs) from.push_back(tensor.numel());
    return run(c10d::OpType::ALLTOALL, inputs, outputs, [&](Tensors& in, Tensors& out) {
      Tensors flat;
      for (auto& tensor : in) flat.push_back(tensor.view({-1}));
      auto sent = at::cat(flat), received = at::empty({std::accumulate(from.begin(), from.end(), int64_t(0))}, sent.options());
      auto output_sizes = from, input_sizes = to;
      gloo->alltoall_base(received, sent, output_sizes, input_sizes, options)->wait();
      for (size_t i = 0, at = 0; i < out.size(); at += from[i], ++i) out[i].view({-1}).copy_(received.narrow(0, at, from[i]));
      return std::vector<WorkPtr>{};
    });
  }
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    return run(c10d::OpType::SEND, tensors, {}, [&](Tensors& in, Tensors&) { return std::vector<WorkPtr>{gloo->send(in, rank, tag)}; });
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    return run(c10d::OpType::RECV, {}, tensors, [&](Tensors&, Tensors& out) { return std::vector<WorkPtr>{gloo->recv(out, rank, tag)}; });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return run(c10d::OpType::RECVANYSOURCE, {}, tensors, [&](Tensors&, Tensors& out) { return std::vector<WorkPtr>{gloo->recvAnysource(out, tag)}; });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return run(c10d::OpType::BARRIER, {}, {}, [&](Tensors&, Tensors&) { return std::vector<WorkPtr>{gloo->barrier(options)}; });
  }
};

}  // namespace sim
