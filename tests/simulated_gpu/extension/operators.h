// Operators whose CPU kernel cannot run on device memory: creation, copies, storages, attention, widening softmax.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <limits>
#include "run_on_host.h"

namespace simulated_gpu {
static DeviceIndex resolve_index(std::optional<Device> d) {
  auto index = d && d->has_index() ? d->index() : current_device_index;
  TORCH_CHECK(index < device_count, "CUDA error: invalid device ordinal");
  return index;
}
struct CurrentDeviceScope {
  DeviceIndex old;
  explicit CurrentDeviceScope(DeviceIndex d) : old(current_device_index) { current_device_index = d; }
  ~CurrentDeviceScope() { current_device_index = old; }
};

static at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                        std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  CurrentDeviceScope with(resolve_index(device));
  return at::detail::empty_generic(size, &device_allocator, DispatchKeySet(DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}
static at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout> layout, std::optional<Device> device,
                                std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  CurrentDeviceScope with(resolve_index(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator, DispatchKeySet(DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

static void fill_with_garbage(at::Tensor& t) {
  if (at::isFloatingType(t.scalar_type()))
    t.fill_(std::numeric_limits<double>::quiet_NaN());
  else if (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte)
    t.fill_(1);
  else
    t.fill_(-77);
}

static at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (self.is_same(src)) return self;
  BelowAutogradAndAutocast guard;
  HostViews views;
  auto a = self.is_cuda() ? views.make_view(self) : self;
  auto b = src.is_cuda() ? views.make_view(src) : src;
  auto what = [&] { return c10::str(src.device(), " -> ", self.device(), " ", src.dtype(), " ", src.sizes()); };
  if (self.is_cuda() && src.is_cuda()) {
    if (self.device() != src.device()) count_event("copy:peer", "copy", src.nbytes());
    a.copy_(b);
  } else if (self.is_cuda()) {
    auto d = self.device().index();
    bool pinned = src.numel() && is_pinned(src.storage().data());
    if (self.numel() == 0) return self;
    if (pinned) complete_copies_into(src.storage().data(), d, current_streams[d]);
    if (non_blocking && pinned) {
      count_event("copy:h2d_async", what(), src.nbytes());
      if (defers_copies && b.is_contiguous()) {
        std::lock_guard<std::recursive_mutex> lock(pending_mutex);
        pending_copies.push_back({d, current_streams[d], ++last_copy_number, at::Tensor(), b.detach().clone(), b});
      }
    } else if (non_blocking) {
      count_event("copy:h2d_pageable_nonblocking", what(), src.nbytes());
    } else {
      count_event("sync:h2d", what(), src.nbytes());
      complete_copies(d, current_streams[d], INT64_MAX);
    }
    a.copy_(b);
  } else {
    auto d = src.device().index();
    if (self.numel() == 0) return self;
    bool pinned = is_pinned(self.storage().data());
    if (non_blocking && pinned) {
      count_event("copy:d2h_async", what(), src.nbytes());
      if (defers_copies) {
        std::lock_guard<std::recursive_mutex> lock(pending_mutex);
        pending_copies.push_back({d, current_streams[d], ++last_copy_number, a.detach(), b.clone(), at::Tensor()});
        at::Tensor dst = a.detach();
        fill_with_garbage(dst);
        return self;
      }
    } else {
      count_event("sync:d2h", what(), src.nbytes());
      complete_copies(d, current_streams[d], INT64_MAX);
    }
    a.copy_(b);
  }
  return self;
}

static at::Tensor& set_storage(at::Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size,
                               at::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device() || !self.has_storage() || self.storage().nbytes() == 0,
              "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(),
              "\".  This is no longer allowed; the devices must match.");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr || (stride.empty() && !size.empty())) {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  } else
    impl->set_sizes_and_strides(size, stride, offset);
  auto need = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.dtype().itemsize(), offset);
  TORCH_CHECK(self.numel() == 0 || need <= self.storage().nbytes(),
              "simulated GPU: set_ beyond the storage is not simulated");
  return self;
}
static at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  int64_t n = source.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(source), 0, {n}, {});
}
static at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
static at::Tensor& set_to_empty(at::Tensor& self) {
  CurrentDeviceScope with(self.device().index());
  Storage s(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), 0, device_allocator.allocate(0),
                                             &device_allocator, true));
  return set_storage(self, std::move(s), 0, {0}, {});
}
static const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  int64_t numel = c10::multiply_integers(size);
  size_t need = (numel + self.storage_offset()) * self.dtype().itemsize();
  if (self.storage().nbytes() < need && numel) {
    CurrentDeviceScope with(self.device().index());
    auto ptr = device_allocator.allocate(need);
    std::memcpy(ptr.get(), self.storage().data(), self.storage().nbytes());
    auto storage = self.storage();
    storage.set_data_ptr(std::move(ptr));
    storage.set_nbytes(need);
  }
  if (impl->sizes() != size) impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve && *format != at::MemoryFormat::Contiguous)
    impl->empty_tensor_restride(*format);
  return self;
}
static void record_stream(at::Tensor&, c10::Stream) {}
static void resize_device_storage(const at::Tensor& owner, int64_t nbytes) {
  auto storage = owner.storage();
  CurrentDeviceScope with(owner.device().index());
  auto ptr = device_allocator.allocate(nbytes);
  std::memcpy(ptr.get(), storage.data(), std::min<size_t>(nbytes, storage.nbytes()));
  storage.set_data_ptr(std::move(ptr));
  storage.set_nbytes(nbytes);
}

static at::Tensor sdpa(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const std::optional<at::Tensor>& mask, double p, bool causal, std::optional<double> scale,
                       bool gqa) {
  std::optional<at::Tensor> m = mask;
  if (m && m->defined() && m->scalar_type() == at::kBool) {
    m = at::zeros_like(*m, q.options()).masked_fill_(m->logical_not(), -std::numeric_limits<double>::infinity());
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, m, p, causal, std::nullopt, scale, gqa));
}

// Only the CUDA kernels of softmax take half precision and return float. Arguments: self, dim, half_to_float.
static void softmax_with_widening(const c10::OperatorHandle& op, DispatchKeySet ks, torch::jit::Stack* stack) {
  auto& v = (*stack)[stack->size() - 1];
  if (v.toBool()) {
    (*stack)[stack->size() - 3] = c10::IValue((*stack)[stack->size() - 3].toTensor().to(at::kFloat));
    (*stack)[stack->size() - 1] = c10::IValue(false);
  }
  run_on_host(op, ks, stack);
}
// Arguments: grad, output, dim, input_dtype.
static void softmax_backward_with_narrowing(const c10::OperatorHandle& op, DispatchKeySet ks,
                                            torch::jit::Stack* stack) {
  auto dtype = (*stack)[stack->size() - 1].toScalarType();
  auto of_grad = (*stack)[stack->size() - 4].toTensor().scalar_type();
  if (dtype == of_grad) return run_on_host(op, ks, stack);
  (*stack)[stack->size() - 1] = c10::IValue(of_grad);
  run_on_host(op, ks, stack);
  BelowAutogradAndAutocast guard;
  stack->back() = c10::IValue(stack->back().toTensor().to(dtype));
}

}  // namespace simulated_gpu
