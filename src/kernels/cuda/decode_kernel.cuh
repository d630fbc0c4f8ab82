#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/decode.h"
#include "kernels/cuda/tile_stream.cuh"

/// The decode kernel, for one sealed format beside raw rows of T.
///
/// *Work.* The grid is persistent, one or two blocks a multiprocessor. The tokens of all sequences
/// and heads lie on one line, head by head, and each block takes an equal stretch of it: ragged
/// batches balance, and a codebook is loaded once. To take up another sequence or head costs time,
/// so each begins with some units of nothing (segment_cost). Where a stretch ends inside a
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
/// Tiles come through asynchronous copies into a ring of the warp's own (kVector: into registers); no barrier of the block stands in the loop, and the next segment's tiles are on
/// their way while the last one's results are merged.
///
/// *Numbers.* Queries meet codes and codewords as 16-bit integers in two byte operands, which is
/// exact but for their own rounding (2^-16 of the largest); kivi's keys and all values meet fp16
/// (raw ones their own type), with fp32 sums. kVector's values are summed as the codebook's
/// integers, which fp16 has exactly.
///
/// *Codebooks* (kVector). Each codeword is one 256-byte row of shared memory, half of it copies of
/// the key's bytes (of 2, twice) and half of the value's in fp16, so that lanes never meet in a bank. A
/// code is the second byte of its codeword's offset, which one byte permute makes; where the table
/// starts is a constant in the load.
namespace kvpool::cuda {

__device__ __forceinline__ void store(void* out, Element type, std::size_t at, float x) {
  if (type == Element::kFp32) {
    static_cast<float*>(out)[at] = x;
  } else if (type == Element::kFp16) {
    static_cast<__half*>(out)[at] = __float2half_rn(x);
  } else {
    static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(x);
  }
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, d));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) x += __shfl_xor_sync(kAllLanes, x, d);
  return x;
}

/// Raw tiles beside sealed ones: few, read straight from memory.
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

/// Four signed bytes as fp16.
__device__ __forceinline__ uint2 halves_of(std::uint32_t bytes) {
  // The bytes of (0x6400 | x ^ 0x80) are the number 1024 + 128 + x.
  const std::uint32_t biased = bytes ^ 0x80808080U;
  const __half2 bias = __float2half2_rn(1152.F);
  return make_uint2(
      as_word(__hsub2(as_half2(__byte_perm(biased, 0x64646464U, 0x4140)), bias)),
      as_word(__hsub2(as_half2(__byte_perm(biased, 0x64646464U, 0x4342)), bias)));
}

/// kSub of a codebook's bytes.
template <int kSub>
__device__ __forceinline__ uint2 codeword(const std::int8_t* book, int code) {
  if constexpr (kSub == 8) return __ldg(reinterpret_cast<const uint2*>(book) + code);
  if constexpr (kSub == 4) {
    return make_uint2(__ldg(reinterpret_cast<const std::uint32_t*>(book) + code), 0);
  }
  return make_uint2(__ldg(reinterpret_cast<const std::uint16_t*>(book) + code), 0);
}

/// A thread's codewords, one of the keys and one of the values.
template <class C>
struct Codewords {
  static constexpr int kEach = 256 / C::kThreads;
  static_assert(!C::kVq || 256 % C::kThreads == 0);
  uint2 key[C::kVq ? kEach : 1], value[C::kVq ? kEach : 1];

  __device__ __forceinline__ void load(const DecodeParams& p, int kv_head) {
    if constexpr (C::kVq) {
      const int first = (p.codebook_per_head ? kv_head * 256 : 0) + threadIdx.x;
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const int code = first + k * C::kThreads;
        key[k] = codeword<C::kKeySub>(p.key_codebook, code);
        value[k] = codeword<C::kValueSub>(p.value_codebook, code);
      }
    }
  }
  __device__ __forceinline__ void fill(std::uint32_t table) const {
    if constexpr (C::kVq) {
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const std::uint32_t row = table + (threadIdx.x + k * C::kThreads) * 256;
        uint4 keys = make_uint4(key[k].x, key[k].x, key[k].x, key[k].x), values;
        if constexpr (C::kKeySub == 2) {
          keys.x = keys.y = keys.z = keys.w = key[k].x * 0x10001U;
        } else if constexpr (C::kKeySub == 8) {
          keys.y = keys.w = key[k].y;
        }
        const uint2 low = halves_of(value[k].x), high = halves_of(value[k].y);
        if constexpr (C::kValueSub == 2) {
          values = make_uint4(low.x, low.x, low.x, low.x);
        } else if constexpr (C::kValueSub == 4) {
          values = make_uint4(low.x, low.y, low.x, low.y);
        } else {
          values = make_uint4(low.x, low.y, high.x, high.y);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const std::uint32_t at = row + ((i + threadIdx.x) & 7) * 16;
          sts128(at, keys);
          sts128(at + 128, values);
        }
      }
    }
  }
};

/// Zeros for sequences without tokens, shared out among the blocks.
template <class C>
__device__ __noinline__ void zero_empty(const DecodeParams& p, int n_blocks) {
  for (int s = blockIdx.x; s < p.n_sequences; s += n_blocks) {
    if (p.cost_before[s + 1] != p.cost_before[s]) continue;
    const int row = p.n_kv_heads * p.group * C::kDim;
    for (int k = threadIdx.x; k < row; k += C::kThreads) {
      store(p.out, p.out_type, static_cast<std::size_t>(s) * row + k, 0.F);
    }
  }
}

/// The part of a block's stretch that lies in one sequence and head.
struct alignas(16) Segment {
  bool found;
  int head, kv_head, n_heads, seq, row;  // row: of the queries' and of the output's first head.
  /// On the line: where the pair's work starts and ends, and where the segment ends.
  int low, high, stop;
  bool whole;
  int first_raw, raw_from, raw_to;           // Tiles, from entry first_raw on.
  int first_sealed, sealed_from, sealed_to;  // Units, from entry first_sealed on.
};

/// The first segment with work at or after `at` and before `end`, by one warp, to shared memory: a
/// copy a thread would be spilled, and the first touch of local memory costs more than the search.
template <class C>
__device__ __forceinline__ void find_segment(const DecodeParams& p, int at, int end, int lane,
                                             Segment* result) {
  Segment found;
  Segment* s = &found;
  s->found = false;
  int k = min(lane, p.n_sequences - 1);
  int before = __ldg(p.cost_before + k), after = __ldg(p.cost_before + k + 1);
  int4 mine = __ldg(reinterpret_cast<const int4*>(p.sequences + k));
  const int head_cost = __ldg(p.cost_before + p.n_sequences);
  while (at < end) {
    const int head = at / head_cost, offset = at - head * head_cost;
    int base = 0;
    unsigned vote = __ballot_sync(kAllLanes, after > offset);
    while (vote == 0) {
      base += 32;
      k = min(base + lane, p.n_sequences - 1);
      before = __ldg(p.cost_before + k), after = __ldg(p.cost_before + k + 1);
      mine = __ldg(reinterpret_cast<const int4*>(p.sequences + k));
      vote = __ballot_sync(kAllLanes, after > offset);
    }
    const int from_lane = __ffs(static_cast<int>(vote)) - 1;
    const int start = head * head_cost + __shfl_sync(kAllLanes, before, from_lane);
    s->high = head * head_cost + __shfl_sync(kAllLanes, after, from_lane);
    s->low = start + p.segment_cost;
    s->stop = min(s->high, end);
    const int n_raw = __shfl_sync(kAllLanes, mine.y, from_lane) << p.tiles_log2;
    s->first_raw = __shfl_sync(kAllLanes, mine.x, from_lane);
    s->first_sealed = __shfl_sync(kAllLanes, mine.z, from_lane);
    if (s->stop > s->low) {
      s->head = head;
      s->seq = base + from_lane;
      s->kv_head = head / p.chunks;
      const int first_head = head % p.chunks * p.chunk_heads;
      s->n_heads = min(p.chunk_heads, p.group - first_head);
      s->row = (s->seq * p.n_kv_heads + s->kv_head) * p.group + first_head;
      s->whole = at <= s->low && s->stop == s->high;
      const int from = max(0, at - s->low), to = s->stop - s->low;
      if constexpr (C::kRawOnly) {
        s->raw_from = from;
        s->raw_to = to;
      } else {
        const int raw_cost = n_raw * p.raw_weight;
        s->raw_from = min(n_raw, (from + p.raw_weight - 1) / p.raw_weight);
        s->raw_to = min(n_raw, (to + p.raw_weight - 1) / p.raw_weight);
        s->sealed_from = max(0, from - raw_cost);
        s->sealed_to = max(0, to - raw_cost);
      }
      s->found = true;
      break;
    }
    at = s->stop;
    if (base > 0) {  // Back to the first sequences.
      k = min(lane, p.n_sequences - 1);
      before = __ldg(p.cost_before + k), after = __ldg(p.cost_before + k + 1);
      mine = __ldg(reinterpret_cast<const int4*>(p.sequences + k));
    }
  }
  if (lane == 0) *result = found;
}

/// Adds up the partial results of n blocks from `first` on.
template <class C>
__device__ __forceinline__ void merge_blocks(const DecodeParams& p, const Segment& now, int first,
                                             int n, int share, int longer, const float* slots,
                                             float* merge_o) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const auto start_of = [&](int b) { return b * share + min(b, longer); };
  const auto slot_of = [&](int b) {
    return slots +
           (2 * static_cast<std::size_t>(b) + (now.low <= start_of(b) ? 0 : 1)) * kSlotFloats;
  };
  // Each thread sums four channels over every kSharers-th block. The first loads go out
  // before the factors are known.
  constexpr int kFours = C::kHeads * C::kDim / 4;
  constexpr int kSharers = C::kThreads > kFours ? C::kThreads / kFours : 1;
  constexpr int kFirst = 4;
  float4* sums = reinterpret_cast<float4*>(merge_o);
  float* parts = merge_o + C::kThreads * 4;  // A factor a head and block.
  const int four = threadIdx.x % kFours, sharer = threadIdx.x / kFours;
  const int head = four * 4 / C::kDim;
  const auto load = [&](int b) {
    return __ldcg(reinterpret_cast<const float4*>(slot_of(first + b)) + four);
  };
  float4 early[kFirst];
#pragma unroll
  for (int k = 0; k < kFirst; ++k) {
    if (sharer + k * kSharers < n) early[k] = load(sharer + k * kSharers);
  }
  if (warp < now.n_heads) {
    float m = kLowest, l = 0;
    for (int b = lane; b < n; b += 32) {
      const float* s = slot_of(first + b) + C::kHeads * C::kDim + warp;
      const float own = __ldcg(s), add = __ldcg(s + C::kHeads), top = fmaxf(m, own);
      l = l * exp2_fast(m - top) + add * exp2_fast(own - top);
      m = top;
      parts[b * C::kHeads + warp] = own;
    }
    const float top = warp_max(m);
    l = warp_sum(l * exp2_fast(m - top));
    const float inverse = l > 0 ? 1.F / l : 0.F;
    for (int b = lane; b < n; b += 32) {
      parts[b * C::kHeads + warp] = inverse * exp2_fast(parts[b * C::kHeads + warp] - top);
    }
  }
  __syncthreads();
  float4 x = make_float4(0, 0, 0, 0);
  const auto add = [&](int b, const float4& v) {
    const float f = parts[b * C::kHeads + head];
    x.x += f * v.x, x.y += f * v.y, x.z += f * v.z, x.w += f * v.w;
  };
  if (head < now.n_heads) {
#pragma unroll
    for (int k = 0; k < kFirst; ++k) {
      if (sharer + k * kSharers < n) add(sharer + k * kSharers, early[k]);
    }
#pragma unroll 4
    for (int b = sharer + kFirst * kSharers; b < n; b += kSharers) add(b, load(b));
  }
  sums[threadIdx.x] = x;
  __syncthreads();
  for (int k = threadIdx.x; k < now.n_heads * C::kDim; k += C::kThreads) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kSharers; ++j) {
      sum += merge_o[j * kFours * 4 + k];
    }
    store(p.out, p.out_type, static_cast<std::size_t>(now.row) * C::kDim + k, sum);
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

  // The line, in equal stretches: the first `longer` blocks have one unit more.
  const int all = __ldg(p.cost_before + p.n_sequences) * p.n_kv_heads * p.chunks;
  const int n_blocks = min(static_cast<int>(gridDim.x), (all + C::kWarps - 1) / C::kWarps);
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
  // Tiles are sent for ahead of time, but not while raw ones need the registers.
  const auto has_raw = [&](const Segment& s) {
    return !C::kRawOnly && s.raw_from + warp < s.raw_to;
  };
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

  if (warp == 0) find_segment<C>(p, low, high, lane, &segments[0]);
  __syncthreads();
  if (segments[0].found) {
    const Segment& now = segments[0];
    Codewords<C> codewords;
    codewords.load(p, now.kv_head);
    if (!has_raw(now)) begin(now);
    make_queries(now);
    codewords.fill(table);
    if (warp == 0) find_segment<C>(p, now.stop, high, lane, &segments[1]);
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
        begin(now);
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
      if (!has_raw(next)) begin(next);
      if (new_table) codewords.load(p, next.kv_head);
    }

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
        if (warp == C::kWarps - 3) find_segment<C>(p, next.stop, high, lane, &later);
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
        if (now.whole) {
          const float sum = merge_total[C::kHeads + h];
          store(p.out, p.out_type, (static_cast<std::size_t>(now.row) + h) * C::kDim + d,
                sum > 0 ? x / sum : 0.F);
        } else {
          slot[h * C::kDim + d] = x;
          if (d == 0) {
            slot[C::kHeads * C::kDim + h] = merge_total[h];
            slot[C::kHeads * C::kDim + C::kHeads + h] = merge_total[C::kHeads + h];
          }
        }
      }
    }
    if (!now.whole) {
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

/// What prepare() asks of each format's file.
struct KernelChoice {
  const void* function = nullptr;
  int threads = 0;
  int shared_bytes = 0;
  int resident = 1;
  /// Blocks that one pair's merge has room for.
  int most_blocks = 1;
};
template <class C>
KernelChoice choose() {
  return {reinterpret_cast<const void*>(&decode_kernel<C>), C::kThreads, C::kSharedBytes,
          C::kResident, (C::kWarps * C::kMergeStride - C::kThreads) * 4 / C::kHeads};
}
template <Sealed kFormat, class T, int kGroup, int... kSubs>
KernelChoice choose_shape(int dim, int sets) {
  if (dim == 128) {
    if (sets == 1) return choose<Config<kFormat, T, 128, kGroup, 1, kSubs...>>();
#ifndef KVPOOL_CUDA_FEW
    return choose<Config<kFormat, T, 128, kGroup, 2, kSubs...>>();
#endif
  }
#ifndef KVPOOL_CUDA_FEW
  if (dim == 64) {
    return sets == 1 ? choose<Config<kFormat, T, 64, kGroup, 1, kSubs...>>()
                     : choose<Config<kFormat, T, 64, kGroup, 2, kSubs...>>();
  }
#endif
  return {};
}
template <Sealed kFormat>
KernelChoice choose_format(const Geometry& geometry, int sets) {
  const bool wide = is_affine(kFormat) || is_kivi(kFormat) ? geometry.group_size == 64 : false;
#ifdef KVPOOL_CUDA_FEW
  if (wide || geometry.raw == Element::kFp16) return {};
  return choose_shape<kFormat, __nv_bfloat16, 32>(geometry.head_dim, sets);
#else
  if constexpr (is_affine(kFormat) || is_kivi(kFormat)) {
    if (wide) {
      return geometry.raw == Element::kFp16
                 ? choose_shape<kFormat, __half, 64>(geometry.head_dim, sets)
                 : choose_shape<kFormat, __nv_bfloat16, 64>(geometry.head_dim, sets);
    }
  }
  return geometry.raw == Element::kFp16
             ? choose_shape<kFormat, __half, 32>(geometry.head_dim, sets)
             : choose_shape<kFormat, __nv_bfloat16, 32>(geometry.head_dim, sets);
#endif
}

template <int kKeySub, int kValueSub>
KernelChoice choose_codes(const Geometry& geometry, int sets) {
#ifndef KVPOOL_CUDA_FEW
  if (geometry.raw == Element::kFp16) {
    return choose_shape<Sealed::kVector, __half, 32, kKeySub, kValueSub>(geometry.head_dim, sets);
  }
#endif
  return choose_shape<Sealed::kVector, __nv_bfloat16, 32, kKeySub, kValueSub>(geometry.head_dim,
                                                                              sets);
}
template <int kKeySub>
KernelChoice choose_vector(const Geometry& geometry, int sets) {
  switch (geometry.value_sub) {
    case 2:
      return choose_codes<kKeySub, 2>(geometry, sets);
    case 4:
      return choose_codes<kKeySub, 4>(geometry, sets);
    case 8:
      return choose_codes<kKeySub, 8>(geometry, sets);
    default:
      return {};
  }
}

KernelChoice choose_raw(const Geometry&, int sets);
KernelChoice choose_int8(const Geometry&, int sets);
KernelChoice choose_int4(const Geometry&, int sets);
KernelChoice choose_int2(const Geometry&, int sets);
KernelChoice choose_kivi4(const Geometry&, int sets);
KernelChoice choose_kivi2(const Geometry&, int sets);
KernelChoice choose_vector_keys2(const Geometry&, int sets);
KernelChoice choose_vector_keys4(const Geometry&, int sets);
KernelChoice choose_vector_keys8(const Geometry&, int sets);

}  // namespace kvpool::cuda
