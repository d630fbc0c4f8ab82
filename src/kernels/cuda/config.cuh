#pragma once

#include <cstdint>

#include "kernels/cuda/layout.cuh"

namespace kvpool::cuda {

/// Where a block's dynamic shared memory starts if it has no other: after what the system keeps.
inline constexpr std::uint32_t kTable = 1024;
inline constexpr float kLowest = -1e30F;
inline constexpr float kLog2E = 1.44269504088896F;
inline constexpr int kMaxHeads = 8;
inline constexpr int kSlotFloats = kMaxHeads * (256 + 2);

template <Sealed kFormat_, class T_, int kDim_, int kGroup_, int kSets_, int kKeySub_ = 0,
          int kValueSub_ = 0>
struct Config {
  static constexpr Sealed kFormat = kFormat_;
  using T = T_;
  static constexpr int kDim = kDim_, kGroup = kGroup_, kSets = kSets_;
  static constexpr int kKeySub = kKeySub_, kValueSub = kValueSub_;  // Of kVector.
  static constexpr bool kRawOnly = kFormat == Sealed::kNone, kKivi = is_kivi(kFormat),
                        kVq = kFormat == Sealed::kVector, kAffine = is_affine(kFormat);
  static constexpr int kBits = kRawOnly ? 16 : bits_of(kFormat);
  static constexpr int kKeyBits = kVq ? 8 / kKeySub : kBits;
  static constexpr int kValueBits = kVq ? 8 / kValueSub : kBits;
  static constexpr int kHeads = 4 * kSets;
  static constexpr int kSteps = kDim / 32;  // Of 32 channels.
  static constexpr int kGroups = kDim / kGroup;
  /// Affine values are summed times this.
  static constexpr float kValueUnit = kVq || kRawOnly || kBits == 8 ? 1.F : kBits == 4 ? 0x1p-6F : 0x1p-8F;
  /// Tiles to a unit, which is what is copied at a time.
  static constexpr int kUnit = kRawOnly || kKeyBits > 2 && !kKivi || kValueBits > 2 && !kKivi ? 1 : 2;
  static constexpr int kCodeBytes = kRawOnly || kVq ? 0 : code_bytes(kFormat, kDim);
  static constexpr int kKeyTile =
      kRawOnly ? kTileTokens * kDim * 2 : key_tile_bytes(kFormat, kDim, kGroup, kKeySub);
  static constexpr int kValueTile =
      kRawOnly ? kTileTokens * kDim * 2 : value_tile_bytes(kFormat, kDim, kGroup, kValueSub);
  static constexpr int kHeader = kRawOnly ? 0 : key_header_bytes(kFormat, kDim);
  static constexpr int kValuesAt = kHeader + kUnit * kKeyTile;
  static constexpr int kRangeAt = kValuesAt + kUnit * kValueTile;
  /// Whole lines: a copy whose lines of memory come to lie across two of the ring's is slower.
  static constexpr int kStage = (kRangeAt + 16 + 127) / 128 * 128;
  /// Blocks to a multiprocessor: one's tiles come while the other merges.
  static constexpr int kResident = kRawOnly ? 1 : 2;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * 32;
  static_assert(kThreads >= kHeads * kDim / 4);
  /// Floats from one head to the next in the block's merge.
  static constexpr int kMergeStride = kDim + 20;
  static constexpr int kMergeBytes = kWarps * 4 * kMergeStride * 4 + (kWarps * 3 + 2) * kHeads * 4;
  /// Of the queries' operands.
  static constexpr int kQueryBytes =
      kSets * kSteps * 512 +
      (kKivi ? kSets * kSteps * 512 : kSets * (kSteps * 2 + 1 + kGroups) * 128);
  static constexpr int kTableBytes = kVq ? 256 * 256 : 0;
  static constexpr int kRingBytes =
      227 * 1024 / kResident - 1024 - 384 - kQueryBytes - kMergeBytes - kTableBytes;
  /// kVector needs no ring: its codes are few enough to wait in registers.
  static constexpr int kStages = kVq ? 0
                                 : kRingBytes / (kWarps * kStage) > 5
                                     ? 5
                                     : kRingBytes / (kWarps * kStage);
  static_assert(kVq || kStages >= 2);
  /// Dynamic memory: the table, the ring, the merge.
  static constexpr int kRingAt = kTableBytes;
  static constexpr int kMergeAt = kRingAt + kWarps * kStages * kStage;
  static constexpr int kQueryAt = (kMergeAt + kMergeBytes + 15) / 16 * 16;
  static constexpr int kSharedBytes = kQueryAt + kQueryBytes + 16 + 3 * 64;
};

}  // namespace kvpool::cuda
