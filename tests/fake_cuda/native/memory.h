// Memory of the cards, which the host cannot touch; page-locked memory; copies under way.
#pragma once

#include "cards.h"

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <sys/mman.h>

#include <cstring>
#include <map>

namespace fake_cuda {

// --- memory of the cards

struct Block {
  size_t size;
  int card;
  int times_open;
};
inline std::map<char*, Block> blocks;  // by their first byte
inline std::mutex blocks_mutex;
inline std::atomic<int64_t> used_bytes[kMostCards], peak_bytes[kMostCards];

inline void free_block(void* pointer) {
  std::lock_guard<std::mutex> guard(blocks_mutex);
  const auto found = blocks.find(static_cast<char*>(pointer));
  if (found == blocks.end()) return;
  used_bytes[found->second.card] -= found->second.size;
  munmap(pointer, found->second.size);
  blocks.erase(found);
}

// Lets CPU kernels access the memory of tensors on a card, as long as this object lives.
class Opened {
 public:
  void add(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda() || tensor.storage().nbytes() == 0) return;
    std::lock_guard<std::mutex> guard(blocks_mutex);
    const auto pointer = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
    auto found = blocks.upper_bound(pointer);
    if (found == blocks.begin()) return;
    --found;
    if (pointer >= found->first + found->second.size) return;
    if (found->second.times_open++ == 0)
      mprotect(found->first, found->second.size, PROT_READ | PROT_WRITE);
    opened_.push_back(found->first);
  }
  ~Opened() {
    std::lock_guard<std::mutex> guard(blocks_mutex);
    for (char* begin : opened_) {
      const auto found = blocks.find(begin);
      if (found != blocks.end() && --found->second.times_open == 0)
        mprotect(begin, found->second.size, PROT_NONE);
    }
  }

 private:
  std::vector<char*> opened_;
};

struct CardAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    const int card = current_card;
    use(card);
    const c10::Device device(c10::DeviceType::CUDA, card);
    if (num_bytes == 0) return {nullptr, nullptr, &free_block, device};
    const size_t size = (num_bytes + 4095) / 4096 * 4096;
    const int64_t after = used_bytes[card] += size;
    if (after > total_bytes(card)) {
      used_bytes[card] -= size;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size,
                       " bytes. GPU ", card, " has a total capacity of ", total_bytes(card),
                       " bytes of which ", total_bytes(card) - used_bytes[card], " are free.");
    }
    if (after > peak_bytes[card]) peak_bytes[card] = after;
    void* pointer = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(pointer != MAP_FAILED, "the host has no memory for an emulated card");
    // What is read before it is written must not look right. More would cost the host's memory.
    std::memset(pointer, 0xCD, std::min<size_t>(size, 16 << 20));
    mprotect(pointer, size, PROT_NONE);
    std::lock_guard<std::mutex> guard(blocks_mutex);
    blocks[static_cast<char*>(pointer)] = {size, card, 0};
    return {pointer, pointer, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "not emulated"); }

  // torch.accelerator's statistics. There is no cache: what is reserved is in use.
  bool initialized() override { return is_initialized(); }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex card) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = used_bytes[card];
    stats.allocated_bytes[0].peak = stats.reserved_bytes[0].peak = peak_bytes[card];
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex card) override { peak_bytes[card] = used_bytes[card].load(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex card) override {
    use(card);
    return {total_bytes(card) - used_bytes[card], total_bytes(card)};
  }
};
inline CardAllocator card_allocator;

// --- page-locked memory of the host: torch's own, and what cudaHostRegister has locked

inline std::map<char*, size_t> pinned_ranges;  // sizes by their first byte
inline std::mutex pinned_mutex;

inline std::map<char*, size_t>::iterator pinned_before(char* pointer) {
  const auto after = pinned_ranges.upper_bound(pointer);
  return after == pinned_ranges.begin() ? pinned_ranges.end() : std::prev(after);
}

inline bool is_pinned(const void* given) {
  const auto pointer = static_cast<char*>(const_cast<void*>(given));
  std::lock_guard<std::mutex> guard(pinned_mutex);
  const auto found = pinned_before(pointer);
  return found != pinned_ranges.end() && pointer < found->first + found->second;
}

inline void free_pinned(void* pointer) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  if (pinned_ranges.erase(static_cast<char*>(pointer)) > 0) std::free(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    use(current_card);
    const size_t size = std::max<size_t>(num_bytes, 64);
    void* pointer = nullptr;
    if (posix_memalign(&pointer, 64, size) != 0) throw std::bad_alloc();
    report("pin", "pin_memory", num_bytes, current_card, true, false);
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned_ranges[static_cast<char*>(pointer)] = size;
    return {pointer, pointer, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};
inline PinnedAllocator pinned_allocator;

// The numbers of cudaError.
constexpr int kSuccess = 0, kInvalidValue = 1, kAlreadyRegistered = 712, kNotRegistered = 713;

inline int register_host(char* begin, size_t size) {
  if (begin == nullptr || size == 0) return kInvalidValue;
  {
    std::lock_guard<std::mutex> guard(pinned_mutex);
    const auto last = pinned_before(begin + size - 1);
    if (last != pinned_ranges.end() && last->first + last->second > begin) return kAlreadyRegistered;
    pinned_ranges[begin] = size;
  }
  report("pin", "cudaHostRegister", size, current_card, true, true);
  return kSuccess;
}

inline int unregister_host(char* begin) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  return pinned_ranges.erase(begin) > 0 ? kSuccess : kNotRegistered;
}

// --- copies under way: until the host waits for one, it must neither read nor change its memory

struct PendingCopy {
  at::Tensor host, snapshot;
  bool to_host;
  int64_t number;
};
inline std::vector<PendingCopy> pending_copies[kMostCards];
inline std::atomic<int64_t> num_copies{0};
inline std::mutex pending_mutex;

inline void add_pending(int card, at::Tensor host, at::Tensor snapshot, bool to_host) {
  std::lock_guard<std::mutex> guard(pending_mutex);
  pending_copies[card].push_back({std::move(host), std::move(snapshot), to_host, ++num_copies});
}

inline bool same_bytes(const at::Tensor& one, const at::Tensor& other) {
  return one.contiguous().view(-1).view(at::kByte).equal(
      other.contiguous().view(-1).view(at::kByte));
}

// Wait until a card has done what it had to do at a time, with the copies up to a number.
inline void wait_until(int card, double time, int64_t last_copy) {
  check_alive(card);
  sleep_until(time);
  std::vector<PendingCopy> done;
  {
    std::lock_guard<std::mutex> guard(pending_mutex);
    auto& all = pending_copies[card];
    const auto is_later = [&](const PendingCopy& copy) { return copy.number > last_copy; };
    const auto middle = std::stable_partition(all.begin(), all.end(), is_later);
    std::move(middle, all.end(), std::back_inserter(done));
    all.erase(middle, all.end());
  }
  for (auto& copy : done) {
    bool has_changed = false;
    {
      Inside inside;
      at::AutoDispatchBelowADInplaceOrView no_autograd;
      if (copy.to_host) copy.host.copy_(copy.snapshot);
      else has_changed = !same_bytes(copy.host, copy.snapshot);
    }
    if (has_changed) report("race", "the host changed what a card still reads", copy.host.nbytes(), card);
  }
}

inline void wait_for(int card) { wait_until(card, busy_until(card), num_copies.load()); }

}  // namespace fake_cuda
