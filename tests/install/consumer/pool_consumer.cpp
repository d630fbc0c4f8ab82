#include <kvpool/block_pool.h>

#include <cstdio>

int main() {
  kvpool::BlockPoolAllocator pool({.block_size = 16, .n_blocks = 256});
  const auto blocks = pool.allocate(kvpool::Stream::kKey, 40, /*owner=*/1, "int2");
  std::printf("%s", pool.stats().to_prometheus("pool").c_str());
  pool.free_all(1);
  return blocks.size() == 3 && pool.stats().blocks_in_use() == 0 ? 0 : 1;
}
