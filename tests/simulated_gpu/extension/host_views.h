// CPU tensors over the memory of device tensors, on which CPU kernels compute.
#pragma once
#include <unordered_map>
#include "hooks.h"

namespace simulated_gpu {
struct HostViews {
  std::unordered_map<StorageImpl*, std::pair<Storage, Storage>> storages_by_host;  // CPU storage -> (CPU, CUDA)
  std::unordered_map<StorageImpl*, Storage> host_by_device;                        // CUDA storage -> CPU
  // Memory of a CPU storage when its view was made.
  std::unordered_map<StorageImpl*, void*> data;
  // Dispatch keys of a CUDA tensor over a CPU storage, which the views of that tensor have too.
  std::unordered_map<StorageImpl*, DispatchKeySet> keys;

  at::Tensor make_view(const at::Tensor& t) {
    auto* impl = t.unsafeGetTensorImpl();
    TORCH_CHECK(impl->has_storage(),
                "simulated GPU: a CUDA tensor without storage (sparse, nested...) is not simulated");
    Storage cuda = t.storage();
    auto found = host_by_device.find(cuda.unsafeGetStorageImpl());
    Storage cpu;
    if (found != host_by_device.end()) {
      cpu = found->second;
    } else {
      void* data_ptr = cuda.mutable_data();
      cpu = Storage(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), cuda.nbytes(),
                                                     c10::DataPtr(data_ptr, Device(DeviceType::CPU)),
                                                     c10::GetCPUAllocator(), true));
      host_by_device.emplace(cuda.unsafeGetStorageImpl(), cpu);
      storages_by_host.emplace(cpu.unsafeGetStorageImpl(), std::make_pair(cpu, cuda));
      data.emplace(cpu.unsafeGetStorageImpl(), data_ptr);
      keys.emplace(cpu.unsafeGetStorageImpl(), t.key_set());
    }
    auto out = at::detail::make_tensor<c10::TensorImpl>(Storage(cpu), DispatchKeySet(DispatchKey::CPU), t.dtype());
    auto* o = out.unsafeGetTensorImpl();
    o->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (impl->is_wrapped_number()) o->set_wrapped_number(true);
    if (t.is_conj()) out._set_conj(true);
    if (t.is_neg()) out._set_neg(true);
    return out;
  }

  // A CPU kernel may have resized or moved the memory of a tensor that it writes to.
  void write_back(const at::Tensor& cuda_tensor, const at::Tensor& cpu_tensor, DeviceIndex d) {
    auto* c = cuda_tensor.unsafeGetTensorImpl();
    Storage cpu = cpu_tensor.storage();
    auto it = storages_by_host.find(cpu.unsafeGetStorageImpl());
    if (it == storages_by_host.end()) {
      c->set_storage_keep_dtype(wrap_storage(cpu, d));
    } else if (cpu.mutable_data() != data[cpu.unsafeGetStorageImpl()]) {
      auto nbytes = cpu.nbytes();
      Storage cuda = it->second.second;
      auto ptr = cpu.set_data_ptr(c10::DataPtr(nullptr, Device(DeviceType::CPU)));
      void* raw = ptr.get();
      cuda.set_data_ptr(make_device_ptr(std::move(ptr), d, nbytes));
      cuda.set_nbytes(nbytes);
      cpu.set_data_ptr(c10::DataPtr(raw, Device(DeviceType::CPU)));
      data[cpu.unsafeGetStorageImpl()] = raw;
    }
    if (cuda_tensor.sizes() != cpu_tensor.sizes() || cuda_tensor.strides() != cpu_tensor.strides() ||
        cuda_tensor.storage_offset() != cpu_tensor.storage_offset())
      c->set_sizes_and_strides(cpu_tensor.sizes(), cpu_tensor.strides(), cpu_tensor.storage_offset());
  }

  Storage wrap_storage(Storage cpu, DeviceIndex d) {
    auto nbytes = cpu.nbytes();
    void* raw = cpu.mutable_data();
    auto* keep = new Storage(cpu);
    c10::DataPtr host(raw, keep, [](void* ctx) { delete static_cast<Storage*>(ctx); }, Device(DeviceType::CPU));
    Storage cuda(c10::make_intrusive<StorageImpl>(
        StorageImpl::use_byte_size_t(), nbytes, make_device_ptr(std::move(host), d, nbytes), &device_allocator, true));
    storages_by_host.emplace(cpu.unsafeGetStorageImpl(), std::make_pair(cpu, cuda));
    data.emplace(cpu.unsafeGetStorageImpl(), raw);
    return cuda;
  }

  at::Tensor wrap_output(const at::Tensor& cpu_out, DeviceIndex d) {
    if (!cpu_out.defined() || !cpu_out.is_cpu()) return cpu_out;
    Storage cpu = cpu_out.storage();
    auto it = storages_by_host.find(cpu.unsafeGetStorageImpl());
    Storage cuda = it != storages_by_host.end() ? it->second.second : wrap_storage(cpu, d);
    auto view_of = keys.find(cpu.unsafeGetStorageImpl());
    auto out = view_of != keys.end() ? at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(cuda),
                                                                                view_of->second, cpu_out.dtype())
                                     : at::detail::make_tensor<c10::TensorImpl>(
                                           std::move(cuda), DispatchKeySet(DispatchKey::CUDA), cpu_out.dtype());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(cpu_out.sizes(), cpu_out.strides(), cpu_out.storage_offset());
    if (cpu_out.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
    if (cpu_out.is_conj()) out._set_conj(true);
    if (cpu_out.is_neg()) out._set_neg(true);
    return out;
  }
};

}  // namespace simulated_gpu
