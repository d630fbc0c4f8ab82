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
    if (turn_ != Turn::kRotation) return;
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

  /// As enter_queries() for one query, `x` of channel threadIdx.x, to `row` in shared memory:
  /// quicker, as all that it reads comes at once and sums are split among kThreads threads, so that
  /// it rounds otherwise. Barriers stand after it.
  template <int kThreads>
  __device__ void enter_query(float x, float* row, int dim, float* offset) const {
    constexpr int kEach = 32;
    __shared__ float parts[kThreads];
    const int thread = static_cast<int>(threadIdx.x), groups = kThreads / dim;
    const int group = thread / dim, column = thread % dim, span = (dim + groups - 1) / groups;
    const int first = group * span, last = group < groups ? min(dim, first + span) : first;
    const bool rotates = turn_ == Turn::kRotation;
    float numbers[kEach];
    const auto load = [&](int from) {
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const int d = from + k;
        numbers[k] = rotates && d < last ? __ldg(rotation_ + d * dim + column) : 0.F;
      }
    };
    load(first);
    float product = 0.F;
    if (smooth_ != nullptr && thread < dim) {
      product = x * mean_[thread];
      x *= smooth_[thread];
    }
    if (thread < dim) row[thread] = x;
    for (int d = 1; d < 32; d *= 2) product += __shfl_xor_sync(~0U, product, d);
    if (thread % 32 == 0) parts[thread / 32] = product;
    __syncthreads();
    if (thread == 0) {
      float sum = 0.F;
      for (int i = 0; i < (dim + 31) / 32; ++i) sum += parts[i];
      *offset = sum;
    }
    if (turn_ == Turn::kHadamard) turn(row, 1, dim, dim);
    if (!rotates) {
      __syncthreads();
      return;
    }
    float sum = 0.F;
    for (int from = first; from < last; from += kEach) {
      if (from > first) load(from);
#pragma unroll
      for (int k = 0; k < kEach; ++k) sum += row[min(from + k, dim - 1)] * numbers[k];
    }
    __syncthreads();
    parts[thread] = sum;
    __syncthreads();
    if (thread < dim) {
      float whole = 0.F;
      for (int g = 0; g < groups; ++g) whole += parts[g * dim + thread];
      row[thread] = whole;
    }
    __syncthreads();
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
