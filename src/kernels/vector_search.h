#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/vector_layout.h"

namespace kvpool::kernels {

/// encode() of a vector layout, with tokens in the lanes of a vector.
///
/// Lanes, a type of the level that includes this: kLanes; Float, Int, Mask; load, broadcast, fma,
/// above (a > b), select (mask ? a : b) and store, as used below.
template <typename Lanes, int kSubDim, int kBits>
class VectorEncoder {
 public:
  static void encode(const PartShape& shape, const float* rows, int /*first_token*/,
                     int /*n_tokens*/, std::byte* part) {
    VectorEncoder(shape, rows, part).encode_part();
  }

 private:
  static constexpr int kLanes = Lanes::kLanes;
  /// Sub-vectors that are searched for at once.
  static constexpr int kSubs = kSubDim == 2 ? 4 : 16 / kSubDim;
  static constexpr std::size_t kCodes = std::size_t{1} << kBits;

  VectorEncoder(const PartShape& shape, const float* rows, std::byte* part)
      : shape_(shape), rows_(rows), part_(part), inverse_(1.0F / shape.codebook->scale) {}

  /// Each centroid as numbers, and before them half its squared length, below 0.
  static const float* search_table(const codec::Codebook& book) {
    thread_local std::vector<float> table;
    table.resize(kCodes * (kSubDim + 1));
    float* to = table.data();
    const std::int8_t* from = book.centroids.data();
    for (std::size_t code = 0; code < kCodes; ++code, to += kSubDim + 1, from += kSubDim) {
      to[0] = 0.0F;
      for (int j = 0; j < kSubDim; ++j) {
        const auto x = static_cast<float>(from[j]);
        to[1 + j] = x;
        to[0] -= 0.5F * x * x;
      }
    }
    return table.data();
  }

  void encode_part() {
    const float* const table = search_table(*shape_.codebook);
    const int subs = n_subs(kSubDim, shape_.head_dim);
    std::memset(part_, 0, vector_bytes(kSubDim, kBits, shape_));
    for (int token = 0; token < shape_.block_size; token += kLanes) {
      for (int sub = 0; sub < subs; sub += kSubs) encode_step(table, token, sub, subs);
    }
  }

  void encode_step(const float* table, int first_token, int first_sub, int subs) {
    // Lanes and sub-vectors too many repeat the last.
    alignas(64) float x[kSubs][kSubDim][kLanes];
    const int n_tokens = std::min(kLanes, shape_.block_size - first_token);
    const int n = std::min(kSubs, subs - first_sub);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int token = first_token + std::min(lane, n_tokens - 1);
      const float* const row = rows_ + token * shape_.head_dim;
      for (int s = 0; s < kSubs; ++s) {
        for (int j = 0; j < kSubDim; ++j) {
          x[s][j][lane] = row[(first_sub + std::min(s, n - 1)) * kSubDim + j] * inverse_;
        }
      }
    }
    alignas(64) std::int32_t codes[kSubs][kLanes];
    search(table, x, codes);
    for (int s = 0; s < n; ++s) {
      for (int lane = 0; lane < n_tokens; ++lane) {
        write_vector_code<kSubDim, kBits>(shape_, part_, first_sub + s, first_token + lane,
                                          static_cast<std::uint32_t>(codes[s][lane]));
      }
    }
  }

  static void search(const float* table, const float (&x)[kSubs][kSubDim][kLanes],
                     std::int32_t (&codes)[kSubs][kLanes]) {
    typename Lanes::Float coordinates[kSubs][kSubDim];
    typename Lanes::Float largest[kSubs];
    typename Lanes::Int nearest[kSubs];
    for (int s = 0; s < kSubs; ++s) {
      for (int j = 0; j < kSubDim; ++j) coordinates[s][j] = Lanes::load(x[s][j]);
      largest[s] = Lanes::broadcast(-std::numeric_limits<float>::infinity());
      nearest[s] = Lanes::broadcast(0);
    }
    for (std::size_t code = 0; code < kCodes; ++code, table += kSubDim + 1) {
      const auto here = Lanes::broadcast(static_cast<std::int32_t>(code));
      typename Lanes::Float values[kSubs];
      for (auto& value : values) value = Lanes::broadcast(table[0]);
      for (int j = 0; j < kSubDim; ++j) {
        const auto centroid = Lanes::broadcast(table[1 + j]);
        for (int s = 0; s < kSubs; ++s) {
          values[s] = Lanes::fma(coordinates[s][j], centroid, values[s]);
        }
      }
      for (int s = 0; s < kSubs; ++s) {
        const auto above = Lanes::above(values[s], largest[s]);
        largest[s] = Lanes::select(above, values[s], largest[s]);
        nearest[s] = Lanes::select(above, here, nearest[s]);
      }
    }
    for (int s = 0; s < kSubs; ++s) Lanes::store(codes[s], nearest[s]);
  }

  const PartShape& shape_;
  const float* const rows_;
  std::byte* const part_;
  const float inverse_;
};

}  // namespace kvpool::kernels
