// What a step's scratch buffers cost: from MlxBufferPool, and from MLX's allocator.

#include <benchmark/benchmark.h>
#include <mlx/allocator.h>

#include <cstddef>
#include <vector>

#include "kvpool/mlx_buffer_pool.h"

namespace mx = mlx::core;

namespace kvpool {
namespace {

constexpr std::size_t kBuffersPerStep = 1750;

/// A step's requests: sizes of 256 bytes to 64 KiB, none a power of two.
std::vector<BufferRequest> mixed_requests() {
  std::vector<BufferRequest> requests;
  for (std::size_t i = 0; i < kBuffersPerStep; ++i) {
    const std::size_t bytes = (std::size_t{256} << (i * 7 % 9)) - i % 32;
    requests.push_back({bytes, mx::uint8, {static_cast<mx::ShapeElem>(bytes)}});
  }
  return requests;
}

std::vector<BufferRequest> equal_requests(std::size_t bytes) {
  return {kBuffersPerStep, {bytes, mx::float16, {static_cast<mx::ShapeElem>(bytes / 2)}}};
}

void report(benchmark::State& state) {
  const auto n = state.iterations() * static_cast<std::int64_t>(kBuffersPerStep);
  state.SetItemsProcessed(n);
  state.counters["per_buffer"] =
      benchmark::Counter(static_cast<double>(n), benchmark::Counter::kIsRate |
                                                     benchmark::Counter::kInvert);
}

void step_one_by_one(benchmark::State& state, const std::vector<BufferRequest>& requests) {
  MlxBufferPool pool;
  for (auto _ : state) {
    for (const BufferRequest& request : requests) {
      benchmark::DoNotOptimize(
          pool.alloc(mx::Device::cpu, request.byte_len, request.dtype, request.shape));
    }
    pool.reset();
  }
  report(state);
}

void step_as_batch(benchmark::State& state, const std::vector<BufferRequest>& requests) {
  MlxBufferPool pool;
  for (auto _ : state) {
    benchmark::DoNotOptimize(pool.alloc_batch(mx::Device::cpu, requests));
    pool.reset();
  }
  report(state);
}

void mlx_malloc_and_free(benchmark::State& state, const std::vector<BufferRequest>& requests) {
  std::vector<mx::allocator::Buffer> buffers;
  buffers.reserve(requests.size());
  for (auto _ : state) {
    for (const BufferRequest& request : requests) {
      buffers.push_back(mx::allocator::allocator().malloc(request.byte_len));
      benchmark::DoNotOptimize(buffers.back());
    }
    for (const mx::allocator::Buffer buffer : buffers) mx::allocator::allocator().free(buffer);
    buffers.clear();
  }
  report(state);
}

BENCHMARK_CAPTURE(step_one_by_one, mixed, mixed_requests());
BENCHMARK_CAPTURE(step_one_by_one, 16KB, equal_requests(16384));
BENCHMARK_CAPTURE(step_as_batch, mixed, mixed_requests());
BENCHMARK_CAPTURE(step_as_batch, 16KB, equal_requests(16384));
BENCHMARK_CAPTURE(mlx_malloc_and_free, mixed, mixed_requests());
BENCHMARK_CAPTURE(mlx_malloc_and_free, 16KB, equal_requests(16384));

}  // namespace
}  // namespace kvpool
