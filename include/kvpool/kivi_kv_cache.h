#pragma once

#include <mlx/array.h>

#include <cstdint>
#include <vector>

#include "kvpool/kv_cache.h"

namespace kvpool {

/// KIVI (Liu et al. 2024): keys quantised per channel over a group of tokens, values per token over
/// groups of channels, both asymmetric min-max with an fp16 scale and bias; the newest tokens stay
/// in fp16. Really packed. Lazy: nothing here evaluates an array.
class KiviKVCache final : public KVCache {
 public:
  /// @param head_dim  a multiple of `group_size`.
  /// @param bits  2, 4 or 8.
  /// @param group_size  tokens a key group, channels a value group: 32, 64 or 128.
  /// @param residual  newest tokens that stay in fp16, at least 0.
  /// @throws std::invalid_argument naming the argument, its value and what is allowed.
  explicit KiviKVCache(std::int64_t head_dim, int bits = 2, int group_size = 32,
                       std::int64_t residual = 128);

  /// @throws std::invalid_argument if the vector is not (head_dim,).
  void append_key(const mlx::core::array& k) override;
  void append_value(const mlx::core::array& v) override;
  /// @throws std::invalid_argument if `q` is not (head_dim,), or there is no token, or a key without
  ///         a value.
  mlx::core::array attend(const mlx::core::array& q) override;
  std::int64_t memory_bytes() const override;
  void reset() override;
  std::int64_t size() const override { return n_values_; }
  bool drop_last_key() override;

  std::int64_t head_dim() const noexcept { return head_dim_; }
  int bits() const noexcept { return bits_; }

 private:
  /// Packed codes, scales and biases of one group of tokens.
  using Packed = std::vector<mlx::core::array>;
  /// One stream: sealed groups, then raw vectors.
  struct Lane {
    std::vector<Packed> sealed;
    std::vector<mlx::core::array> raw;
  };

  mlx::core::array checked(const char* what, const mlx::core::array& vector) const;
  void seal_oldest();
  mlx::core::array unpacked(const Lane& lane) const;

  const std::int64_t head_dim_;
  const int bits_;
  const int group_size_;
  const std::int64_t residual_;
  Lane keys_;
  Lane values_;
  std::int64_t n_keys_ = 0;
  std::int64_t n_values_ = 0;
};

}  // namespace kvpool
