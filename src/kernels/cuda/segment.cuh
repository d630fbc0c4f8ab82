#pragma once

#include "kernels/cuda/config.cuh"
#include "kernels/cuda/decode.h"
#include "kernels/cuda/primitives.cuh"

namespace kvpool::cuda {

/// The part of a block's stretch that lies in one sequence and head.
struct alignas(16) Segment {
  bool found;
  int head, kv_head, n_heads, seq, row;  // row: of the queries' and of the output's first head.
  /// On the line: where the pair's work starts and ends, and where the segment ends.
  int low, high, stop;
  bool whole;                       ///< All of the pair's work, so that there is nothing to merge.
  int first_raw, raw_from, raw_to;  // Tiles, from entry first_raw on.
  int first_sealed, sealed_from, sealed_to;  // Units, from entry first_sealed on.
};

/// A sequence's place on a head's line, and its entries.
struct LinePlace {
  int before, after;
  int4 entries;

  __device__ __forceinline__ LinePlace(const DecodeParams& p, int seq) {
    const int k = min(seq, p.n_sequences - 1);
    before = __ldg(p.cost_before + k);
    after = __ldg(p.cost_before + k + 1);
    entries = __ldg(reinterpret_cast<const int4*>(p.sequences + k));
  }
};

/// Whether all sequences have as much work, by each warp.
__device__ __forceinline__ bool are_alike(const DecodeParams& p, int lane) {
  const int all = __ldg(p.cost_before + p.n_sequences);
  bool is_like_all = true;
  for (int k = lane; k < p.n_sequences; k += 32) {
    const int cost = __ldg(p.cost_before + k + 1) - __ldg(p.cost_before + k);
    is_like_all = is_like_all && cost * p.n_sequences == all;
  }
  return __all_sync(kAllLanes, is_like_all);
}

/// The first segment with work at or after `at` and before `end`, by one warp, to shared memory: a
/// copy a thread would be spilled, and the first touch of local memory costs more than the search.
/// `mine` is of sequence `lane`: who knows it before the others need not wait for it here.
template <class C>
__device__ __forceinline__ void find_segment(const DecodeParams& p, LinePlace mine, int at, int end,
                                             int lane, Segment* result) {
  Segment found;
  Segment* s = &found;
  s->found = false;
  const int head_cost = __ldg(p.cost_before + p.n_sequences);
  while (at < end) {
    const int head = at / head_cost, offset = at - head * head_cost;
    int base = 0;
    unsigned vote = __ballot_sync(kAllLanes, mine.after > offset);
    while (vote == 0) {
      base += 32;
      mine = LinePlace(p, base + lane);
      vote = __ballot_sync(kAllLanes, mine.after > offset);
    }
    const int from_lane = __ffs(static_cast<int>(vote)) - 1;
    const int start = head * head_cost + __shfl_sync(kAllLanes, mine.before, from_lane);
    s->high = head * head_cost + __shfl_sync(kAllLanes, mine.after, from_lane);
    s->low = start + p.segment_cost;
    s->stop = min(s->high, end);
    const int n_raw = __shfl_sync(kAllLanes, mine.entries.y, from_lane) << p.tiles_log2;
    s->first_raw = __shfl_sync(kAllLanes, mine.entries.x, from_lane);
    s->first_sealed = __shfl_sync(kAllLanes, mine.entries.z, from_lane);
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
    if (base > 0) mine = LinePlace(p, lane);  // Back to the first sequences.
  }
  if (lane == 0) *result = found;
}

}  // namespace kvpool::cuda
