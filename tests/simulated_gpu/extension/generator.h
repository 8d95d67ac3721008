// Random numbers: a seed and an offset, as CUDA's Philox generator has them.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <cstring>
#include "device.h"

namespace simulated_gpu {
static uint64_t mix_bits(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}
struct DeviceGenerator : public c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit DeviceGenerator(DeviceIndex d)
      : GeneratorImpl(Device(DeviceType::CUDA, d), DispatchKeySet(DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t s) override {
    seed_ = s;
    offset_ = 0;
  }
  void set_offset(uint64_t o) override { offset_ = o; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    auto s = c10::detail::getNonDeterministicRandom(true);
    set_current_seed(s);
    return s;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 16 || state.numel() == 8, "RNG state is wrong size");
    auto* p = static_cast<const char*>(state.data());
    std::memcpy(&seed_, p, 8);
    offset_ = 0;
    if (state.numel() == 16) std::memcpy(&offset_, p + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::detail::empty_cpu({16}, at::kByte, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
    auto* p = static_cast<char*>(t.data_ptr());
    std::memcpy(p, &seed_, 8);
    std::memcpy(p + 8, &offset_, 8);
    return t.getIntrusivePtr();
  }
  static DeviceType device_type() { return DeviceType::CUDA; }
  DeviceGenerator* clone_impl() const override {
    auto* g = new DeviceGenerator(device_.index());
    g->seed_ = seed_;
    g->offset_ = offset_;
    return g;
  }
  uint64_t next() {
    auto r = mix_bits(seed_ ^ mix_bits(offset_));
    offset_ += 4;
    return r;
  }
};
static at::Generator default_generators[MAX_DEVICES];
static at::Generator& default_generator(DeviceIndex d) {
  static std::once_flag once;
  std::call_once(once, [] {
    for (int i = 0; i < MAX_DEVICES; ++i) default_generators[i] = at::make_generator<DeviceGenerator>(DeviceIndex(i));
  });
  return default_generators[d < 0 ? current_device_index : d];
}

}  // namespace simulated_gpu
