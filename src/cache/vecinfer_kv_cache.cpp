#include "kvpool/vecinfer_kv_cache.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "codec/vector_quantizer.h"
#include "kvpool/vecinfer_codebooks.h"
#include "util/concat.h"

namespace mx = mlx::core;

namespace kvpool {

namespace {

std::string message(const auto&... parts) { return detail::concat("VecInferKVCache: ", parts...); }

/// Bytes of one head's codes for a token.
double code_bytes(const codec::VectorQuantizer& quantizer, std::int64_t head_dim) {
  return static_cast<double>(head_dim) * quantizer.codebooks[0]->code().bits() / 8.0;
}

std::int64_t quantizer_bytes(const codec::VectorQuantizer& quantizer) {
  std::size_t bytes = 0;
  std::set<const codec::Codebook*> books;
  for (const auto& book : quantizer.codebooks) {
    if (books.insert(book.get()).second) {
      bytes += book->nbytes();
    }
  }
  for (const codec::HeadTransform& transform : quantizer.transforms) {
    bytes += transform.nbytes();
  }
  return static_cast<std::int64_t>(bytes);
}

std::shared_ptr<PagedStorage> own_storage(std::int64_t block_size) {
  return std::make_shared<PagedStorage>(std::make_shared<BlockPoolAllocator>(
      PoolConfig{.block_size = block_size, .n_blocks = 2, .grow_on_exhaustion = true}));
}

std::vector<Owner> owners_of(std::int64_t batch_size) {
  if (batch_size < 1) {
    throw std::invalid_argument(message("batch_size must be at least 1, got ", batch_size));
  }
  return std::vector<Owner>(static_cast<std::size_t>(batch_size), 1);
}

}  // namespace

VecInferBytes vecinfer_bytes(const PagedKVCache& cache) {
  const PagedKVCacheConfig& config = cache.config();
  if (config.codebooks == nullptr || config.key_format != config.codebooks->format() ||
      config.value_format != config.codebooks->format()) {
    throw std::invalid_argument(message("keys and values must have a vecinfer format, got ",
                                        config.key_format, " and ", config.value_format));
  }
  std::int64_t rows = 0;
  for (const std::int64_t length : cache.lengths()) rows += length;
  rows *= config.codebooks->n_kv_heads();
  const std::int64_t head_dim = config.codebooks->head_dim();
  const auto compressed = [&](const codec::VectorQuantizer& quantizer) {
    return static_cast<std::int64_t>(static_cast<double>(rows) * code_bytes(quantizer, head_dim));
  };
  const VecInferLayer& layer = config.codebooks->layer(config.layer);
  VecInferBytes bytes;
  bytes.compressed_key = compressed(*layer.keys);
  bytes.compressed_value = compressed(*layer.values);
  bytes.fp16_key = bytes.fp16_value = rows * head_dim * 2;
  bytes.codebooks = quantizer_bytes(*layer.keys) + quantizer_bytes(*layer.values);
  return bytes;
}

PagedKVCacheConfig vecinfer_cache_config(const KVCacheConfig& config, std::int64_t n_kv_heads,
                                         std::int64_t layer) {
  const std::string format = config.method == "vecinfer"
                                 ? detail::concat(config.method, config.bits)
                                 : config.method;
  if (!format.starts_with("vecinfer")) {
    throw std::invalid_argument(
        message("method must be vecinfer1, vecinfer1.5, vecinfer2, vecinfer3 or vecinfer4, got '",
                config.method, "'"));
  }
  auto codebooks = config.codebooks;
  if (codebooks == nullptr && config.random_codebooks) {
    codebooks = std::make_shared<const VecInferCodebooks>(VecInferCodebooks::random(
        format, layer + 1, n_kv_heads, config.head_dim, *config.random_codebooks));
  }
  if (codebooks == nullptr) {
    throw std::invalid_argument(message(
        "there are no codebooks; `kvpool calibrate` makes them from a model and a text. Random ones, "
        "which lose far more, are used if random_codebooks is set to a seed"));
  }
  return {.key_format = format,
          .value_format = format,
          .window = config.window,
          .sink = config.sink,
          .check_finite = config.check_finite,
          .codebooks = std::move(codebooks),
          .layer = layer};
}

VecInferKVCache::VecInferKVCache(const KVCacheConfig& config, std::int64_t n_kv_heads,
                                 std::int64_t layer, std::int64_t batch_size)
    : cache_(own_storage(config.block_size), vecinfer_cache_config(config, n_kv_heads, layer),
             owners_of(batch_size)) {}

PagedKVCache::KeysAndValues VecInferKVCache::update_and_fetch(const mx::array& keys,
                                                              const mx::array& values) {
  cache_.append(keys, values);
  return cache_.fetch();
}

mx::array VecInferKVCache::fused_sdpa(const mx::array& q, float scale, bool causal,
                                      std::int64_t sliding_window) {
  return cache_.attend(q, scale, {causal, std::nullopt}, std::nullopt,
                       std::max<std::int64_t>(sliding_window, 0));
}

}  // namespace kvpool
