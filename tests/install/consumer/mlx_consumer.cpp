#include <kvpool/block_pool.h>
#include <kvpool/mlx_block_storage.h>
#include <kvpool/pool_backed_kv_cache.h>
#include <mlx/mlx.h>

#include <memory>

namespace mx = mlx::core;

int main() {
  const auto pool = std::make_shared<kvpool::BlockPoolAllocator>();

  kvpool::MLXBlockStorage storage(pool, /*head_dim=*/8);
  const auto block = pool->allocate(kvpool::Stream::kKey, 2, /*owner=*/1, "int4")[0];
  storage.write(block, 0, mx::full({2, 8}, 5, mx::uint8));
  if (!mx::array_equal(storage.read(block), mx::full({2, 8}, 5, mx::uint8)).item<bool>()) return 1;

  kvpool::PoolBackedKVCache cache(pool, /*owner=*/2);
  const mx::array tokens = mx::random::normal({1, 2, 5, 8});
  const auto [keys, values] = cache.update_and_fetch(tokens, tokens);
  if (!mx::array_equal(keys, tokens).item<bool>() || cache.offset() != 5) return 2;
  cache.release();
  return pool->stats().blocks_in_use() == 1 ? 0 : 3;
}
