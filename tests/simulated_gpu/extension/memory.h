// Device memory, which is host memory that is accounted for, and pinned memory, whose ranges are recorded.
#pragma once
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <cstring>
#include "state.h"

namespace simulated_gpu {
struct MemoryStats {
  std::atomic<int64_t> current{0}, peak{0}, reserved{0}, reserved_peak{0}, allocations{0}, frees{0}, ooms{0}, limit{-1};
};
static MemoryStats memory_stats[MAX_DEVICES];

static void record_allocation(DeviceIndex d, int64_t n) {
  auto& m = memory_stats[d];
  int64_t limit = m.limit.load();
  if (limit < 0) limit = total_memory_bytes;
  if (m.current.load() + n > limit) {
    m.ooms++;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", n / 1048576.0, " MiB. GPU ",
                     int(d), " has a total capacity of ", limit / 1048576.0, " MiB of which ",
                     (limit - m.current.load()) / 1048576.0, " MiB is free. (simulated GPU)");
  }
  int64_t now = (m.current += n);
  if (now > m.peak.load()) m.peak = now;
  if (now > m.reserved.load()) m.reserved = now;
  if (m.reserved.load() > m.reserved_peak.load()) m.reserved_peak = m.reserved.load();
  m.allocations++;
}

struct DeviceBlock {
  c10::DataPtr host;  // memory of torch's CPU allocator
  DeviceIndex device;
  int64_t nbytes;
};

static void free_device_block(void* ctx) {
  auto* block = static_cast<DeviceBlock*>(ctx);
  memory_stats[block->device].current -= block->nbytes;
  memory_stats[block->device].frees++;
  delete block;
}

static c10::DataPtr make_device_ptr(c10::DataPtr&& host, DeviceIndex d, int64_t nbytes) {
  record_allocation(d, nbytes);
  void* data = host.get();
  auto* block = new DeviceBlock{std::move(host), d, nbytes};
  return c10::DataPtr(data, block, &free_device_block, Device(DeviceType::CUDA, d));
}

struct DeviceAllocator final : public c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    auto d = current_device_index;
    auto ptr = make_device_ptr(c10::GetCPUAllocator()->allocate(n), d, n);
    if (fills_fresh_memory && n) std::memset(ptr.get(), 0xFF, n);
    return ptr;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device_block; }
  void copy_data(void* dest, const void* src, std::size_t n) const override { std::memcpy(dest, src, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int d = 0; d < device_count; ++d) memory_stats[d].reserved = memory_stats[d].current.load();
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    c10::CachingDeviceAllocator::DeviceStats s;
    auto& a = s.allocated_bytes[0];
    a.current = memory_stats[d].current;
    a.peak = memory_stats[d].peak;
    auto& r = s.reserved_bytes[0];
    r.current = memory_stats[d].reserved;
    r.peak = memory_stats[d].reserved_peak;
    return s;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override {
    memory_stats[d].peak = memory_stats[d].current.load();
    memory_stats[d].reserved_peak = memory_stats[d].reserved.load();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    int64_t limit = memory_stats[d].limit.load() < 0 ? total_memory_bytes : memory_stats[d].limit.load();
    return {size_t(std::max<int64_t>(0, limit - memory_stats[d].reserved)), size_t(limit)};
  }
};
static DeviceAllocator device_allocator;

static std::map<const char*, size_t> pinned_ranges;
static std::mutex pinned_mutex;
struct PinnedBlock {
  c10::DataPtr host;
  const char* at;
};
static void free_pinned_block(void* ctx) {
  auto* b = static_cast<PinnedBlock*>(ctx);
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_ranges.erase(b->at);
  }
  delete b;
}
static bool is_pinned(const void* p) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto it = pinned_ranges.upper_bound(static_cast<const char*>(p));
  if (it == pinned_ranges.begin()) return false;
  --it;
  return static_cast<const char*>(p) < it->first + it->second;
}
struct PinnedAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &free_pinned_block, Device(DeviceType::CPU)};
    auto host = c10::GetCPUAllocator()->allocate(n);
    void* data = host.get();
    auto* b = new PinnedBlock{std::move(host), static_cast<const char*>(data)};
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned_ranges[b->at] = n;
    }
    return {data, b, &free_pinned_block, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned_block; }
  void copy_data(void* dest, const void* src, std::size_t n) const override { std::memcpy(dest, src, n); }
};
static PinnedAllocator pinned_allocator;

}  // namespace simulated_gpu
