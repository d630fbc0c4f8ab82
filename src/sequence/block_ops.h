#pragma once

#include <mlx/array.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "sequence/sequence.h"

namespace kvpool::detail {

/// Runs `tasks` as the next link of the chain. `keys` and `values` are (B, n_kv_heads, S, dim) of the
/// raw format's type. Lazy.
void run_append(BlockMemory& memory, const LayerFormat& format, const AppendTasks& tasks,
                const mlx::core::array& keys, const mlx::core::array& values);

/// Blocks of one row, as a gather wants them.
struct RowBlocks {
  std::shared_ptr<const BlockList> blocks;
  std::int64_t first;  ///< Position of the first token wanted.
  std::int64_t length;
};

/// Keys and values of tokens `first` to `length`, (B, n_kv_heads, most, dim) of `dtype`, shorter
/// rows to the right with zeros before them. Lazy and no link of the chain, so that it costs nothing
/// if nobody evaluates it; until then it holds the blocks, so that nobody writes over them.
std::pair<mlx::core::array, mlx::core::array> gather(BlockMemory& memory,
                                                     const LayerFormat& format,
                                                     std::vector<RowBlocks> rows,
                                                     mlx::core::Dtype dtype);

}  // namespace kvpool::detail
