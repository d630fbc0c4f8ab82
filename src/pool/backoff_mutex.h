#pragma once

#include <atomic>
#include <chrono>
#include <thread>

namespace kvpool::detail {

/// A mutex for critical sections of nanoseconds. Unlocking is one store: a waiter looks more and
/// more rarely, then sleeps for longer and longer, and nobody pays to wake it, so that a busy pool
/// keeps its pace however many threads want it.
class BackoffMutex {
 public:
  void lock() noexcept {
    if (!locked_.exchange(true, std::memory_order_acquire)) return;
    wait();
  }
  void unlock() noexcept { locked_.store(false, std::memory_order_release); }

 private:
  static void pause() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  void wait() noexcept {
    using std::chrono::microseconds;
    constexpr int kMostPauses = 64;
    constexpr microseconds kLongest{256};
    for (microseconds sleep{1};; sleep = sleep < kLongest ? sleep * 2 : kLongest) {
      for (int pauses = 1; pauses <= kMostPauses; pauses *= 2) {
        if (!locked_.load(std::memory_order_relaxed) &&
            !locked_.exchange(true, std::memory_order_acquire)) {
          return;
        }
        for (int i = 0; i < pauses; ++i) pause();
      }
      std::this_thread::sleep_for(sleep);
    }
  }

  std::atomic<bool> locked_{false};
};

}  // namespace kvpool::detail
