#include "kernels/cuda/blocks.h"
#include "kernels/cuda/copy.cuh"

namespace kvpool::cuda {
namespace {

constexpr int kThreads = 128;

/// The first kTasks of CopyParams: what a launch carries is part of its time.
template <int kTasks>
struct FirstTasks {
  CopyTask tasks[kTasks];
};

template <int kTasks>
__global__ void copy_kernel(const __grid_constant__ FirstTasks<kTasks> p) {
  const CopyTask& task = p.tasks[blockIdx.x];
  for (std::uint32_t head = blockIdx.y; head < task.n_heads; head += gridDim.y) {
    copy_head(task, head, threadIdx.x, kThreads);
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
