#pragma once

#include <mlx/array.h>
#include <mlx/stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "kvpool/mlx_buffer_pool.h"
#include "sequence/sequence.h"

namespace kvpool::detail {

/// Blocks of one row, as a gather wants them.
struct RowBlocks {
  std::shared_ptr<const BlockList> blocks;
  std::int64_t first;  ///< Position of the first token wanted.
  std::int64_t length;
};

/// What a query sees, beside the tokens of its own sequence.
struct Visibility {
  bool causal = false;
  std::int64_t window = 0;
  std::optional<mlx::core::array> mask;   ///< bool or float, broadcastable to (B, n_heads, S, L).
  std::optional<mlx::core::array> sinks;  ///< (n_heads,)
  float soft_cap = 0.0F;
};

/// One row, and the absolute position of the first query.
struct AttendRow {
  Sequence* sequence;
  std::int64_t query_position;
};

/// What runs the ops of paged caches: one a storage, which chooses by device and level. All that it
/// returns is lazy, and sees the blocks as they are at the call.
class Backend {
 public:
  using KeysAndValues = std::pair<mlx::core::array, mlx::core::array>;

  virtual ~Backend() = default;

  /// "ops", or the level of the kernels.
  virtual std::string_view level() const = 0;
  /// Where a new cache takes places from.
  virtual std::shared_ptr<BlockMemory> memory_for_cache() = 0;
  /// Bytes held for all caches.
  virtual std::size_t resident_bytes() const = 0;
  /// Evaluating it runs all writes so far, and gives back memory that they no longer need.
  virtual mlx::core::array pending() = 0;
  /// As PagedStorage::recover().
  virtual std::int64_t recover() = 0;

  /// Runs `tasks`. `keys` and `values` are (B, n_kv_heads, S, dim) of the raw format's type.
  virtual void append(const LayerFormat& format, const AppendTasks& tasks,
                      const mlx::core::array& keys, const mlx::core::array& values) = 0;

  /// Keys and values of tokens `first` to `length`, (B, n_kv_heads, most, dim) of `dtype`, shorter
  /// rows to the right with zeros before them. Costs nothing if nobody evaluates it.
  virtual KeysAndValues gather(const LayerFormat& format, std::vector<RowBlocks> rows,
                               mlx::core::Dtype dtype) = 0;

  /// Attention of `queries` (B, n_heads, S, key dim), which check_attend() has passed, over blocks:
  /// (B, n_heads, S, value dim) of the queries' type.
  virtual mlx::core::array attend(const LayerFormat& format, std::span<const AttendRow> rows,
                                  const mlx::core::array& queries, float scale,
                                  const Visibility& visibility) = 0;

  /// The bytes of a row's blocks one behind the other (image_layout.h), keys and values: two uint8
  /// vectors. Costs nothing if nobody evaluates it.
  virtual KeysAndValues read_image(const LayerFormat& format, std::vector<TokenBlock> blocks) = 0;
  /// Fills `blocks` from such bytes.
  virtual void write_image(const LayerFormat& format, std::span<const TokenBlock> blocks,
                           const mlx::core::array& keys, const mlx::core::array& values) = 0;
};

/// @throws std::invalid_argument naming what of attend()'s arguments does not fit.
void check_attend(const LayerFormat& format, std::span<const AttendRow> rows,
                  const mlx::core::array& queries, const Visibility& visibility);

/// `mask` as kernels take it: bool or fp32, contiguous; its strides go into `out`.
mlx::core::array laid_out(const mlx::core::array& mask, std::int64_t n_keys, attention::Mask& out,
                          mlx::core::Stream stream);

/// Null where this library has no CUDA kernels, or they do not run on the device here.
std::shared_ptr<Backend> make_cuda_backend();

/// The backend for the stream in use: the kernels of its device, or `ops` where there are none or
/// KVPOOL_KERNELS says so.
/// @throws std::invalid_argument if KVPOOL_KERNELS names no level that runs here.
std::shared_ptr<Backend> make_backend(std::shared_ptr<MlxBufferPool> buffers);

}  // namespace kvpool::detail
