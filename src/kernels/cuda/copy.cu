#include "kernels/cuda/blocks.h"

namespace kvpool::cuda {
namespace {

constexpr int kThreads = 128;

template <class T>
__device__ void copy_as(const CopyTask& task, const std::byte* from, std::byte* to) {
  for (std::uint32_t i = threadIdx.x; i < task.bytes / sizeof(T); i += kThreads) {
    reinterpret_cast<T*>(to)[i] = from != nullptr ? reinterpret_cast<const T*>(from)[i] : T{};
  }
}

__global__ void copy_kernel(const __grid_constant__ CopyParams p) {
  const CopyTask& task = p.tasks[blockIdx.x];
  for (std::uint32_t head = blockIdx.y; head < task.n_heads; head += gridDim.y) {
    const std::byte* from = task.from == nullptr ? nullptr : task.from + head * task.from_stride;
    std::byte* to = task.to + head * task.to_stride;
    const auto all = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) |
                     task.bytes;
    if (all % 16 == 0) {
      copy_as<uint4>(task, from, to);
    } else if (all % 2 == 0) {
      copy_as<std::uint16_t>(task, from, to);
    } else {
      copy_as<std::uint8_t>(task, from, to);
    }
  }
}

}  // namespace

bool run_here() noexcept {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, copy_kernel) == cudaSuccess;
}

Launch<CopyParams> copy(const CopyTask* tasks, int n_tasks) {
  Launch<CopyParams> launch;
  launch.function = reinterpret_cast<const void*>(&copy_kernel);
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
