// A simulated CUDA device over host memory, for the CPU build of torch: registration, and functions for Python.
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include "collectives.h"

namespace {
c10::Registerer<std::string, std::unique_ptr<at::CUDAHooksInterface>, at::CUDAHooksArgs> g_register(
    "CUDAHooks", at::CUDAHooksRegistry(),
    [](at::CUDAHooksArgs a) { return std::unique_ptr<at::CUDAHooksInterface>(new simulated_gpu::CudaHooks(a)); },
    "simulated_gpu");
}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, simulated_gpu::DdpTimer);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated_gpu::run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(simulated_gpu::empty));
  m.impl("empty_strided", TORCH_FN(simulated_gpu::empty_strided));
  m.impl("copy_", TORCH_FN(simulated_gpu::copy_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(simulated_gpu::set_storage));
  m.impl("set_.source_Storage", TORCH_FN(simulated_gpu::set_whole_storage));
  m.impl("set_.source_Tensor", TORCH_FN(simulated_gpu::set_tensor));
  m.impl("set_", TORCH_FN(simulated_gpu::set_to_empty));
  m.impl("resize_", TORCH_FN(simulated_gpu::resize_));
  m.impl("record_stream", TORCH_FN(simulated_gpu::record_stream));
  m.impl("_softmax", torch::CppFunction::makeFromBoxedFunction<&simulated_gpu::softmax_with_widening>());
  m.impl("_log_softmax", torch::CppFunction::makeFromBoxedFunction<&simulated_gpu::softmax_with_widening>());
  m.impl("_softmax_backward_data",
         torch::CppFunction::makeFromBoxedFunction<&simulated_gpu::softmax_backward_with_narrowing>());
  m.impl("_log_softmax_backward_data",
         torch::CppFunction::makeFromBoxedFunction<&simulated_gpu::softmax_backward_with_narrowing>());
  m.impl("scaled_dot_product_attention", TORCH_FN(simulated_gpu::sdpa));
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", TORCH_FN(simulated_gpu::sdpa)); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", [](int devices, int64_t total) {
    simulated_gpu::device_count = devices;
    simulated_gpu::total_memory_bytes = total;
    c10::SetAllocator(c10::DeviceType::CUDA, &simulated_gpu::device_allocator, 200);
    c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(
        &simulated_gpu::device_guard);
    // `import torch` keeps hooks without data, which get the methods of ours.
    static simulated_gpu::CudaHooks hooks{at::CUDAHooksArgs{}};
    auto* held = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
    std::memcpy(static_cast<void*>(held), static_cast<void*>(&hooks), sizeof(void*));
    return at::globalContext().hasCUDA();
  });
  m.def("device_count", [] { return simulated_gpu::device_count; });
  m.def("require_initialization", [] { torch::utils::set_requires_device_init(c10::DeviceType::CUDA, true); });
  m.def("create_nccl", [](const c10::intrusive_ptr<c10d::Backend>& gloo) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<simulated_gpu::SimulatedNccl>(gloo));
  });
  m.def("get_device", [] { return int(simulated_gpu::current_device_index); });
  m.def("set_device", [](int d) { simulated_gpu::device_guard.setDevice(c10::Device(c10::DeviceType::CUDA, d)); });
  m.def("exchange_device", [](int d) {
    int o = simulated_gpu::current_device_index;
    if (d >= 0) simulated_gpu::device_guard.setDevice(c10::Device(c10::DeviceType::CUDA, d));
    return o;
  });
  m.def("stream",
        [](int d) { return int64_t(simulated_gpu::current_streams[d < 0 ? simulated_gpu::current_device_index : d]); });
  m.def("set_stream", [](int64_t id, int d) { simulated_gpu::current_streams[d] = id; });
  m.def("new_stream", [] { return int64_t(simulated_gpu::next_stream_id++); });
  m.def("synchronize", [](int d) { simulated_gpu::device_guard.synchronizeDevice(d); });
  m.def("generator", [](int d) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(simulated_gpu::default_generator(d)));
  });
  m.def("memory", [](int d) {
    auto& s = simulated_gpu::memory_stats[d];
    py::dict r;
    r["current"] = s.current.load();
    r["peak"] = s.peak.load();
    r["reserved"] = s.reserved.load();
    r["reserved_peak"] = s.reserved_peak.load();
    r["allocations"] = s.allocations.load();
    r["frees"] = s.frees.load();
    r["ooms"] = s.ooms.load();
    r["limit"] = s.limit.load() < 0 ? simulated_gpu::total_memory_bytes : s.limit.load();
    return r;
  });
  m.def("reset_peak", [](int d) { simulated_gpu::device_allocator.resetPeakStats(d); });
  m.def("empty_cache", [] { simulated_gpu::device_allocator.emptyCache({0, 0}); });
  m.def("set_limit", [](int d, int64_t n) { simulated_gpu::memory_stats[d].limit = n; });
  m.def("fill_fresh_memory", [](bool on) { simulated_gpu::fills_fresh_memory = on; });
  m.def("defer_copies", [](bool on) { simulated_gpu::defers_copies = on; });
  m.def("pending", [] {
    std::lock_guard<std::recursive_mutex> lock(simulated_gpu::pending_mutex);
    return simulated_gpu::pending_copies.size();
  });
  m.def("pinned_blocks", [] {
    std::lock_guard<std::mutex> lock(simulated_gpu::pinned_mutex);
    return simulated_gpu::pinned_ranges.size();
  });
  m.def("resize_storage", &simulated_gpu::resize_device_storage);
  m.def("counts", [] {
    std::lock_guard<std::mutex> lock(simulated_gpu::counts_mutex);
    return simulated_gpu::counts_by_kind;
  });
  m.def("reset_counts", [] {
    std::lock_guard<std::mutex> lock(simulated_gpu::counts_mutex);
    simulated_gpu::counts_by_kind.clear();
  });
  m.def("set_callback", [](py::object f) {
    Py_XDECREF(simulated_gpu::on_count);
    simulated_gpu::on_count = f.is_none() ? nullptr : f.release().ptr();
  });
}
