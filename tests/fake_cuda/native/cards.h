// The cards: how many there are, how large and fast each is, which of them this process sees, and
// what it reports. A card is named by its index in this process, as in torch.
#pragma once

#include <c10/util/Exception.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace fake_cuda {

constexpr int kMostCards = 8;

// --- settings: FAKE_CUDA_<NAME>, with one value per card of the machine

inline std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

inline std::string setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

// The last value also holds for the cards after it.
inline std::vector<double> per_card(const char* name, const char* otherwise) {
  std::vector<double> values;
  for (const auto& part : split(setting(name, otherwise))) values.push_back(std::atof(part.c_str()));
  values.resize(kMostCards, values.back());
  return values;
}

inline std::vector<std::string> uuids() {
  auto names = split(setting("FAKE_CUDA_UUIDS", ""));
  for (int card = names.size(); card < kMostCards; ++card) {
    std::string name = "GPU-00000000-0000-0000-0000-000000000000";
    std::replace(name.begin(), name.end(), '0', static_cast<char>('0' + card));
    names.push_back(name);
  }
  return names;
}

// --- which cards this process sees

// Numbers of the machine's cards, by the rules of CUDA_VISIBLE_DEVICES: what comes after an entry
// that names no card is ignored, and of several MIG instances a process sees only the first.
inline std::vector<int> read_visible() {
  const int count = std::min(std::atoi(setting("FAKE_CUDA_DEVICES", "2").c_str()), kMostCards);
  const auto names = uuids();
  std::vector<int> found;
  const char* wanted = std::getenv("CUDA_VISIBLE_DEVICES");
  if (wanted == nullptr) {
    for (int card = 0; card < count; ++card) found.push_back(card);
  } else {
    for (const auto& entry : split(wanted)) {
      std::vector<int> matches;
      const bool is_index = !entry.empty() && entry.find_first_not_of("0123456789") == std::string::npos;
      for (int card = 0; card < count; ++card) {
        const bool is_named = entry.size() > 4 && names[card].rfind(entry, 0) == 0;
        if (is_index ? std::atoi(entry.c_str()) == card : is_named) matches.push_back(card);
      }
      if (matches.size() != 1) break;
      if (std::count(found.begin(), found.end(), matches[0]) > 0) return {};
      found.push_back(matches[0]);
    }
  }
  for (int card : found) {
    if (names[card].rfind("MIG-", 0) == 0) return {card};
  }
  return found;
}

inline std::atomic<pid_t> initialized_in{0};  // the process that has used a card

inline bool is_initialized() { return initialized_in.load() == getpid(); }

// Like CUDA, reads the variable until the first use of a card.
inline std::vector<int> visible() {
  static std::mutex mutex;
  static std::vector<int> cards;
  static bool is_final = false;
  std::lock_guard<std::mutex> guard(mutex);
  if (!is_final) cards = read_visible();
  is_final = initialized_in.load() != 0;
  return cards;
}

inline int count_cards() { return visible().size(); }

inline int64_t total_bytes(int card) {
  static const auto bytes = per_card("FAKE_CUDA_MEMORY", "4e9");
  return static_cast<int64_t>(bytes[visible().at(card)]);
}

inline double kernel_seconds(int card) {
  static const auto microseconds = per_card("FAKE_CUDA_KERNEL_US", "0");
  return microseconds[visible().at(card)] * 1e-6;
}

inline thread_local int current_card = 0;

// --- reports

// kind, what, bytes, card, whether the host's memory is pinned, whether the host waits
using Reporter = void (*)(const char*, const char*, int64_t, int, int, int);
inline std::atomic<Reporter> reporter{nullptr};
inline std::atomic<bool> reports_kernels{false};

// Above 0 while a CPU kernel does a card's work on this thread: what it calls is no work of its own.
inline thread_local int depth = 0;

struct Inside {
  Inside() { ++depth; }
  ~Inside() { --depth; }
};

inline void report(const char* kind, const char* what, int64_t bytes, int card, bool pinned = false,
                   bool blocking = true) {
  const Reporter function = reporter.load();
  if (function == nullptr || depth > 0) return;
  Inside inside;
  function(kind, what, bytes, card, pinned, blocking);
}

// --- errors that stay: after a failed kernel, every call fails until the process ends

constexpr int kDeviceAssert = 710;
inline std::atomic<bool> has_failed[kMostCards];

inline void check_alive(int card) {
  if (!has_failed[card].load()) return;
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, kDeviceAssert,
                              "CUDA error: device-side assert triggered");
}

// Begin to use a card. The child of a process that has used one may not, as with CUDA.
inline void use(int card) {
  TORCH_CHECK(card < count_cards(), "CUDA error: invalid device ordinal");
  pid_t none = 0;
  const pid_t here = getpid();
  if (!initialized_in.compare_exchange_strong(none, here))
    TORCH_CHECK(initialized_in.load() == here, "Cannot re-initialize CUDA in forked subprocess");
  check_alive(card);
}

// --- time: kernels take the card's time, and the host only launches them

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Timeline {
  std::mutex mutex;
  double busy_until = 0;
};
inline Timeline timelines[kMostCards];

inline double busy_until(int card) {
  std::lock_guard<std::mutex> guard(timelines[card].mutex);
  return timelines[card].busy_until;
}

inline void launch(int card) {
  const double seconds = kernel_seconds(card);
  if (seconds <= 0) return;
  std::lock_guard<std::mutex> guard(timelines[card].mutex);
  timelines[card].busy_until = std::max(timelines[card].busy_until, now()) + seconds;
}

inline void launch_kernel(int card, const char* name) {
  static const auto failing = per_card("FAKE_CUDA_FAIL_AT", "0");
  static std::atomic<int64_t> launched[kMostCards];
  use(card);
  if (++launched[card] == static_cast<int64_t>(failing[visible().at(card)])) has_failed[card] = true;
  check_alive(card);
  if (reports_kernels.load()) report("kernel", name, 0, card, false, false);
  launch(card);
}

inline void sleep_until(double time) {
  const double start = now();
  if (time > start) std::this_thread::sleep_for(std::chrono::duration<double>(time - start));
}

}  // namespace fake_cuda
