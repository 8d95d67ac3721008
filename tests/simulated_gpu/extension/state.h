// Devices of the simulation, and counts of what happens on them.
#pragma once
#include <torch/extension.h>
#include <atomic>
#include <map>
#include <mutex>
#include <string>

namespace simulated_gpu {
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;
using c10::StorageImpl;
using c10::Stream;
constexpr int MAX_DEVICES = 8;
static int device_count = 2;
static int64_t total_memory_bytes = int64_t(80) << 30;
static thread_local DeviceIndex current_device_index = 0;
static thread_local c10::StreamId current_streams[MAX_DEVICES] = {0};
static std::atomic<int64_t> next_stream_id{1};
static bool fills_fresh_memory = false;

static std::mutex counts_mutex;
static std::map<std::string, int64_t> counts_by_kind;
// A Python function that receives each count; None switches it off.
static PyObject* on_count = nullptr;

static void count_event(const std::string& kind, const std::string& what, int64_t nbytes) {
  {
    std::lock_guard<std::mutex> lock(counts_mutex);
    counts_by_kind[kind] += 1;
  }
  if (on_count != nullptr && Py_IsInitialized()) {
    py::gil_scoped_acquire gil;
    try {
      py::reinterpret_borrow<py::object>(on_count)(kind, what, nbytes);
    } catch (py::error_already_set& e) {
      e.discard_as_unraisable("simulated GPU callback");
    }
  }
}

}  // namespace simulated_gpu
