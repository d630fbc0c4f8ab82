#include "layer_cache.h"

#include <mlx/fast.h>
#include <mlx/ops.h>

#include "kvpool/vecinfer_codebooks.h"
#include "llama_model.h"

namespace mx = mlx::core;

namespace llama {

void ContiguousCache::append(const mx::array& keys, const mx::array& values) {
  constexpr int kStep = 256;
  const mx::array* added[] = {&keys, &values};
  const int n = keys.shape(2);
  if (arrays_.empty() || length_ + n > arrays_[0].shape(2)) {
    std::vector<mx::array> grown;
    for (std::size_t i = 0; i < 2; ++i) {
      mx::Shape shape = added[i]->shape();
      shape[2] = (n + kStep - 1) / kStep * kStep;
      const mx::array room = mx::zeros(shape, added[i]->dtype());
      if (arrays_.empty()) {
        grown.push_back(room);
        continue;
      }
      shape[2] = length_;
      grown.push_back(mx::concatenate({mx::slice(arrays_[i], {0, 0, 0, 0}, shape), room}, 2));
    }
    arrays_ = std::move(grown);
  }
  for (std::size_t i = 0; i < 2; ++i) {
    mx::Shape stop = arrays_[i].shape();
    stop[2] = length_ + n;
    arrays_[i] = mx::slice_update(arrays_[i], *added[i], {0, 0, length_, 0}, stop);
  }
  length_ += n;
}

mx::array ContiguousCache::attend(const mx::array& queries, float scale) {
  std::vector<mx::array> seen;
  for (const mx::array& array : arrays_) {
    mx::Shape stop = array.shape();
    stop[2] = length_;
    seen.push_back(mx::slice(array, {0, 0, 0, 0}, stop));
  }
  return mx::fast::scaled_dot_product_attention(queries, seen[0], seen[1], scale,
                                                queries.shape(2) > 1 ? "causal" : "");
}

namespace {

std::vector<kvpool::Owner> new_owners(kvpool::BlockPoolAllocator& pool, int n) {
  std::vector<kvpool::Owner> owners;
  for (int i = 0; i < n; ++i) owners.push_back(pool.new_owner());
  return owners;
}

}  // namespace

PagedCache::PagedCache(std::shared_ptr<kvpool::PagedStorage> storage,
                       kvpool::PagedKVCacheConfig config, int batch)
    : cache_(storage, std::move(config), new_owners(*storage->pool(), batch)) {}

void PagedCache::append(const mx::array& keys, const mx::array& values) {
  cache_.append(keys, values);
}

mx::array PagedCache::attend(const mx::array& queries, float scale) {
  return cache_.attend(queries, scale, {.causal = true, .array = {}});
}

Caches make_caches(const std::string& format, const Shape& shape, int batch, int block_size) {
  Caches caches;
  if (format == "stock") {
    for (int i = 0; i < shape.n_layers; ++i) caches.push_back(std::make_unique<ContiguousCache>());
    return caches;
  }
  kvpool::PoolConfig pool;
  pool.block_size = block_size;
  pool.grow_on_exhaustion = true;
  const auto storage = std::make_shared<kvpool::PagedStorage>(
      std::make_shared<kvpool::BlockPoolAllocator>(pool));
  kvpool::PagedKVCacheConfig config;
  config.key_format = config.value_format = format;
  if (format.starts_with("vecinfer")) {
    config.codebooks =
        std::make_shared<const kvpool::VecInferCodebooks>(kvpool::VecInferCodebooks::random(
            format, shape.n_layers, shape.n_kv_heads, shape.head_dim, 0, true));
  }
  for (int i = 0; i < shape.n_layers; ++i) {
    config.layer = i;
    caches.push_back(std::make_unique<PagedCache>(storage, config, batch));
  }
  return caches;
}

}  // namespace llama
