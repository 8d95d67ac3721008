// The kernel of every operator: check devices, count a wait, and run the CPU kernel on the same memory.
#pragma once
#include <torch/library.h>
#include <unordered_set>
#include "host_views.h"

namespace simulated_gpu {
using Names = std::unordered_set<std::string>;

// clang-format off
// CUDA kernels of most operators take CPU tensors of no dimension; these take CPU tensors of any, for example as indices.
static const Names TAKES_HOST_ARGUMENTS = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index",
    "aten::_unsafe_index_put", "aten::_pack_padded_sequence", "aten::_ctc_loss", "aten::record_stream",
    "aten::tensor_split"};
static const Names REFUSES_HOST_SCALARS = {
    "aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_update_scale_", "aten::embedding",
    "aten::nll_loss_forward", "aten::addmm", "aten::mm", "aten::bmm", "aten::native_layer_norm", "aten::gather",
    "aten::scatter", "aten::scatter_", "aten::index_select", "aten::_log_softmax", "aten::_softmax", "aten::cat",
    "aten::equal", "aten::dot", "aten::index_copy_", "aten::index_add_", "aten::scatter_add_", "aten::_foreach_norm"};
// The size or the value of their result is read by the host.
static const Names BLOCKING_OPERATORS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
    "aten::unique_dim", "aten::_unique", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount",
    "aten::repeat_interleave", "aten::is_nonzero", "aten::argwhere", "aten::nonzero_static"};
// Before `index`, torch itself calls `nonzero` or copies the indices, which count.
static const Names INDEXING_OPERATORS = {"aten::index_put_", "aten::_index_put_impl_"};
// clang-format on

// Operators without an argument for a generator draw from the default CPU generator, which is seeded for the call.
struct SeededHostGenerator {
  at::Generator generator;
  at::Tensor saved_state;
  SeededHostGenerator(bool is_needed, DeviceIndex device) {
    if (!is_needed) return;
    generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(generator.mutex());
    saved_state = at::Tensor(generator.unsafeGetGeneratorImpl()->get_state());
    generator.set_current_seed(default_generator(device).get<DeviceGenerator>()->next());
  }
  ~SeededHostGenerator() {
    if (!saved_state.defined()) return;
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.unsafeGetGeneratorImpl()->set_state(*saved_state.unsafeGetTensorImpl());
  }
};

template <typename Function>
static void for_each_tensor(const c10::IValue& value, Function function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const auto& tensor : value.toTensorVector())
      if (tensor.defined()) function(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector())
      if (tensor && tensor->defined()) function(*tensor);
  }
}

// A call of an operator: its arguments are the last entries of torch's stack.
struct OperatorCall {
  const c10::OperatorHandle& op;
  torch::jit::Stack* stack;
  const c10::FunctionSchema& schema = op.schema();
  const std::string& name = schema.name();
  const size_t num_arguments = schema.arguments().size();
  const size_t begin = stack->size() - num_arguments;
  HostViews views;
  // Argument index -> device tensor and the CPU tensor that replaces it.
  std::vector<std::tuple<size_t, at::Tensor, at::Tensor>> replaced;
  bool has_generator = false;

  c10::IValue& argument(size_t index) { return (*stack)[begin + index]; }

  // The device of the call; tensors of two devices are the error that CUDA raises.
  DeviceIndex check_devices() {
    std::optional<DeviceIndex> device;
    auto refuse = [&](const std::string& other) {
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, cuda:",
                  int(device.value_or(0)), " and ", other, "! (simulated GPU: ", name, ")");
    };
    for (size_t i = 0; i < num_arguments; ++i) {
      for_each_tensor(argument(i), [&](const at::Tensor& tensor) {
        if (!tensor.is_cuda()) return;
        if (!device) device = tensor.device().index();
        if (*device != tensor.device().index()) refuse(tensor.device().str());
      });
      if (!device && argument(i).isDevice() && argument(i).toDevice().is_cuda()) {
        auto target = argument(i).toDevice();
        device = target.has_index() ? target.index() : current_device_index;
      }
    }
    if (!TAKES_HOST_ARGUMENTS.count(name)) {
      const bool refuses_scalars = REFUSES_HOST_SCALARS.count(name);
      for (size_t i = 0; i < num_arguments; ++i)
        for_each_tensor(argument(i), [&](const at::Tensor& tensor) {
          if (tensor.is_cpu() && (tensor.dim() > 0 || refuses_scalars)) refuse("cpu");
        });
    }
    return device.value_or(current_device_index);
  }

  bool is_blocking() {
    if (INDEXING_OPERATORS.count(name)) {
      bool is_read_by_host = false;
      for_each_tensor(argument(1), [&](const at::Tensor& index) {
        is_read_by_host |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte || !index.is_cuda();
      });
      return is_read_by_host;
    }
    // The last argument of repeat_interleave is the size of the result, if the caller knows it.
    if (name == "aten::repeat_interleave" && num_arguments >= 2) return argument(num_arguments - 1).isNone();
    return BLOCKING_OPERATORS.count(name);
  }

  at::Tensor replace_tensor(size_t index, const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto view = views.make_view(tensor);
    replaced.emplace_back(index, tensor, view);
    return view;
  }

  void replace_arguments(DeviceIndex device) {
    const auto generator_type = c10::OptionalType::create(c10::GeneratorType::get());
    for (size_t i = 0; i < num_arguments; ++i) {
      auto& value = argument(i);
      if (value.isTensor()) {
        value = replace_tensor(i, value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> tensors;
        for (const auto& tensor : value.toTensorVector()) tensors.push_back(replace_tensor(i, tensor));
        value = tensors;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> tensors;
        for (const auto& tensor : value.toOptionalTensorVector())
          tensors.push_back(tensor ? std::optional<at::Tensor>(replace_tensor(i, *tensor)) : tensor);
        value = tensors;
      } else if (value.isDevice()) {
        if (value.toDevice().is_cuda()) value = Device(DeviceType::CPU);
      } else if (value.isGenerator() && value.toGenerator().defined()) {
        auto generator = value.toGenerator();
        TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                    generator.device().type(), "'");
        replace_generator(value, generator);
      } else if (value.isNone() && schema.arguments()[i].type()->isSubtypeOf(*generator_type)) {
        replace_generator(value, default_generator(device));
      }
    }
  }

  void replace_generator(c10::IValue& value, at::Generator& generator) {
    has_generator = true;
    value = at::detail::createCPUGenerator(generator.get<DeviceGenerator>()->next());
  }

  bool draws_from_default_generator() {
    for (auto tag : op.getTags())
      if (tag == at::Tag::nondeterministic_seeded) return !has_generator;
    return false;
  }

  void run_cpu_kernel(DeviceIndex device) {
    SeededHostGenerator seeded(draws_from_default_generator(), device);
    try {
      op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    } catch (const c10::NotImplementedError& error) {
      TORCH_CHECK_NOT_IMPLEMENTED(false, "simulated GPU: no CPU kernel of ", name, ".", schema.overload_name(), ": ",
                                  error.what_without_backtrace());
    }
  }

  bool is_written(size_t index) {
    const auto* alias = schema.arguments()[index].alias_info();
    if (alias == nullptr) return false;
    const auto& elements = alias->containedTypes();
    return alias->isWrite() || (!elements.empty() && elements[0].isWrite());
  }

  // Arguments that were written to keep what the CPU kernel did, and results are device tensors.
  void replace_results(DeviceIndex device) {
    std::unordered_map<c10::TensorImpl*, at::Tensor> argument_by_view;
    for (auto& [index, tensor, view] : replaced) {
      if (is_written(index)) views.write_back(tensor, view, device);
      argument_by_view.emplace(view.unsafeGetTensorImpl(), tensor);
    }
    auto replace = [&](const at::Tensor& result) -> at::Tensor {
      if (!result.defined()) return result;
      auto argument = argument_by_view.find(result.unsafeGetTensorImpl());
      return argument != argument_by_view.end() ? argument->second : views.wrap_output(result, device);
    };
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
      auto& value = (*stack)[i];
      if (value.isTensor()) {
        value = replace(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> results;
        for (const auto& result : value.toTensorVector()) results.push_back(replace(result));
        value = results;
      }
    }
  }
};

static void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  BelowAutogradAndAutocast guard;
  OperatorCall call{op, stack};
  const DeviceIndex device = call.check_devices();
  if (call.is_blocking()) {
    count_event("sync:" + call.name.substr(std::strlen("aten::")), call.name, 0);
    complete_copies(device, current_streams[device], INT64_MAX);
  }
  call.replace_arguments(device);
  call.run_cpu_kernel(device);
  call.replace_results(device);
}

}  // namespace simulated_gpu
