#pragma once

#include <cstdint>

#include "kernels/cuda/blocks.h"
#include "kernels/cuda/parts.cuh"

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

/// As turn() for one row in the registers of a warp, whose lanes have neighbours.
template <int kLane>
__device__ void turn_lanes(float (&x)[kLane], int lane) {
#pragma unroll
  for (int half = 1; half < kLane; half *= 2) {
#pragma unroll
    for (int low = 0; low < kLane; ++low) {
      if (low & half) continue;
      const float a = x[low], b = x[low | half];
      x[low] = a + b;
      x[low | half] = a - b;
    }
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
#pragma unroll
    for (float& own : x) {
      const float other = __shfl_xor_sync(~0U, own, d);
      own = lane & d ? other - own : own + other;
    }
  }
  static_assert(kLane == 2 || kLane == 4);
#pragma unroll
  for (float& own : x) own *= kLane == 4 ? 0.088388347648318441F : 0.125F;
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

  /// Shared memory that the next takes.
  static constexpr int query_floats(int dim, int columns, int n_warps) {
    return n_warps * (dim + n_warps * 32 * columns);
  }
  /// As enter_queries() for a query of kDim channels in each of the block's first `n` warps, a
  /// lane's side by side: quicker, as all that it reads comes at once and the warps share each part
  /// of the matrix and of the sums, so that it rounds otherwise.
  ///
  /// load(x) fetches the warp's query; write(channel, y) takes a lane's part of the result. Where
  /// rows are rotated, those are kColumns channels of slice `slice` of 32 * kColumns; elsewhere
  /// slice 0 is all of them, and the others do nothing.
  /// @param shared at a multiple of 16 bytes.
  /// @return the offset of the warp's query if `slice` is 0.
  template <int kDim, int kColumns, int kWarps, class Load, class Write>
  __device__ float enter_queries(int n, int slice, float* shared, Load load, Write write) const {
    constexpr int kLane = kDim / 32, kPart = kDim / kWarps;
    const auto rows = reinterpret_cast<float(*)[kDim]>(shared);
    const auto parts = reinterpret_cast<float(*)[kWarps][32 * kColumns]>(shared + kWarps * kDim);
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int column = (slice * 32 + lane) * kColumns;
    float numbers[kPart][kColumns];
    if (rotation_ != nullptr) {
#pragma unroll
      for (int k = 0; k < kPart; ++k) {
        load_floats(rotation_ + (warp * kPart + k) * kDim + column, numbers[k]);
      }
    }
    float offset = 0.F;
    if (warp < n) {
      float x[kLane], smooth[kLane], mean[kLane];
      if (smooth_ != nullptr) {
        load_floats(smooth_ + lane * kLane, smooth);
        load_floats(mean_ + lane * kLane, mean);
      }
      load(x);
      if (smooth_ != nullptr) {
#pragma unroll
        for (int j = 0; j < kLane; ++j) {
          offset += x[j] * mean[j];
          x[j] *= smooth[j];
        }
        for (int d = 1; d < 32 && slice == 0; d *= 2) offset += __shfl_xor_sync(~0U, offset, d);
      }
      if (turn_ == Turn::kHadamard) turn_lanes(x, lane);
      if (turn_ == Turn::kRotation) {
        store_floats(rows[warp] + lane * kLane, x);
      } else if (slice == 0) {
        write(lane * kLane, x);
      }
    }
    if (turn_ != Turn::kRotation) return offset;
    __syncthreads();
    // Two rows at a time, whose sums do not wait for each other.
    for (int row = 0; row < n; row += 2) {
      const int both[] = {row, min(row + 1, n - 1)};
      float sums[2][kColumns] = {};
#pragma unroll
      for (int k = 0; k < kPart; k += 4) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float x[4];
          load_floats(rows[both[r]] + warp * kPart + k, x);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
              sums[r][c] = __fmaf_rn(x[i], numbers[k + i][c], sums[r][c]);
            }
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) store_floats(parts[both[r]][warp] + lane * kColumns, sums[r]);
    }
    __syncthreads();
    if (warp >= n) return offset;
    float sums[kColumns] = {};
#pragma unroll
    for (int part = 0; part < kWarps; ++part) {
      float own[kColumns];
      load_floats(parts[warp][part] + lane * kColumns, own);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c] += own[c];
    }
    write(column, sums);
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
