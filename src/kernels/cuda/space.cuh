#pragma once

#include <cstdint>

#include "kernels/cuda/blocks.h"

namespace kvpool::cuda {

/// Transforms `n` rows of `dim` in shared memory, `stride` apart, by all threads of the block: as
/// codec::hadamard(), sum by sum. Barriers stand before and after.
__device__ inline void turn(float* rows, int n, int dim, int stride) {
  const int size = dim & -dim;
  for (int half = 1; half < size; half *= 2) {
    __syncthreads();
    for (int i = threadIdx.x; i < n * dim / 2; i += blockDim.x) {
      const int row = i / (dim / 2), pair = i % (dim / 2);
      const int low = pair / half * 2 * half + pair % half;
      float* const at = rows + row * stride + low;
      const float a = at[0], b = at[half];
      at[0] = a + b;
      at[half] = a - b;
    }
  }
  __syncthreads();
  const float scale = __fdiv_rn(1.F, __fsqrt_rn(static_cast<float>(size)));
  for (int i = threadIdx.x; i < n * dim; i += blockDim.x) rows[i / dim * stride + i % dim] *= scale;
  __syncthreads();
}

/// codec::Space of a part, on the device: what a head's rows go through before they are coded, and
/// queries and sums to meet them. Rows are `n` of `dim` in shared memory, `stride` apart; all
/// threads of the block work on them. Barriers stand before and after. Rounds as the CPU does.
class Space {
 public:
  __device__ Space(const PartFormat& part, int kv_head) : hadamard_(part.geometry.format.hadamard) {
    const Quantizer& q = part.quantizer;
    if (q.centroids == nullptr) return;
    smooth_ = q.smooth + kv_head * part.geometry.head_dim;
    mean_ = q.mean + kv_head * part.geometry.head_dim;
    hadamard_ = q.hadamard[kv_head] != 0;
  }

  __device__ bool is_plain() const { return smooth_ == nullptr && !hadamard_; }

  __device__ void enter(float* rows, int n, int dim, int stride) const {
    enter_sums(rows, n, dim, stride, [](int) { return 1.F; });
  }
  __device__ void leave(float* rows, int n, int dim, int stride) const {
    leave_sums(rows, n, dim, stride, [](int) { return 1.F; });
  }

  /// Sums of weighted rows; weight(row) is the sum of the weights.
  template <class Weight>
  __device__ void enter_sums(float* sums, int n, int dim, int stride, Weight weight) const {
    __syncthreads();
    if (smooth_ != nullptr) {
      for (int i = threadIdx.x; i < n * dim; i += blockDim.x) {
        const int row = i / dim, d = i % dim;
        float& x = sums[row * stride + d];
        x = __fdiv_rn(__fsub_rn(x, __fmul_rn(weight(row), mean_[d])), smooth_[d]);
      }
    }
    if (hadamard_) turn(sums, n, dim, stride);
    __syncthreads();
  }
  template <class Weight>
  __device__ void leave_sums(float* sums, int n, int dim, int stride, Weight weight) const {
    __syncthreads();
    if (hadamard_) turn(sums, n, dim, stride);
    if (smooth_ != nullptr) {
      for (int i = threadIdx.x; i < n * dim; i += blockDim.x) {
        const int row = i / dim, d = i % dim;
        float& x = sums[row * stride + d];
        x = __fadd_rn(__fmul_rn(x, smooth_[d]), __fmul_rn(weight(row), mean_[d]));
      }
    }
    __syncthreads();
  }

  /// Queries, whose products with stored keys, plus offsets[row], are those with the keys.
  __device__ void enter_queries(float* queries, int n, int dim, int stride, float* offsets) const {
    __syncthreads();
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < n; row += blockDim.x / 32) {
      float offset = 0.F;
      for (int d = lane; d < dim && smooth_ != nullptr; d += 32) {
        float& x = queries[row * stride + d];
        offset += x * mean_[d];
        x *= smooth_[d];
      }
      for (int d = 1; d < 32; d *= 2) offset += __shfl_xor_sync(~0U, offset, d);
      if (lane == 0) offsets[row] = offset;
    }
    if (hadamard_) turn(queries, n, dim, stride);
    __syncthreads();
  }

 private:
  const float* smooth_ = nullptr;  ///< Null: neither smooth nor mean.
  const float* mean_ = nullptr;
  bool hadamard_;
};

}  // namespace kvpool::cuda
