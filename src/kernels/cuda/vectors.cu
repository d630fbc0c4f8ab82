#include "kernels/cuda/vectors.h"

#include "kernels/cuda/blocks.h"
#include "kernels/cuda/parts.cuh"
#include "kernels/cuda/space.cuh"

namespace kvpool::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxDim = codec::kMaxHeadDim;

template <int kSubDim>
struct alignas(kSubDim < 4 ? 8 : 16) Centroid {
  float x[kSubDim];
};

/// Finds the nearest centroids as kernels/scalar/vector.cpp does: the largest x . c - |c|^2 / 2,
/// the first of equal ones, summed in that order.
template <int kSubDim>
__global__ void __launch_bounds__(kThreads) seal_vectors(const __grid_constant__ SealParams p) {
  constexpr int kEach = 8 / kSubDim;  // Sub-vectors that a thread searches for at once.
  __shared__ float rows[kTileTokens][kMaxDim + 1];
  // Those that are searched: all of 8-bit codes, one part after the other of 12-bit codes.
  __shared__ Centroid<kSubDim> centroids[kThreads];
  __shared__ float starts[kThreads];  // Half the squared length of each, below 0.
  __shared__ std::uint16_t codes[kTileTokens * kMaxDim / kSubDim];
  const PartGeometry& g = p.sealed.geometry;
  const Quantizer& q = p.sealed.quantizer;
  const int kv_head = static_cast<int>(blockIdx.y);
  const std::byte* from = p.tasks[blockIdx.x].from + std::size_t{blockIdx.y} * p.raw_bytes;
  std::byte* to = p.tasks[blockIdx.x].to + std::size_t{blockIdx.y} * p.sealed_bytes;
  const int dim = g.head_dim, n_subs = dim / kSubDim, n_codes = 1 << q.code_bits;
  const int first = static_cast<int>(blockIdx.z) * kTileTokens;
  const int n = min(kTileTokens, g.block_size - first), n_all = n * n_subs;
  const std::int8_t* book = q.centroids + static_cast<std::size_t>(kv_head) * n_codes * kSubDim;

  const auto take_centroids = [&](int first_code) {
    __syncthreads();
    float start = 0.F;
    for (int j = 0; j < kSubDim; ++j) {
      const auto x = static_cast<float>(book[(first_code + threadIdx.x) * kSubDim + j]);
      centroids[threadIdx.x].x[j] = x;
      start -= 0.5F * x * x;
    }
    starts[threadIdx.x] = start;
    __syncthreads();
  };
  if (n_codes == kThreads) take_centroids(0);
  for (int i = threadIdx.x; i < n * dim; i += kThreads) {
    rows[i / dim][i % dim] = stored_element(p.raw, kv_head, from, first + i / dim, i % dim);
  }
  Space(p.sealed, kv_head).enter(rows[0], n, dim, kMaxDim + 1);

  const float inverse = __fdiv_rn(1.F, q.scales[kv_head]);
  for (int done = 0; done < n_all; done += kThreads * kEach) {
    // Sub-vectors too many repeat the last.
    float x[kEach][kSubDim], largest[kEach];
    int nearest[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = min(done + e * kThreads + static_cast<int>(threadIdx.x), n_all - 1);
#pragma unroll
      for (int j = 0; j < kSubDim; ++j) {
        x[e][j] = __fmul_rn(rows[i % n][i / n * kSubDim + j], inverse);
      }
      largest[e] = -INFINITY;
      nearest[e] = 0;
    }
    for (int first_code = 0; first_code < n_codes; first_code += kThreads) {
      if (n_codes > kThreads) take_centroids(first_code);
#pragma unroll 4
      for (int c = 0; c < kThreads; ++c) {
        const Centroid<kSubDim> centroid = centroids[c];
        const float start = starts[c];
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          float value = start;
#pragma unroll
          for (int j = 0; j < kSubDim; ++j) value = __fmaf_rn(x[e][j], centroid.x[j], value);
          if (value > largest[e]) largest[e] = value, nearest[e] = first_code + c;
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = done + e * kThreads + static_cast<int>(threadIdx.x);
      if (i < n_all) codes[i] = static_cast<std::uint16_t>(nearest[e]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n_all; i += kThreads) {
    to[vector_code_at(p.sealed, first + i % n, i / n)] = static_cast<std::byte>(codes[i] & 255);
  }
  if (q.code_bits == 8) return;
  const int n_pairs = (n + 1) / 2;
  for (int i = threadIdx.x; i < n_pairs * n_subs; i += kThreads) {
    const int t = i % n_pairs * 2, sub = i / n_pairs;
    const int low = codes[sub * n + t] >> 8, high = t + 1 < n ? codes[sub * n + t + 1] >> 8 : 0;
    to[high_codes_at(p.sealed, first + t, sub)] = static_cast<std::byte>(low | high << 4);
  }
}

__global__ void __launch_bounds__(kThreads) relay_vectors(const __grid_constant__ RelayParams p) {
  const std::byte* from = p.tasks[blockIdx.x].from + std::size_t{blockIdx.y} * p.part_bytes;
  std::byte* to = p.tasks[blockIdx.x].to + std::size_t{blockIdx.y} * p.part_bytes;
  const int block_size = p.to.geometry.block_size;
  // Only codes of a byte have two layouts.
  for (int i = threadIdx.x; i < static_cast<int>(p.part_bytes); i += kThreads) {
    const int token = i % block_size, sub = i / block_size;
    to[vector_code_at(p.to, token, sub)] = from[vector_code_at(p.from, token, sub)];
  }
}

}  // namespace

const void* vector_seal_kernel(int sub_dim) {
  if (sub_dim == 8) return reinterpret_cast<const void*>(&seal_vectors<8>);
  return sub_dim == 4 ? reinterpret_cast<const void*>(&seal_vectors<4>)
                      : reinterpret_cast<const void*>(&seal_vectors<2>);
}

const void* vector_relay_kernel() { return reinterpret_cast<const void*>(&relay_vectors); }

}  // namespace kvpool::cuda
