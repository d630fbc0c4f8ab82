#pragma once

#include <cstdint>

#include "kernels/cuda/blocks.h"

namespace kvpool::cuda {

/// As units of T, which are elements or as many of them as lie side by side.
template <class T>
__device__ void copy_as(const CopyTask& task, const std::byte* from, std::byte* to,
                        std::int64_t from_unit, std::uint32_t thread, std::uint32_t n_threads) {
  const std::uint32_t units = task.row_bytes / sizeof(T);
  for (std::uint32_t i = thread; i < units * task.n_rows; i += n_threads) {
    const std::byte* const unit = from + i / units * task.from_row + i % units * from_unit;
    reinterpret_cast<T*>(to)[i] = *reinterpret_cast<const T*>(unit);
  }
}

/// One head of a task, by `thread` of `n_threads`.
__device__ inline void copy_head(const CopyTask& task, std::uint32_t head, std::uint32_t thread,
                                 std::uint32_t n_threads) {
  const std::byte* const from = task.from + head * task.from_head;
  std::byte* const to = task.to + head * task.to_head;
  const auto all = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) |
                   task.row_bytes | static_cast<std::uint64_t>(task.from_row);
  if (task.from_element == task.element_bytes && all % 16 == 0) {
    copy_as<uint4>(task, from, to, 16, thread, n_threads);
  } else if (task.element_bytes == 4) {
    copy_as<std::uint32_t>(task, from, to, task.from_element, thread, n_threads);
  } else if (task.element_bytes == 2) {
    copy_as<std::uint16_t>(task, from, to, task.from_element, thread, n_threads);
  } else {
    copy_as<std::uint8_t>(task, from, to, task.from_element, thread, n_threads);
  }
}

}  // namespace kvpool::cuda
