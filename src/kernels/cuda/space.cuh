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

/// Columns of `row * matrix` for kRows rows from `own` on, which are `n` at most.
template <int kRows>
__device__ inline void rotate_rows(const float* matrix, float* rows, int own, int n, int dim,
                                   int stride, int column) {
  constexpr int kColumns = 2;  // A thread's, if there are more than threads.
  float sums[kColumns][kRows] = {};
  if (own < n) {
#pragma unroll(kRows == 1 ? 16 : 4)
    for (int d = 0; d < dim; ++d) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int j = column + c * static_cast<int>(blockDim.x);
        const float x = j < dim ? matrix[d * dim + j] : 0.F;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          sums[c][r] = __fadd_rn(sums[c][r], __fmul_rn(rows[min(own + r, n - 1) * stride + d], x));
        }
      }
    }
  }
  __syncthreads();
  for (int c = 0; c < kColumns; ++c) {
    const int j = column + c * static_cast<int>(blockDim.x);
    for (int r = 0; r < kRows && own + r < n && j < dim; ++r) {
      rows[(own + r) * stride + j] = sums[c][r];
    }
  }
  __syncthreads();
}

/// Each of `n` rows in shared memory becomes row * matrix (dim, dim), as KernelTable::rotate, sum by
/// sum. Barriers stand before and after.
__device__ inline void rotate(const float* matrix, float* rows, int n, int dim, int stride) {
  constexpr int kRows = 8;
  // Groups of threads have rows of their own.
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int groups = max(1, threads / dim), group = thread / dim;
  const int column = dim > threads ? thread : thread % dim;
  __syncthreads();
  if (n == 1) {
    rotate_rows<1>(matrix, rows, group, n, dim, stride, column);
    return;
  }
  for (int first = 0; first < n; first += kRows * groups) {
    const int own = group < groups ? first + group * kRows : n;
    rotate_rows<kRows>(matrix, rows, own, n, dim, stride, column);
  }
}

/// codec::Space of a part, on the device: what a head's rows go through before they are coded, and
/// queries and sums to meet them. Rows are `n` of `dim` in shared memory, `stride` apart; all
/// threads of the block work on them. Barriers stand before and after. Rounds as the CPU does.
class Space {
 public:
  __device__ Space(const PartFormat& part, int kv_head)
      : turn_(part.geometry.format.hadamard ? Turn::kHadamard : Turn::kNone) {
    const Quantizer& q = part.quantizer;
    if (q.centroids == nullptr) return;
    const int dim = part.geometry.head_dim;
    smooth_ = q.smooth + kv_head * dim;
    mean_ = q.mean + kv_head * dim;
    turn_ = q.turns[kv_head];
    if (q.rotation == nullptr) return;  // No head has one.
    rotation_ = q.rotation + kv_head * dim * dim;
    back_ = q.back + kv_head * dim * dim;
  }
  __device__ bool is_plain() const { return smooth_ == nullptr && turn_ == Turn::kNone; }

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
    turn_rows(rotation_, sums, n, dim, stride);
    __syncthreads();
  }
  template <class Weight>
  __device__ void leave_sums(float* sums, int n, int dim, int stride, Weight weight) const {
    __syncthreads();
    turn_rows(back_, sums, n, dim, stride);
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
    turn_rows(rotation_, queries, n, dim, stride);
    __syncthreads();
  }

  /// As enter_queries() for one query of 64 or 128 channels, `x` of channel threadIdx.x: quicker,
  /// as all that it reads comes at once and sums are split among threads, so that it rounds
  /// otherwise.
  /// Calls write(channel, x) for kSlice channels from `slice` * kSlice on or, where nothing is
  /// rotated, for all if `slice` is 0.
  /// @return the offset, to thread 0.
  template <int kThreads, int kSlice, class Write>
  __device__ float enter_query(float x, int dim, int slice, Write write) const {
    constexpr int kGroups = kThreads / kSlice, kEach = 128 / kGroups;
    __shared__ __align__(16) float row[128];
    __shared__ float products[4], parts[kThreads];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const int first = thread / kSlice * kEach, column = slice * kSlice + thread % kSlice;
    const bool mine = thread < dim;
    float numbers[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      numbers[k] = rotation_ != nullptr && first + k < dim
                       ? __ldg(rotation_ + (first + k) * dim + column)
                       : 0.F;
    }
    float product = 0.F;
    if (smooth_ != nullptr && mine) {
      product = x * __ldg(mean_ + thread);
      x *= __ldg(smooth_ + thread);
    }
    if (turn_ == Turn::kHadamard) {
      for (int d = 1; d < 32; d *= 2) x = (lane & d ? -x : x) + __shfl_xor_sync(~0U, x, d);
    }
    if (mine) row[thread] = x;
    for (int d = 1; d < 32; d *= 2) product += __shfl_xor_sync(~0U, product, d);
    if (mine && lane == 0) products[thread / 32] = product;
    __syncthreads();
    const float offset = products[0] + products[1] + (dim > 64 ? products[2] + products[3] : 0.F);

    if (turn_ != Turn::kRotation) {
      if (!mine || slice > 0) return offset;
      if (turn_ == Turn::kHadamard) {
        const auto pair = [&](int at) {
          return thread & 32 ? row[at] - row[at + 32] : row[at] + row[at + 32];
        };
        x = pair(lane);
        if (dim > 64) x = thread & 64 ? x - pair(lane + 64) : x + pair(lane + 64);
        x *= __fdiv_rn(1.F, __fsqrt_rn(static_cast<float>(dim)));
      }
      write(thread, x);
      return offset;
    }
    float sum = 0.F;
#pragma unroll
    for (int k = 0; k < kEach; k += 4) {
      if (first + k >= dim) break;
      const float4 q = *reinterpret_cast<const float4*>(row + first + k);
      sum += q.x * numbers[k] + q.y * numbers[k + 1] + q.z * numbers[k + 2] + q.w * numbers[k + 3];
    }
    parts[thread] = sum;
    __syncthreads();
    if (thread < kSlice) {
      float whole = 0.F;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) whole += parts[g * kSlice + thread];
      write(column, whole);
    }
    return offset;
  }

 private:
  __device__ void turn_rows(const float* rotation, float* rows, int n, int dim, int stride) const {
    if (turn_ == Turn::kHadamard) turn(rows, n, dim, stride);
    if (turn_ == Turn::kRotation) rotate(rotation, rows, n, dim, stride);
  }

  const float* smooth_ = nullptr;  ///< Null: neither smooth nor mean.
  const float* mean_ = nullptr;
  const float* rotation_ = nullptr;
  const float* back_ = nullptr;
  Turn turn_;
};

}  // namespace kvpool::cuda
