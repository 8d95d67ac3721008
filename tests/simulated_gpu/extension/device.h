// Current device, streams and events, as torch's device guard uses them.
#pragma once
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <chrono>
#include "copies.h"

namespace simulated_gpu {
struct RecordedEvent {
  DeviceIndex device;
  c10::StreamId stream;
  int64_t seq;
  double when;
  int polls;
};
static double now_in_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

struct DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
  DeviceGuard() = default;
  explicit DeviceGuard(DeviceType) {}
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override {
    auto old = getDevice();
    if (d.index() >= 0) current_device_index = d.index();
    return old;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device_index); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < device_count, "CUDA error: invalid device ordinal");
    if (d.index() >= 0) current_device_index = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current_device_index = d.index();
  }
  Stream make(Device d, c10::StreamId id) const {
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, d.index() < 0 ? current_device_index : d.index()), id);
  }
  Stream getStream(Device d) const override {
    return make(d, current_streams[d.index() < 0 ? current_device_index : d.index()]);
  }
  Stream getDefaultStream(Device d) const override { return make(d, 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return make(d, next_stream_id++); }
  Stream getNewStream(Device d, int) const override { return make(d, next_stream_id++); }
  Stream exchangeStream(Stream s) const override {
    auto old = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<RecordedEvent*>(event);
  }
  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new RecordedEvent();
    *static_cast<RecordedEvent*>(*event) =
        RecordedEvent{s.device_index(), s.id(), last_copy_number.load(), now_in_ms(), 0};
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    auto* e = static_cast<RecordedEvent*>(event);
    if (has_pending_copies(e->device, e->stream, e->seq) && e->polls++ < 1) return false;
    complete_copies(e->device, e->stream, e->seq);
    return true;
  }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(device_count); }
  bool queryStream(const Stream& s) const override {
    complete_copies(s.device_index(), s.id(), INT64_MAX);
    return true;
  }
  void synchronizeStream(const Stream& s) const override {
    count_event("sync:stream", "stream.synchronize", 0);
    complete_copies(s.device_index(), s.id(), INT64_MAX);
  }
  bool isStreamCapturing(const Stream&) const override { return false; }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    auto* e = static_cast<RecordedEvent*>(event);
    count_event("sync:event", "event.synchronize", 0);
    complete_copies(e->device, e->stream, e->seq);
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    count_event("sync:device", "synchronize", 0);
    complete_copies(d < 0 ? current_device_index : d, std::nullopt, INT64_MAX);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    TORCH_CHECK(a && b, "Both events must be recorded before calculating elapsed time.");
    return static_cast<RecordedEvent*>(b)->when - static_cast<RecordedEvent*>(a)->when;
  }
};
static DeviceGuard device_guard;

}  // namespace simulated_gpu
