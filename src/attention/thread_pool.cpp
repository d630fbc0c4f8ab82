#include "attention/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "util/concat.h"

namespace kvpool::attention {
namespace {

/// How long a thread looks for work or for others to end before it sleeps: about what waking costs.
constexpr std::chrono::microseconds kPatience{30};

template <typename Condition>
bool spin_until(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  do {
    for (int i = 0; i < 64; ++i) {
      if (condition()) return true;
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

int n_cpus() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

int threads_by_environment() {
  const char* const text = std::getenv("KVPOOL_THREADS");
  if (text == nullptr || *text == '\0') return 0;
  const std::string_view digits(text);
  int n = 0;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), n);
  if (error != std::errc{} || end != digits.end() || n < 1 || n > 1024) {
    throw std::invalid_argument(
        detail::concat("KVPOOL_THREADS must be 1 to 1024, got '", digits, "'"));
  }
  return n;
}

}  // namespace

struct ThreadPool::Job {
  const std::function<void(std::size_t)>* run;
  std::size_t n_items;
  std::atomic<std::size_t> next{0};
  std::atomic<std::size_t> n_done{0};

  Job(const std::function<void(std::size_t)>& r, std::size_t n) : run(&r), n_items(n) {}

  bool done() const { return n_done.load(std::memory_order_acquire) == n_items; }

  /// Runs items until all are taken.
  void help() {
    std::size_t n = 0;
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n_items; ++n)
      (*run)(i);
    if (n > 0 && n_done.fetch_add(n, std::memory_order_acq_rel) + n == n_items) {
      n_done.notify_all();
    }
  }
};

ThreadPool::ThreadPool(int n_threads) {
  if (n_threads == 0) n_threads = n_cpus();
  if (n_threads < 1) {
    throw std::invalid_argument(
        detail::concat("ThreadPool: n_threads must be at least 1, got ", n_threads));
  }
  for (int i = 1; i < n_threads; ++i) {
    workers_.emplace_back([this](const std::stop_token& stop) { work(stop); });
  }
}

ThreadPool::~ThreadPool() {
  for (std::jthread& worker : workers_) worker.request_stop();
}

void ThreadPool::work(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    spin_until([this, &stop] { return n_jobs_.load() > 0 || stop.stop_requested(); });
    std::shared_ptr<Job> job;
    {
      std::unique_lock lock(mutex_);
      if (!wake_.wait(lock, stop, [this] { return !jobs_.empty(); })) return;
      job = jobs_.front();
    }
    job->help();
    retire(job);
  }
}

void ThreadPool::retire(const std::shared_ptr<Job>& job) {
  const std::lock_guard lock(mutex_);
  n_jobs_ -= std::erase(jobs_, job);
}

void ThreadPool::for_each(std::size_t n_items, const std::function<void(std::size_t)>& run) {
  if (n_items == 0) return;
  if (n_items == 1 || workers_.empty()) {
    for (std::size_t i = 0; i < n_items; ++i) run(i);
    return;
  }
  const auto job = std::make_shared<Job>(run, n_items);
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(job);
    ++n_jobs_;
  }
  wake_.notify_all();
  job->help();
  retire(job);
  if (spin_until([&job] { return job->done(); })) return;
  for (std::size_t n; (n = job->n_done.load(std::memory_order_acquire)) < n_items;) {
    job->n_done.wait(n);
  }
}

ThreadPool& ThreadPool::shared() {
  static ThreadPool pool(threads_by_environment());
  return pool;
}

}  // namespace kvpool::attention
