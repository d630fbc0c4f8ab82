#include "kernels/cuda/blocks.h"

namespace kvpool::cuda {
namespace {

constexpr int kThreads = 128;

/// As units of T, which are elements or as many of them as lie side by side.
template <class T>
__device__ void copy_as(const CopyTask& task, const std::byte* from, std::byte* to,
                        std::int64_t from_unit) {
  const std::uint32_t units = task.row_bytes / sizeof(T);
  for (std::uint32_t i = threadIdx.x; i < units * task.n_rows; i += kThreads) {
    const std::byte* const unit = from + i / units * task.from_row + i % units * from_unit;
    reinterpret_cast<T*>(to)[i] = *reinterpret_cast<const T*>(unit);
  }
}

/// The first kTasks of CopyParams: what a launch carries is part of its time.
template <int kTasks>
struct FirstTasks {
  CopyTask tasks[kTasks];
};

template <int kTasks>
__global__ void copy_kernel(const __grid_constant__ FirstTasks<kTasks> p) {
  const CopyTask& task = p.tasks[blockIdx.x];
  for (std::uint32_t head = blockIdx.y; head < task.n_heads; head += gridDim.y) {
    const std::byte* const from = task.from + head * task.from_head;
    std::byte* const to = task.to + head * task.to_head;
    const auto all = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) |
                     task.row_bytes | static_cast<std::uint64_t>(task.from_row);
    if (task.from_element == task.element_bytes && all % 16 == 0) {
      copy_as<uint4>(task, from, to, 16);
    } else if (task.element_bytes == 4) {
      copy_as<std::uint32_t>(task, from, to, task.from_element);
    } else if (task.element_bytes == 2) {
      copy_as<std::uint16_t>(task, from, to, task.from_element);
    } else {
      copy_as<std::uint8_t>(task, from, to, task.from_element);
    }
  }
}

}  // namespace

bool run_here() noexcept {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, copy_kernel<kCopyTasks>) == cudaSuccess;
}

Launch<CopyParams> copy(const CopyTask* tasks, int n_tasks) {
  Launch<CopyParams> launch;
  launch.function = n_tasks <= 2 ? reinterpret_cast<const void*>(&copy_kernel<2>)
                                 : reinterpret_cast<const void*>(&copy_kernel<kCopyTasks>);
  std::uint32_t heads = 1;
  for (int i = 0; i < n_tasks; ++i) {
    launch.params.tasks[i] = tasks[i];
    if (tasks[i].n_heads > heads) heads = tasks[i].n_heads;
  }
  launch.grid = dim3(static_cast<unsigned>(n_tasks), heads < 1024 ? heads : 1024);
  launch.block = kThreads;
  return launch;
}

}  // namespace kvpool::cuda
