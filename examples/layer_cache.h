#pragma once

#include <mlx/array.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/paged_kv_cache.h"

namespace llama {

struct Shape;

/// The keys and values of one layer, as a model sees them.
class LayerCache {
 public:
  virtual ~LayerCache() = default;

  /// Takes the keys and values (B, n_kv_heads, S, head_dim) of S new tokens.
  virtual void append(const mlx::core::array& keys, const mlx::core::array& values) = 0;
  /// Causal attention of the newest tokens' queries (B, n_heads, S, head_dim) over all tokens.
  virtual mlx::core::array attend(const mlx::core::array& queries, float scale) = 0;
  virtual std::int64_t length() const = 0;
  /// Evaluating this makes the appends so far happen.
  virtual std::vector<mlx::core::array> state() const = 0;
};

using Caches = std::vector<std::unique_ptr<LayerCache>>;

/// The usual cache: one array for the keys and one for the values, which grow by 256 tokens.
class ContiguousCache final : public LayerCache {
 public:
  void append(const mlx::core::array& keys, const mlx::core::array& values) override;
  mlx::core::array attend(const mlx::core::array& queries, float scale) override;
  std::int64_t length() const override { return length_; }
  std::vector<mlx::core::array> state() const override { return arrays_; }

 private:
  std::vector<mlx::core::array> arrays_;  ///< Keys, values; empty at first.
  int length_ = 0;
};

/// kvpool's: blocks of a pool that all layers share, packed once they have left the window.
class PagedCache final : public LayerCache {
 public:
  PagedCache(std::shared_ptr<kvpool::PagedStorage> storage, kvpool::PagedKVCacheConfig config,
             int batch);
  void append(const mlx::core::array& keys, const mlx::core::array& values) override;
  mlx::core::array attend(const mlx::core::array& queries, float scale) override;
  std::int64_t length() const override { return cache_.size(); }
  std::vector<mlx::core::array> state() const override { return {cache_.pending()}; }

 private:
  kvpool::PagedKVCache cache_;
};

/// One cache a layer. `format` is "stock" for ContiguousCache, else PagedKVCacheConfig's format of
/// keys and values, under a pool that grows; the codebooks of vecinfer formats are random.
Caches make_caches(const std::string& format, const Shape& shape, int batch, int block_size);

}  // namespace llama
