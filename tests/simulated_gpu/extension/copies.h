// Copies between host and device that the host does not wait for.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <vector>
#include "memory.h"

namespace simulated_gpu {
struct PendingCopy {
  DeviceIndex device;
  c10::StreamId stream;
  int64_t seq;
  // To the host: `dst` holds garbage until the copy completes, then `snapshot`.
  // To the device: `source` must still equal `snapshot` when the copy completes.
  at::Tensor dst, snapshot, source;
};
static std::vector<PendingCopy> pending_copies;
static std::recursive_mutex pending_mutex;
static std::atomic<int64_t> last_copy_number{0};
static bool defers_copies = true;

struct BelowAutogradAndAutocast {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

static void complete_copies(std::optional<DeviceIndex> device, std::optional<c10::StreamId> stream, int64_t upto) {
  std::lock_guard<std::recursive_mutex> lock(pending_mutex);
  if (pending_copies.empty()) return;
  BelowAutogradAndAutocast guard;
  std::vector<PendingCopy> rest;
  for (auto& p : pending_copies) {
    bool due = (!device || *device == p.device) && (!stream || *stream == p.stream) && p.seq <= upto;
    if (!due) {
      rest.push_back(p);
      continue;
    }
    if (p.dst.defined()) {
      p.dst.copy_(p.snapshot);
    } else if (p.source.defined()) {
      if (!at::equal(p.source.view({-1}).view(at::kByte), p.snapshot.view({-1}).view(at::kByte)))
        count_event("race:pinned_source_overwritten", "", p.source.nbytes());
    }
  }
  pending_copies.swap(rest);
}
static bool has_pending_copies(DeviceIndex device, c10::StreamId stream, int64_t upto) {
  std::lock_guard<std::recursive_mutex> lock(pending_mutex);
  for (auto& p : pending_copies)
    if (p.device == device && p.stream == stream && p.seq <= upto) return true;
  return false;
}

// A later copy of the same stream reads what an earlier one wrote to the host.
static void complete_copies_into(const void* at, DeviceIndex device, c10::StreamId stream) {
  std::lock_guard<std::recursive_mutex> lock(pending_mutex);
  for (auto& p : pending_copies) {
    if (p.dst.defined() && p.device == device && p.stream == stream && p.dst.storage().data() == at) {
      BelowAutogradAndAutocast guard;
      p.dst.copy_(p.snapshot);
    }
  }
}

}  // namespace simulated_gpu
