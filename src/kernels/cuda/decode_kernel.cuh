#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/codewords.cuh"
#include "kernels/cuda/decode.h"
#include "kernels/cuda/merge.cuh"
#include "kernels/cuda/segment.cuh"
#include "kernels/cuda/tile_stream.cuh"

/// The decode kernel, for one sealed format beside raw rows of T.
///
/// *Work.* The grid is persistent, one or two blocks a multiprocessor. The tokens of all sequences
/// and heads lie on one line, head by head, and each block takes an equal stretch of it: ragged
/// batches balance, and a codebook is loaded once. To take up another sequence or head costs time,
/// so each begins with some units of nothing (segment_cost); where sequences are alike, a few
/// blocks may rest so that the others have whole ones (whole_blocks). Where a stretch ends inside a
/// sequence, a partial result goes to the workspace, and the last of the sequence's blocks to
/// finish merges them.
///
/// *A warp* takes 16 tokens at a time (a tile) for four query heads, or eight in two sets. In all
/// matrix products the 8 columns are (head, parity):
///   scores   tokens x columns; even columns the query's upper part, odd ones what rounding left of
///            it, so that thread (g, c) gets tokens g and g + 8 of head c, twice as exact.
///   output   channels / 2 x columns; the k-dimension is (token, parity), and column (h, e) of the
///            weights is zero where the parity is not e. So two neighbouring channels of a token
///            are one operand register just as they lie, in rows as in codewords, and nothing has
///            to be transposed. Thread (g, c) gets channels 64i + 8g ... + 7 of head c.
/// Tiles come through asynchronous copies into a ring of the warp's own (kVector: into registers);
/// no barrier of the block stands in the loop, and the next segment's tiles are on their way while
/// the last one's results are merged.
///
/// *Numbers.* Queries meet codes and codewords as 16-bit integers in two byte operands, which is
/// exact but for their own rounding (2^-16 of the largest); kivi's keys and all values meet fp16
/// (raw ones their own type), with fp32 sums. kVector's values are summed as the codebook's
/// integers, which fp16 has exactly.
///
/// *Codebooks* (kVector). Each codeword is one 256-byte row of shared memory, half of it copies of
/// the key's bytes (of 2, twice) and half of the value's in fp16, so that lanes never meet in a
/// bank. A code is the second byte of its codeword's offset, which one byte permute makes; where
/// the table starts is a constant in the load.
namespace kvpool::cuda {

template <class C>
__device__ __forceinline__ void attend_raw(Accumulator<C>& acc, const BlockEntry* blocks, int from,
                                           int to, int tiles_log2, std::size_t head_at, float scale,
                                           const std::uint32_t* fragments) {
  using T = typename C::T;
  const int lane = threadIdx.x & 31, g = lane >> 2;
  const std::uint32_t select0 = g & 1 ? 0x1044 : 0x4410, select1 = g & 1 ? 0x3244 : 0x4432;
  Query16<C, T> q;
  q.read(fragments, lane);
  for (int k = from; k < to; k += C::kWarps) {
    const BlockEntry* e = blocks + (k >> tiles_log2);
    const int tile = k & ((1 << tiles_log2) - 1);
    const std::size_t skip = head_at + static_cast<std::size_t>(tile) * kTileTokens * C::kDim * 2;
    const char* keys = static_cast<const char*>(e->keys) + skip;
    const char* values = static_cast<const char*>(e->values) + skip;
    const int first = e->first_token - tile * kTileTokens, end = e->end_token - tile * kTileTokens;
    const auto at = [](int token, int column) { return token * C::kDim * 2 + column * 16; };
    RawTile<C>::attend(
        acc, q, scale, first, end, lane, select0, select1,
        [&](int i) {
          return __ldg(reinterpret_cast<const uint4*>(
              keys + at(RawTile<C>::key_token(i, lane), RawTile<C>::key_column(i, lane))));
        },
        [&](int i) {
          const int token = RawTile<C>::value_token(i, lane);
          return token < end ? __ldg(reinterpret_cast<const uint4*>(
                                   values + at(token, RawTile<C>::value_column(i, lane))))
                             : make_uint4(0, 0, 0, 0);
        });
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) char shared[];
  using T = typename C::T;
  using SealedQuery = std::conditional_t<C::kKivi, Query16<C, __half>, Query8<C>>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
  const std::uint32_t select0 = g & 1 ? 0x1044 : 0x4410, select1 = g & 1 ? 0x3244 : 0x4432;
  float* merge_o = reinterpret_cast<float*>(shared + C::kMergeAt);  // [warp][4][kMergeStride]
  float* merge_m = merge_o + C::kWarps * 4 * C::kMergeStride;       // [warp][head]
  float* merge_l = merge_m + C::kWarps * C::kHeads;
  float* merge_f = merge_l + C::kWarps * C::kHeads;      // [head][warp]
  float* merge_total = merge_f + C::kWarps * C::kHeads;  // m, then l, of the block.
  auto* raw_query = reinterpret_cast<std::uint32_t*>(shared + C::kQueryAt);
  std::uint32_t* sealed_query = raw_query + Query16<C, T>::kBytes / 4;
  int& is_last = *reinterpret_cast<int*>(shared + C::kQueryAt + C::kQueryBytes);
  // The turn's, the next, and the one after it.
  auto* segments = reinterpret_cast<Segment*>(shared + C::kQueryAt + C::kQueryBytes + 16);

  const LinePlace place(p, lane);
  // The line, in equal stretches: the first `longer` blocks have one unit more.
  const int all = __ldg(p.cost_before + p.n_sequences) * p.n_kv_heads * p.chunks;
  const bool rests = p.whole_blocks > 0 && are_alike(p, lane);
  const int grid = rests ? p.whole_blocks : static_cast<int>(gridDim.x);
  const int n_blocks = min(grid, (all + C::kWarps - 1) / C::kWarps);
  if (static_cast<int>(blockIdx.x) >= n_blocks) {
    if (n_blocks == 0) zero_empty<C>(p, gridDim.x);
    return;
  }
  const int share = all / n_blocks, longer = all % n_blocks;
  const auto start_of = [&](int b) { return b * share + min(b, longer); };
  const int low = start_of(blockIdx.x), high = start_of(blockIdx.x + 1);
  float* slots = static_cast<float*>(p.workspace);
  int* counters =
      reinterpret_cast<int*>(slots + static_cast<std::size_t>(gridDim.x) * 2 * kSlotFloats);

  std::conditional_t<C::kVq, CodeStream<C>, Ring<C>> ring;
  const std::uint32_t table = shared_address(shared);
  if (C::kVq && table != kTable) __trap();  // prepare() has asked.
  ring.base = table + C::kRingAt + warp * C::kStages * C::kStage;
  ring.lane = lane;
  ring.units_log2 = C::kUnit == 2 ? p.tiles_log2 - 1 : p.tiles_log2;
  // Raw tiles take the warps from the first on, sealed ones go on where those end.
  const auto turn_of = [&](const Segment& s) {
    const int first = C::kRawOnly ? 0 : (s.raw_to - s.raw_from) % C::kWarps;
    return warp >= first ? warp - first : warp - first + C::kWarps;
  };
  const auto begin = [&](const Segment& s) {
    if constexpr (C::kRawOnly) {
      ring.begin(s.raw_from + turn_of(s), s.raw_to, p.blocks + s.first_raw,
                 s.kv_head * p.raw_stride, s.kv_head * p.raw_stride);
    } else {
      ring.begin(s.sealed_from + turn_of(s), s.sealed_to, p.blocks + s.first_sealed,
                 s.kv_head * p.key_stride, s.kv_head * p.value_stride);
    }
  };
  const auto has_raw = [&](const Segment& s) {
    return !C::kRawOnly && s.raw_from + warp < s.raw_to;
  };
  // Tiles are sent for ahead of time; to registers not while raw ones need them.
  const auto waits = [&](const Segment& s) { return C::kVq && has_raw(s); };
  // Centroids are summed as the integers they are.
  const auto value_unit = [&](const Segment& s) {
    return __ldg(p.value_scale + (p.codebook_per_head ? s.kv_head : 0));
  };
  // Two warps make the operands of the queries for all.
  const auto make_queries = [&](const Segment& s) {
    if (warp == C::kWarps - 1 && s.raw_from < s.raw_to) {
      Query16<C, T> q;
      q.load(p.queries, p.query_type, s.row, s.n_heads, lane);
      q.write(raw_query, lane);
    }
    if constexpr (!C::kRawOnly) {
      if (warp == C::kWarps - 2 && s.sealed_from < s.sealed_to) {
        SealedQuery q;
        if constexpr (C::kKivi) {
          q.load(p.sealed_queries, p.query_type, s.row, s.n_heads, lane, 0x1p-8F);
        } else {
          q.load(p.sealed_queries, p.query_type, s.row, s.n_heads, lane);
        }
        q.write(sealed_query, lane);
      }
    }
  };

  if (warp == 0) find_segment<C>(p, place, low, high, lane, &segments[0]);
  __syncthreads();
  if (segments[0].found) {
    const Segment& now = segments[0];
    Codewords<C> codewords;
    codewords.load(p, now.kv_head);
    if (!waits(now)) begin(now);
    make_queries(now);
    codewords.fill(table);
    if (warp == 0) find_segment<C>(p, place, now.stop, high, lane, &segments[1]);
    __syncthreads();
  }
  for (int turn = 0; segments[turn].found; turn = turn == 2 ? 0 : turn + 1) {
    const Segment& now = segments[turn];
    const Segment& next = segments[turn == 2 ? 0 : turn + 1];
    Segment& later = segments[turn == 0 ? 2 : turn - 1];
    Accumulator<C> acc;
    acc.clear();
    const float scale = p.scale * kLog2E;
    if constexpr (C::kRawOnly) {
      Query16<C, T> q;
      q.read(raw_query, lane);
      for (int k = now.raw_from + warp; k < now.raw_to; k += C::kWarps) {
        const std::uint32_t tile = ring.take();
        const uint2 range = lds64(tile + C::kRangeAt);
        RawTile<C>::attend(
            acc, q, scale, static_cast<int>(range.x), static_cast<int>(range.y), lane, select0,
            select1,
            [&](int i) {
              return lds128(tile + RawTile<C>::key_at(RawTile<C>::key_token(i, lane),
                                                      RawTile<C>::key_column(i, lane)));
            },
            [&](int i) {
              return lds128(tile + C::kValuesAt +
                            RawTile<C>::value_at(RawTile<C>::value_token(i, lane),
                                                 RawTile<C>::value_column(i, lane)));
            });
      }
    } else {
      if (has_raw(now)) {
        // What comes after the raw tiles is on its way while they are.
        touch_space<C>(p, now.kv_head, lane);
        if constexpr (C::kVq) {
          touch(p.blocks + now.first_raw + ((now.raw_from + warp) >> p.tiles_log2));
          ring.warm_up(now.sealed_from + turn_of(now), now.sealed_to, p.blocks + now.first_sealed,
                       now.kv_head * p.key_stride, now.kv_head * p.value_stride);
        }
        attend_raw<C>(acc, p.blocks + now.first_raw, now.raw_from + warp, now.raw_to, p.tiles_log2,
                      static_cast<std::size_t>(now.kv_head) * p.raw_stride, scale, raw_query);
        if constexpr (C::kVq) {
          const int row = now.kv_head * C::kDim;
          if (p.value_smooth != nullptr) {
            acc.smooth(p.value_smooth + row, p.value_mean + row, value_unit(now));
            if (p.value_hadamard[now.kv_head]) acc.turn();
          } else {
            acc.scale(1.F / value_unit(now));
          }
        } else if (p.turned_values) {
          acc.turn();
        }
        if constexpr (C::kValueUnit != 1.F) acc.scale(C::kValueUnit);
        if constexpr (C::kVq) begin(now);
      }
      const int first_unit = now.sealed_from + turn_of(now), end_unit = now.sealed_to;
      if (first_unit < end_unit) {
        SealedQuery q;
        q.read(sealed_query, lane);
        float factor[C::kSets], bias[C::kSets];
#pragma unroll
        for (int n = 0; n < C::kSets; ++n) {
          factor[n] = scale;
          if constexpr (!C::kKivi) factor[n] *= q.unit[n];
          if constexpr (C::kVq) factor[n] *= p.key_scale[p.codebook_per_head ? now.kv_head : 0];
          bias[n] = p.sealed_bias != nullptr && 4 * n + c < now.n_heads
                        ? kLog2E * p.sealed_bias[now.row + 4 * n + c]
                        : 0.F;
        }
        // The lane's copy of a codeword.
        constexpr int kKeyCopy = C::kKeySub == 8 ? 8 : 4, kValueCopy = 2 * C::kValueSub;
        const std::uint32_t key_at_row = (lane * kKeyCopy) & 127,
                            value_at_row = 128 | ((lane * kValueCopy) & 127);
        for (int k = first_unit; k < end_unit; k += C::kWarps) {
          KeyWords<C> keys[C::kUnit];
          ValueWords<C> values[C::kUnit];
          std::uint32_t unit = 0;
          int2 range;
          if constexpr (C::kVq) {
            range = ring.take(keys, values);
          } else {
            unit = ring.take();
            const uint2 r = lds64(unit + C::kRangeAt);
            range = make_int2(static_cast<int>(r.x), static_cast<int>(r.y));
          }
          const auto key_at = [&](int t) { return unit + C::kHeader + t * C::kKeyTile; };
          const auto value_at = [&](int t) { return unit + C::kValuesAt + t * C::kValueTile; };
          typename SealedKeys<C>::Block block;
          if constexpr (!C::kVq) {
            SealedKeys<C>::begin(block, q, unit, lane);
#pragma unroll
            for (int t = 0; t < C::kUnit; ++t) keys[t].load(key_at(t), lane);
          }
          float s[C::kUnit][C::kSets][2];
#pragma unroll
          for (int t = 0; t < C::kUnit; ++t) {
            SealedKeys<C>::scores(s[t], q, block, factor, keys[t], key_at(t), lane, key_at_row);
#pragma unroll
            for (int n = 0; n < C::kSets; ++n) s[t][n][0] += bias[n], s[t][n][1] += bias[n];
          }
          if constexpr (!C::kVq) {
#pragma unroll
            for (int t = 0; t < C::kUnit; ++t) values[t].load(value_at(t), lane);
          }
          const int first = range.x, end = range.y;
          if (first > 0 || end < C::kUnit * kTileTokens) {
#pragma unroll
            for (int t = 0; t < C::kUnit; ++t) {
              mask<C>(s[t], first - t * kTileTokens, end - t * kTileTokens, g);
            }
          }
          std::uint32_t w[C::kUnit][C::kSets][4];
          acc.template weigh<__half>(s, w, select0, select1);
#pragma unroll
          for (int t = 0; t < C::kUnit; ++t) {
            SealedValues<C>::add(acc, w[t], values[t], value_at(t), lane, value_at_row);
          }
        }
      }
    }
    __syncwarp();

    // The next segment's tiles are on their way while this one's results are merged.
    const bool more = next.found;
    Codewords<C> codewords;
    const bool new_table = C::kVq && more && p.codebook_per_head && next.kv_head != now.kv_head;
    if (more) {
      if (!waits(next)) begin(next);
      if (new_table) codewords.load(p, next.kv_head);
    }

    // The merge brings results back from the space of sealed values.
    const bool is_done = now.whole && !has_value_space<C>(p);
    // The warps' results to the block's, four heads at a time.
    float* slot =
        slots + (2 * static_cast<std::size_t>(blockIdx.x) + (now.low <= low ? 0 : 1)) * kSlotFloats;
#pragma unroll
    for (int n = 0; n < C::kSets; ++n) {
      if (n > 0) __syncthreads();
      float l = acc.l[n];
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) l += __shfl_xor_sync(kAllLanes, l, d);
      if (g == 0) {
        merge_m[warp * C::kHeads + 4 * n + c] = acc.m[n];
        merge_l[warp * C::kHeads + 4 * n + c] = l;
      }
#pragma unroll
      for (int u = 0; u < C::kSteps; ++u) {
        *reinterpret_cast<float4*>(merge_o + (warp * 4 + c) * C::kMergeStride + 64 * (u / 2) +
                                   8 * g + 4 * (u % 2)) =
            make_float4(acc.o[n][u][0], acc.o[n][u][1], acc.o[n][u][2], acc.o[n][u][3]);
      }
      __syncthreads();
      if (n == 0 && more) {
        make_queries(next);
        if (new_table) codewords.fill(table);
        if (warp == C::kWarps - 3) {
          find_segment<C>(p, LinePlace(p, lane), next.stop, high, lane, &later);
        }
      }
      if (warp < 4) {
        const int h = 4 * n + warp;
        const float own = lane < C::kWarps ? merge_m[lane * C::kHeads + h] : kLowest;
        const float m = warp_max(own), f = exp2_fast(own - m);
        const float sum = warp_sum(lane < C::kWarps ? f * merge_l[lane * C::kHeads + h] : 0.F);
        if (lane < C::kWarps) merge_f[h * C::kWarps + lane] = f;
        if (lane == 0) {
          merge_total[h] = m;
          merge_total[C::kHeads + h] = sum;
        }
      }
      __syncthreads();
      for (int k = threadIdx.x; k < (min(now.n_heads, 4 * n + 4) - 4 * n) * C::kDim;
           k += C::kThreads) {
        const int h = 4 * n + k / C::kDim, d = k % C::kDim;
        float x = 0;
#pragma unroll
        for (int w = 0; w < C::kWarps; ++w) {
          x += merge_f[h * C::kWarps + w] * merge_o[(w * 4 + h - 4 * n) * C::kMergeStride + d];
        }
        if constexpr (C::kVq) x *= value_unit(now);
        x *= 1.F / C::kValueUnit;
        if (is_done) {
          const float sum = merge_total[C::kHeads + h];
          store(p.out, p.out_type, (static_cast<std::size_t>(now.row) + h) * C::kDim + d,
                sum == 0.F ? 0.F : x / sum);
        } else {
          slot[h * C::kDim + d] = x;
          if (d == 0) {
            slot[C::kHeads * C::kDim + h] = merge_total[h];
            slot[C::kHeads * C::kDim + C::kHeads + h] = merge_total[C::kHeads + h];
          }
        }
      }
    }
    if (!is_done) {
      const auto block_of = [&](int x) {
        const int cut = longer * (share + 1);
        return x < cut ? x / (share + 1) : longer + (x - cut) / share;
      };
      const int first = block_of(now.low), last = block_of(now.high - 1);
      __syncthreads();
      if (threadIdx.x == 0) {
        int* counter = counters + static_cast<std::size_t>(now.head) * p.n_sequences + now.seq;
        // Releases what the block wrote, which the barrier ordered before it, and acquires what
        // other blocks did.
        int before;
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0,[%1],1;"
                     : "=r"(before)
                     : "l"(counter)
                     : "memory");
        const bool mine = before == last - first;
        if (mine) *counter = 0;
        is_last = mine;
      }
      __syncthreads();
      if (is_last) {
        merge_blocks<C>(p, now, first, last - first + 1, share, longer, slots, merge_o);
      }
    }
    __syncthreads();
  }
  zero_empty<C>(p, n_blocks);
}

}  // namespace kvpool::cuda
