#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace kvpool::attention {

/// Persistent workers that run the items of a job beside the thread that brings it.
/// Thread-safe: several threads may bring jobs at once; workers share them out.
class ThreadPool {
 public:
  /// @param n_threads  threads that work on a job, the caller's among them; 0 for one per CPU.
  explicit ThreadPool(int n_threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int n_threads() const noexcept { return static_cast<int>(workers_.size()) + 1; }

  /// Calls run(0) ... run(n_items - 1), each once, in any order and on any of the threads; returns
  /// when all have returned. `run` must not throw.
  void for_each(std::size_t n_items, const std::function<void(std::size_t)>& run);

  /// The process's own pool. Its size is KVPOOL_THREADS if set, else one per CPU.
  /// @throws std::invalid_argument, at every call, if KVPOOL_THREADS is no number of threads.
  static ThreadPool& shared();

 private:
  struct Job;
  void work(const std::stop_token& stop);
  /// No thread takes up the job any more; those at it go on.
  void retire(const std::shared_ptr<Job>& job);

  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::vector<std::shared_ptr<Job>> jobs_;
  std::atomic<std::size_t> n_jobs_{0};
  std::vector<std::jthread> workers_;
};

}  // namespace kvpool::attention
