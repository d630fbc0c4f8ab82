#pragma once

#include <mlx/array.h>

#include <cstdint>
#include <memory>

#include "kvpool/kv_cache_builder.h"
#include "kvpool/paged_kv_cache.h"

namespace kvpool {

/// What VecInfer's codes of a cache's tokens come to, by arithmetic; what is held is nbytes(), and
/// more by the tokens that stay raw.
struct VecInferBytes {
  std::int64_t compressed_key = 0;  ///< Codes of all tokens, all heads and rows.
  std::int64_t fp16_key = 0;        ///< The same tokens in fp16.
  std::int64_t compressed_value = 0;
  std::int64_t fp16_value = 0;
  std::int64_t codebooks = 0;  ///< Of the cache's layer, with its transforms; shared, not a copy each.

  /// Bits of a code by element, keys and values together; 0 without tokens.
  double assigned_avg_bits() const noexcept {
    const std::int64_t fp16 = fp16_key + fp16_value;
    return fp16 == 0 ? 0.0
                     : 16.0 * static_cast<double>(compressed_key + compressed_value) /
                           static_cast<double>(fp16);
  }
};

/// @throws std::invalid_argument if the cache's formats are not vecinfer ones.
VecInferBytes vecinfer_bytes(const PagedKVCache& cache);

/// The formats, window, sink and codebooks of `config` as a paged cache takes them.
/// @param layer  of the codebooks.
/// @throws std::invalid_argument if the method is not vecinfer, or if there are no codebooks: the
///         text names `kvpool calibrate`. Random ones must be asked for (config.random_codebooks).
PagedKVCacheConfig vecinfer_cache_config(const KVCacheConfig& config, std::int64_t n_kv_heads,
                                         std::int64_t layer = 0);

/// A batch's keys and values of one layer as codes of VecInfer (arXiv:2510.06175), attended where
/// they lie: no decoded copy exists. The newest `window` and the first `sink` tokens stay raw.
///
/// A PagedKVCache of its own pool, under the names of the Python class. Not thread-safe.
class VecInferKVCache {
 public:
  /// @param config  method "vecinfer1" to "vecinfer4" and codebooks; its head_dim counts if they are
  ///                random.
  /// @throws std::invalid_argument as vecinfer_cache_config().
  VecInferKVCache(const KVCacheConfig& config, std::int64_t n_kv_heads, std::int64_t layer = 0,
                  std::int64_t batch_size = 1);

  /// Appends (B, n_kv_heads, S, head_dim) and returns all tokens as PagedKVCache::fetch().
  /// @throws std::invalid_argument: nothing has changed.
  PagedKVCache::KeysAndValues update_and_fetch(const mlx::core::array& keys,
                                               const mlx::core::array& values);
  /// Attention of `q` (B, n_heads, S, head_dim), S of the tokens appended last; result like `q`.
  /// @param sliding_window  if > 0, a query sees so many tokens, itself among them.
  mlx::core::array fused_sdpa(const mlx::core::array& q, float scale, bool causal = true,
                              std::int64_t sliding_window = 0);

  bool empty() const noexcept { return cache_.size() == 0; }
  std::int64_t size() const noexcept { return cache_.size(); }
  /// Forgets up to `n` of the last tokens, exactly. @return how many.
  std::int64_t trim(std::int64_t n) { return cache_.trim(n); }
  /// Bytes of the blocks held.
  std::size_t nbytes() const noexcept { return cache_.nbytes(); }
  VecInferBytes bytes() const { return vecinfer_bytes(cache_); }
  PagedKVCache& cache() noexcept { return cache_; }

 private:
  PagedKVCache cache_;
};

}  // namespace kvpool
