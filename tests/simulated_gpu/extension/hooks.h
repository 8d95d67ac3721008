// Answers to torch's questions about CUDA.
#pragma once
#include <ATen/detail/CUDAHooksInterface.h>
#include "generator.h"

namespace simulated_gpu {
struct CudaHooks final : public at::CUDAHooksInterface {
  explicit CudaHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasCUDA() const override { return device_count > 0; }
  bool hasCUDART() const override { return false; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex d = -1) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d = -1) const override {
    return at::make_generator<DeviceGenerator>(d < 0 ? current_device_index : d);
  }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, current_device_index); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  DeviceIndex current_device() const override { return current_device_index; }
  DeviceIndex deviceCount() const override { return DeviceIndex(device_count); }
  void setCurrentDevice(DeviceIndex d) const override { device_guard.setDevice(Device(DeviceType::CUDA, d)); }
  DeviceIndex getCurrentDevice() const override { return current_device_index; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto o = current_device_index;
    if (d >= 0) current_device_index = d;
    return o;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  int getNumGPUs() const override { return device_count; }
  std::string showConfig() const override { return "simulated_gpu"; }
  void deviceSynchronize(DeviceIndex d) const override { device_guard.synchronizeDevice(d); }
};

}  // namespace simulated_gpu
