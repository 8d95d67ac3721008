// A process group for tensors of the device, under the name of NCCL: gloo carries their memory between processes.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include "operators.h"

namespace simulated_gpu {
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A CPU tensor over the memory of a device tensor, which it keeps alive.
static at::Tensor view_on_host(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type ", tensor.device().type(),
              " (simulated NCCL carries CUDA tensors)");
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {},
      at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
}
static Tensors view_on_host(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) views.push_back(view_on_host(tensor));
  return views;
}
static std::vector<Tensors> view_on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> views;
  for (const auto& tensors : lists) views.push_back(view_on_host(tensors));
  return views;
}

// NCCL hands back the device tensors themselves, as results of work that the host does not wait for.
static WorkPtr make_completed_work(const Tensors& results) {
  std::vector<c10::Device> devices;
  if (!results.empty()) devices.push_back(results[0].device());
  auto future =
      c10::make_intrusive<at::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::move(devices));
  future->markCompleted(at::IValue(results));
  return c10d::Work::create_from_future(future);
}
static Tensors flatten(const std::vector<Tensors>& lists) {
  Tensors tensors;
  for (const auto& list : lists) tensors.insert(tensors.end(), list.begin(), list.end());
  return tensors;
}

struct SimulatedNccl final : public c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;

  explicit SimulatedNccl(c10::intrusive_ptr<c10d::Backend> carrier)
      : Backend(carrier->getRank(), carrier->getSize()), gloo(std::move(carrier)) {}

  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds) override {}

  // Gloo has no averages: it sums, and the sum is divided here.
  template <typename Options, typename Collective>
  void reduce_on_host(Options options, Tensors reduced, Collective collective) {
    const bool averages = options.reduceOp == c10d::ReduceOp::AVG;
    if (averages) options.reduceOp = c10d::ReduceOp::SUM;
    collective(options)->wait();
    if (averages)
      for (auto& tensor : reduced) tensor.div_(getSize());
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto views = view_on_host(tensors);
    gloo->broadcast(views, options)->wait();
    return make_completed_work(tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto views = view_on_host(tensors);
    reduce_on_host(options, views, [&](auto& adapted) { return gloo->allreduce(views, adapted); });
    return make_completed_work(tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    for (auto& tensor : tensors) {
      Tensors single{tensor};
      allreduce(single, options);
    }
    return make_completed_work(tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto views = view_on_host(tensors);
    reduce_on_host(options, views, [&](auto& adapted) { return gloo->reduce(views, adapted); });
    return make_completed_work(tensors);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto output_views = view_on_host(outputs);
    auto input_views = view_on_host(inputs);
    gloo->allgather(output_views, input_views, options)->wait();
    return make_completed_work(flatten(outputs));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto output_view = view_on_host(output), input_view = view_on_host(input);
    gloo->_allgather_base(output_view, input_view, options)->wait();
    return make_completed_work({output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) _allgather_base(outputs[i], inputs[i], options);
    return make_completed_work(outputs);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto output_views = view_on_host(outputs);
    auto input_views = view_on_host(inputs);
    gloo->gather(output_views, input_views, options)->wait();
    return make_completed_work(flatten(outputs));
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto output_views = view_on_host(outputs);
    auto input_views = view_on_host(inputs);
    gloo->scatter(output_views, input_views, options)->wait();
    return make_completed_work(outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    auto output_views = view_on_host(outputs);
    auto input_views = view_on_host(inputs);
    reduce_on_host(options, output_views,
                   [&](auto& adapted) { return gloo->reduce_scatter(output_views, input_views, adapted); });
    return make_completed_work(outputs);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    auto output_view = view_on_host(output), input_view = view_on_host(input);
    reduce_on_host(options, {output_view},
                   [&](auto& adapted) { return gloo->_reduce_scatter_base(output_view, input_view, adapted); });
    return make_completed_work({output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], options);
    return make_completed_work(outputs);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    auto output_view = view_on_host(output), input_view = view_on_host(input);
    gloo->alltoall_base(output_view, input_view, output_sizes, input_sizes, options)->wait();
    return make_completed_work({output});
  }
  // Messages are not waited for: a process may send before it receives.
  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    auto views = view_on_host(tensors);
    return gloo->send(views, destination, tag);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    auto views = view_on_host(tensors);
    return gloo->recv(views, source, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    gloo->barrier(c10d::BarrierOptions())->wait();
    return make_completed_work({});
  }
};

// DDP measures its passes with a timer of the device. Kernels run at once, so that the host's clock measures them.
struct DdpTimer final : public c10d::Timer {
  explicit DdpTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const int64_t began = getTimeRef(start), ended = getTimeRef(end);
    return began == c10d::kUnsetTime || ended < began ? std::nullopt : std::optional<int64_t>(ended - began);
  }
};

}  // namespace simulated_gpu
