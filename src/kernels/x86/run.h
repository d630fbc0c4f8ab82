#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/kernels.h"

// What the kernels of AVX2 and AVX-512 share. All that is here is a template or has no external
// name: a copy compiled for one instruction set must not serve another.
namespace kvpool::kernels::x86 {

/// Queries that a kernel takes at a time.
inline constexpr int kMostQueries = 4;

/// Calls run(first query, its count as a constant) over n_queries.
template <typename Run>
inline void for_query_chunks(int n_queries, const Run& run) {
  int first = 0;
  for (; first + kMostQueries <= n_queries; first += kMostQueries) {
    run(first, std::integral_constant<int, kMostQueries>());
  }
  switch (n_queries - first) {
    case 3:
      return run(first, std::integral_constant<int, 3>());
    case 2:
      return run(first, std::integral_constant<int, 2>());
    case 1:
      return run(first, std::integral_constant<int, 1>());
    default:
      return;
  }
}

namespace {

/// Fetches what a run names as ahead, in step with the work on the run: little by little, or the
/// processor waits for room for more fetches.
class Ahead {
 public:
  explicit Ahead(const PartRun& run) : run_(run) {}
  /// All of it while the run's own tokens, of so many bytes each 16, are read.
  Ahead(const PartRun& run, std::size_t bytes_of_16) : Ahead(run) {
    std::size_t n_tokens = 0;
    for (std::size_t p = 0; p < run.n_parts; ++p) {
      n_tokens += static_cast<std::size_t>(run.n_tokens[p]);
    }
    const std::size_t own_bytes = n_tokens * bytes_of_16 / 16 + 1;
    const std::size_t ahead_bytes = run.n_ahead * (run.ahead_bytes + 63);
    pace_ = (kOne * ahead_bytes + own_bytes - 1) / own_bytes;
  }

  /// To be called when as many bytes of the run itself are read.
  void fetch(std::size_t n_bytes) {
    for (due_ += pace_ * n_bytes; due_ >= kLine; due_ -= kLine) {
      if (next_ >= end_ && !next_part()) return;
      _mm_prefetch(reinterpret_cast<const char*>(next_), _MM_HINT_T1);
      next_ += 64;
    }
  }

 private:
  static constexpr std::size_t kOne = 256;
  static constexpr std::size_t kLine = 64 * kOne;

  /// False if there is none.
  bool next_part() {
    if (part_ == run_.n_ahead) return false;
    const std::byte* const part = run_.ahead[part_++];
    next_ = part - reinterpret_cast<std::uintptr_t>(part) % 64;  // It may begin within a line.
    end_ = part + run_.ahead_bytes;
    return true;
  }

  const PartRun& run_;
  /// Bytes to fetch, in 256ths, and those for each byte read.
  std::size_t due_ = kLine - 1;
  std::size_t pace_ = kOne;
  /// The part after those begun, and what is left of the last begun.
  std::size_t part_ = 0;
  const std::byte* next_ = nullptr;
  const std::byte* end_ = nullptr;
};

}  // namespace

}  // namespace kvpool::kernels::x86
