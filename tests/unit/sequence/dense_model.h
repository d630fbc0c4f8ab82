#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "codec/space.h"
#include "codec/vector_quantizer.h"
#include "kvpool/paged_kv_cache.h"
#include "kvpool/vecinfer_codebooks.h"

namespace kvpool::testing {

inline constexpr int kBlockSize = 4;
inline constexpr int kKvHeads = 2;
inline constexpr int kQueryHeads = 4;
inline constexpr int kRoleDims[] = {16, 24};  ///< Of keys, of values.

/// Numbers that no two calls share, so that a row in the wrong place shows.
inline std::vector<float> unique_numbers(std::size_t n) {
  static std::uint64_t next = 1;
  std::vector<float> numbers(n);
  for (float& number : numbers) {
    const std::uint64_t mixed = next++ * 0x9E3779B97F4A7C15U;
    number = static_cast<float>(static_cast<double>(mixed >> 11) / 9007199254740992.0 * 4 - 2);
  }
  return numbers;
}

/// Columns of (B, kKvHeads, n_columns, dim).
struct Rows {
  std::vector<float> numbers;
  std::int64_t n_columns;
  int dim;

  const float* at(std::int64_t row, int head, std::int64_t column) const {
    return numbers.data() +
           static_cast<std::size_t>(((row * kKvHeads + head) * n_columns + column) * dim);
  }
};

/// One head's part of a sealed block of keys (role 0) or values; raw if nothing is sealed.
inline codec::PartGeometry sealed_part(const PagedKVCacheConfig& config, int role) {
  codec::PartGeometry part;
  part.role = role == 0 ? codec::Role::kKeys : codec::Role::kValues;
  part.block_size = kBlockSize;
  part.head_dim = kRoleDims[role];
  const std::string& tag = role == 0 ? config.key_format : config.value_format;
  if (tag == "raw") return part;
  part.format = {codec::code_of(tag), static_cast<std::uint8_t>(config.group_size)};
  if (part.format.is_vector()) {
    const VecInferLayer& layer = config.codebooks->layer(config.layer);
    part.format.quantizer = (role == 0 ? layer.keys : layer.values).get();
  } else {
    part.format.hadamard = config.hadamard && (role == 1 || tag.starts_with("int"));
  }
  return part;
}

/// Whether a vecinfer part has a sub-vector so near to two centroids that a level's rounding
/// chooses.
inline bool has_tie(const codec::PartGeometry& part, const float* row) {
  constexpr float kMargin = 1e-5F;
  const codec::Codebook& book =
      *part.format.quantizer->codebooks[static_cast<std::size_t>(part.kv_head)];
  const auto sub_dim = static_cast<std::size_t>(book.sub_dim);
  std::vector<float> stored(row, row + part.head_dim);
  codec::Space(part.format, part.kv_head).enter(stored.data(), 1, part.head_dim);
  for (std::size_t sub = 0; sub < stored.size(); sub += sub_dim) {
    std::vector<float> distances(book.n_codes());
    for (std::size_t i = 0; i < book.centroids.size(); ++i) {
      const float off =
          stored[sub + i % sub_dim] - book.scale * static_cast<float>(book.centroids[i]);
      distances[i / sub_dim] += off * off;
    }
    std::nth_element(distances.begin(), distances.begin() + 1, distances.end());
    if (distances[1] - distances[0] < kMargin) return true;
  }
  return false;
}

/// New tokens of a batch, which every level seals alike.
inline Rows new_rows(const PagedKVCacheConfig& config, int role, std::int64_t batch,
                     std::int64_t n_columns) {
  const auto dim = static_cast<std::size_t>(kRoleDims[role]);
  const auto n_tokens = static_cast<std::size_t>(batch * kKvHeads * n_columns);
  Rows rows{unique_numbers(n_tokens * dim), n_columns, kRoleDims[role]};
  codec::PartGeometry part = sealed_part(config, role);
  if (!part.format.is_vector()) return rows;
  for (std::size_t i = 0; i < n_tokens; ++i) {
    part.kv_head = static_cast<int>(i / static_cast<std::size_t>(n_columns)) % kKvHeads;
    float* const token = rows.numbers.data() + i * dim;
    while (has_tie(part, token)) std::ranges::copy(unique_numbers(dim), token);
  }
  return rows;
}

/// A row of a cache as plain tokens: what the contract says it holds, without sharing anything.
class DenseRow {
 public:
  explicit DenseRow(const PagedKVCacheConfig& config) : config_(config) {}

  std::int64_t length() const { return length_; }
  bool slid() const { return first_position() > 0; }
  std::int64_t first_position() const {
    return blocks_.empty() ? length_ : blocks_.front().position;
  }
  std::int64_t next_query() const { return next_query_; }
  void set_next_query(std::int64_t position) { next_query_ = position; }
  /// Keys' and values' sealed blocks, by position.
  std::vector<std::int64_t> sealed(int role) const {
    std::vector<std::int64_t> positions;
    for (const Block& block : blocks_) {
      if (block.sealed[role]) positions.push_back(block.position);
    }
    return positions;
  }

  void append(const Rows (&rows)[2], std::int64_t row, std::int64_t first, std::int64_t count) {
    next_query_ = length_ - first;
    std::erase_if(blocks_, [&](const Block& block) {
      return count > 0 && config_.sliding_window > 0 &&
             block.position + block.n_tokens <= length_ - config_.sliding_window + 1;
    });
    for (Block& block : blocks_) {
      const bool left = block.position + block.n_tokens <= length_ - config_.window;
      if (!left || block.position < config_.sink || block.n_tokens < kBlockSize) continue;
      for (const int role : {0, 1}) seal(block, role);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      if (blocks_.empty() || blocks_.back().n_tokens == kBlockSize || blocks_.back().sealed[0] ||
          blocks_.back().sealed[1]) {
        blocks_.emplace_back().position = length_;
      }
      Block& block = blocks_.back();
      for (const int role : {0, 1}) {
        for (int head = 0; head < kKvHeads; ++head) {
          const float* from = rows[role].at(row, head, first + i);
          std::vector<float>& to = block.rows[role][head];
          to.resize(static_cast<std::size_t>(block.n_tokens * kRoleDims[role]));
          to.insert(to.end(), from, from + kRoleDims[role]);
        }
      }
      ++block.n_tokens;
      ++length_;
    }
  }

  void shorten(std::int64_t length) {
    length_ = std::min(length_, length);
    std::erase_if(blocks_, [&](const Block& block) { return block.position >= length_; });
    if (!blocks_.empty() && blocks_.back().position + blocks_.back().n_tokens > length_) {
      blocks_.back().n_tokens = length_ - blocks_.back().position;
    }
  }

  void clear() {
    blocks_.clear();
    length_ = 0;
  }

  /// The token's numbers; null if it was dropped.
  const float* token(int role, int head, std::int64_t position) const {
    for (const Block& block : blocks_) {
      if (position >= block.position && position < block.position + block.n_tokens) {
        return block.rows[role][head].data() +
               static_cast<std::size_t>((position - block.position) * kRoleDims[role]);
      }
    }
    return nullptr;
  }

 private:
  struct Block {
    std::int64_t position = 0;
    std::int64_t n_tokens = 0;
    bool sealed[2] = {false, false};
    std::vector<float> rows[2][kKvHeads];
  };

  void seal(Block& block, int role) const {
    codec::PartGeometry part = sealed_part(config_, role);
    if (part.format.is_raw() || block.sealed[role]) return;
    std::vector<std::byte> bytes(codec::part_bytes(part));
    for (std::vector<float>& rows : block.rows[role]) {
      part.kv_head = static_cast<int>(&rows - block.rows[role]);
      codec::encode(part, rows.data(), kBlockSize, bytes.data());
      codec::decode(part, bytes.data(), 0, kBlockSize, rows.data());
    }
    block.sealed[role] = true;
  }

  PagedKVCacheConfig config_;
  std::vector<Block> blocks_;
  std::int64_t length_ = 0;
  std::int64_t next_query_ = 0;
};

/// What fetch() should give for keys (role 0) or values: (B, kKvHeads, longest, dim).
inline std::vector<float> expected_fetch(const std::vector<DenseRow>& rows, int role,
                                         std::int64_t sliding_window) {
  std::vector<std::int64_t> first;
  std::int64_t longest = 0;
  for (const DenseRow& row : rows) {
    const std::int64_t next = std::min(row.next_query(), row.length());
    first.push_back(sliding_window > 0 ? std::max<std::int64_t>(0, next - sliding_window + 1) : 0);
    longest = std::max(longest, row.length() - first.back());
  }
  const auto dim = static_cast<std::size_t>(kRoleDims[role]);
  std::vector<float> numbers(rows.size() * kKvHeads * static_cast<std::size_t>(longest) * dim);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (int head = 0; head < kKvHeads; ++head) {
      for (std::int64_t t = first[i]; t < rows[i].length(); ++t) {
        const float* token = rows[i].token(role, head, t);
        if (token == nullptr) continue;
        const auto at =
            static_cast<std::int64_t>(i * kKvHeads + static_cast<std::size_t>(head)) * longest +
            longest - rows[i].length() + t;
        std::copy_n(token, dim, numbers.begin() + at * static_cast<std::int64_t>(dim));
      }
    }
  }
  return numbers;
}

/// Causal attention of queries (B, kQueryHeads, n_queries, key dim), in double.
inline std::vector<float> expected_attention(const std::vector<DenseRow>& rows,
                                             const std::vector<float>& queries,
                                             std::int64_t n_queries, double scale,
                                             std::int64_t window) {
  std::vector<float> out;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (int head = 0; head < kQueryHeads; ++head) {
      const int kv_head = head * kKvHeads / kQueryHeads;
      for (std::int64_t q = 0; q < n_queries; ++q) {
        const std::int64_t position = rows[i].next_query() + q;
        const float* query =
            queries.data() +
            (static_cast<std::int64_t>(i) * kQueryHeads + head) * n_queries * kRoleDims[0] +
            q * kRoleDims[0];
        std::vector<double> sum(static_cast<std::size_t>(kRoleDims[1]));
        double total = 0;
        const std::int64_t from = window > 0 ? std::max<std::int64_t>(0, position - window + 1) : 0;
        for (std::int64_t t = from; t <= std::min(position, rows[i].length() - 1); ++t) {
          const float* key = rows[i].token(0, kv_head, t);
          if (key == nullptr) continue;  // slid away: the query is padding before a row's first
          double score = 0;
          for (int d = 0; d < kRoleDims[0]; ++d) score += double{query[d]} * double{key[d]};
          const double weight = std::exp(score * scale);
          total += weight;
          const float* value = rows[i].token(1, kv_head, t);
          for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += weight * double{value[d]};
        }
        for (const double s : sum) out.push_back(total > 0 ? static_cast<float>(s / total) : 0.0F);
      }
    }
  }
  return out;
}

}  // namespace kvpool::testing
