#pragma once

#include <cstdint>

#include "kernels/cuda/raw_tile.cuh"
#include "kernels/cuda/sealed_tile.cuh"

namespace kvpool::cuda {

template <int kBytes>
__device__ __forceinline__ void copy_all(std::uint32_t to, const char* from, int lane) {
#pragma unroll
  for (int k = 0; k < (kBytes + 511) / 512; ++k) {
    const int at = k * 512 + lane * 16;
    if (kBytes % 512 == 0 || at < kBytes) copy16(to + at, from + at);
  }
}

/// A warp's units of one stretch, every kWarps-th, on their way through its ring.
template <class C>
struct Ring {
  struct Entry {
    ulonglong2 data;
    int2 range;
  };
  std::uint32_t base;
  int lane, next, end, units_log2;  // Units to a block.
  const BlockEntry* blocks;
  unsigned key_head, value_head;
  std::uint32_t fill, drain;
  /// Of unit `next`: loaded a turn before it is used.
  Entry ahead;

  __device__ __forceinline__ Entry entry(int unit) const {
    Entry x{};
    if (unit < end) {
      const BlockEntry* e = blocks + (unit >> units_log2);
      x.data = __ldg(reinterpret_cast<const ulonglong2*>(e));
      x.range = __ldg(reinterpret_cast<const int2*>(&e->first_token));
    }
    return x;
  }

  __device__ __forceinline__ void begin(int first, int end_, const BlockEntry* blocks_,
                                        unsigned key_head_, unsigned value_head_) {
    end = end_;
    blocks = blocks_;
    key_head = key_head_;
    value_head = value_head_;
    fill = drain = base;
    Entry e[C::kStages];
#pragma unroll
    for (int k = 0; k < C::kStages; ++k) e[k] = entry(first + k * C::kWarps);
    next = first;
#pragma unroll
    for (int k = 0; k < C::kStages - 1; ++k) {
      ahead = e[k];
      issue();
    }
    ahead = e[C::kStages - 1];
  }

  __device__ __forceinline__ void issue() {
    if (next < end) {
      const std::uint32_t to = fill;
      const int tile = (next & ((1 << units_log2) - 1)) * C::kUnit;
      const int first = ahead.range.x - tile * kTileTokens,
                stop = ahead.range.y - tile * kTileTokens;
      const char* keys = reinterpret_cast<const char*>(ahead.data.x) + key_head;
      const char* values =
          reinterpret_cast<const char*>(ahead.data.y) + (value_head + tile * C::kValueTile);
      if constexpr (C::kRawOnly) {
        keys += tile * C::kKeyTile;
        constexpr int kColumns = C::kDim / 8;
#pragma unroll
        for (int i = 0; i < RawTile<C>::kKeyPieces; ++i) {
          const int piece = i * 32 + lane;
          copy16(to + RawTile<C>::key_at(piece / kColumns, piece % kColumns), keys + piece * 16);
        }
#pragma unroll
        for (int i = 0; i < RawTile<C>::kValuePieces; ++i) {
          const int piece = i * 32 + lane;
          copy16(to + C::kValuesAt + RawTile<C>::value_at(piece / kColumns, piece % kColumns),
                 values + piece * 16, piece / kColumns < stop ? 16 : 0);
        }
      } else {
        if constexpr (C::kKivi) copy_all<C::kHeader>(to, keys, lane);
        copy_all<C::kUnit * C::kKeyTile>(to + C::kHeader, keys + C::kHeader + tile * C::kKeyTile,
                                         lane);
        copy_all<C::kUnit * C::kValueTile>(to + C::kValuesAt, values, lane);
      }
      if (lane == 0) sts64(to + C::kRangeAt, first, stop);
      next += C::kWarps;
    }
    copy_commit();
    fill = fill == base + (C::kStages - 1) * C::kStage ? base : fill + C::kStage;
  }

  /// The oldest unit, once it has come; starts on the next. Whole warps call it.
  __device__ __forceinline__ std::uint32_t take() {
    copy_wait<C::kStages - 2>();
    __syncwarp();
    const std::uint32_t at = drain;
    drain = drain == base + (C::kStages - 1) * C::kStage ? base : drain + C::kStage;
    issue();
    ahead = entry(next);
    return at;
  }
};

/// The same for kVector, whose units wait in registers.
template <class C>
struct CodeStream {
  std::uint32_t base;  // Unused.
  int lane, next, end, units_log2;
  const BlockEntry* blocks;
  unsigned key_head, value_head;
  ulonglong2 ahead;
  int2 ahead_range, range;
  KeyWords<C> keys[C::kUnit];
  ValueWords<C> values[C::kUnit];

  __device__ __forceinline__ void fetch_entry(int unit) {
    if (unit < end) {
      const BlockEntry* e = blocks + (unit >> units_log2);
      ahead = __ldg(reinterpret_cast<const ulonglong2*>(e));
      ahead_range = __ldg(reinterpret_cast<const int2*>(&e->first_token));
    }
  }
  template <class Words>
  __device__ __forceinline__ void fetch_words(Words& to, const char* tile) const {
    if constexpr (Words::kLaneBytes >= 16) {
#pragma unroll
      for (int k = 0; k < Words::kWords / 4; ++k) {
        const uint4 v = __ldcs(reinterpret_cast<const uint4*>(tile) + k * 32 + lane);
        to.w[4 * k] = v.x, to.w[4 * k + 1] = v.y, to.w[4 * k + 2] = v.z, to.w[4 * k + 3] = v.w;
      }
    } else if constexpr (Words::kLaneBytes == 8) {
      const uint2 v = __ldcs(reinterpret_cast<const uint2*>(tile) + lane);
      to.w[0] = v.x, to.w[1] = v.y;
    } else {
      to.w[0] = __ldcs(reinterpret_cast<const std::uint32_t*>(tile) + lane);
    }
  }
  __device__ __forceinline__ void fetch() {
    if (next < end) {
      const int tile = (next & ((1 << units_log2) - 1)) * C::kUnit;
      range = make_int2(ahead_range.x - tile * kTileTokens, ahead_range.y - tile * kTileTokens);
      const char* k = reinterpret_cast<const char*>(ahead.x) + (key_head + tile * C::kKeyTile);
      const char* v = reinterpret_cast<const char*>(ahead.y) + (value_head + tile * C::kValueTile);
#pragma unroll
      for (int t = 0; t < C::kUnit; ++t) fetch_words(keys[t], k + t * C::kKeyTile);
#pragma unroll
      for (int t = 0; t < C::kUnit; ++t) fetch_words(values[t], v + t * C::kValueTile);
      next += C::kWarps;
    }
  }
  /// Brings near what begin() will read.
  __device__ __forceinline__ void warm_up(int first, int end_, const BlockEntry* blocks_,
                                          unsigned key_head_, unsigned value_head_) {
    if (first >= end_) return;
    const ulonglong2 e =
        __ldg(reinterpret_cast<const ulonglong2*>(blocks_ + (first >> units_log2)));
    const int tile = (first & ((1 << units_log2) - 1)) * C::kUnit;
    send_for<C::kUnit * C::kKeyTile>(
        reinterpret_cast<const char*>(e.x) + (key_head_ + tile * C::kKeyTile), lane);
    send_for<C::kUnit * C::kValueTile>(
        reinterpret_cast<const char*>(e.y) + (value_head_ + tile * C::kValueTile), lane);
  }
  __device__ __forceinline__ void begin(int first, int end_, const BlockEntry* blocks_,
                                        unsigned key_head_, unsigned value_head_) {
    next = first;
    end = end_;
    blocks = blocks_;
    key_head = key_head_;
    value_head = value_head_;
    fetch_entry(first);
    const ulonglong2 now = ahead;
    const int2 now_range = ahead_range;
    fetch_entry(first + C::kWarps);
    const ulonglong2 later = ahead;
    const int2 later_range = ahead_range;
    ahead = now, ahead_range = now_range;
    fetch();
    ahead = later, ahead_range = later_range;
  }
  __device__ __forceinline__ int2 take(KeyWords<C> (&k)[C::kUnit], ValueWords<C> (&v)[C::kUnit]) {
#pragma unroll
    for (int t = 0; t < C::kUnit; ++t) k[t] = keys[t], v[t] = values[t];
    const int2 r = range;
    fetch();
    fetch_entry(next);
    return r;
  }
};

}  // namespace kvpool::cuda
