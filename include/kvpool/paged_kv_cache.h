#pragma once

#include <mlx/array.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/block_pool.h"
#include "kvpool/paged_storage.h"

namespace kvpool {

class VecInferCodebooks;

namespace detail {
class BlockMemory;
class Sequence;
struct LayerFormat;
}  // namespace detail

/// How a PagedKVCache stores tokens. Plain data.
struct PagedKVCacheConfig {
  /// "raw" (the model's own type), "int8", "int4", "int2", "kivi4", "kivi2", or "vecinfer1",
  /// "vecinfer1.5", "vecinfer2", "vecinfer3", "vecinfer4".
  std::string key_format = "raw";
  std::string value_format = "raw";
  /// Channels to a scale: 32 or 64.
  int group_size = 32;
  /// What has a scale by groups of channels (int formats, the values of kivi) is stored after an
  /// orthonormal Hadamard transform, which spreads outliers.
  bool hadamard = true;
  /// Newest tokens that stay raw.
  std::int64_t window = 128;
  /// First tokens that stay raw.
  std::int64_t sink = 16;
  /// If not 0: tokens that a query sees, itself among them; blocks out of reach are given back.
  std::int64_t sliding_window = 0;
  /// Evaluate the tokens of each append, and refuse what its format cannot store: NaN, infinity and
  /// what is beyond fp16, unless the format is raw. Without it such a token spoils its own block.
  bool check_finite = false;
  /// What vecinfer formats need: codebooks of that format, and the layer of them.
  std::shared_ptr<const VecInferCodebooks> codebooks = nullptr;
  std::int64_t layer = 0;

  bool operator==(const PagedKVCacheConfig&) const = default;
};

/// A mask, as scaled_dot_product_attention takes it.
struct AttentionMask {
  bool causal = false;
  /// bool or additive float, broadcastable to (B, n_heads, S, tokens).
  std::optional<mlx::core::array> array;
};

/// A row as it is saved: packed bytes, at its true length.
struct PagedRowImage {
  std::int64_t block_size;
  std::int64_t n_kv_heads;
  std::int64_t key_dim;
  std::int64_t value_dim;
  mlx::core::Dtype dtype;
  /// Four numbers a block: position, tokens, whether keys are sealed, whether values are.
  std::vector<std::int64_t> blocks;
  mlx::core::array keys;    ///< uint8
  mlx::core::array values;  ///< uint8
  /// VecInferCodebooks::identity() of those it is coded with; 0 if with none.
  std::uint64_t codebooks = 0;
};

/// Keys and values of one attention layer for a batch of requests, in blocks of a pool, attended
/// where they lie.
///
/// New tokens go to the open block of each row, raw. A full block that has left the window is encoded
/// when the next tokens come. Rows have lengths of their own; nothing is padded. Blocks are shared
/// with forks by reference and copied when one side writes.
///
/// Ops are lazy and run on the stream in use; those of kernels (PagedStorage::level()) on the CPU's
/// default one if that is not the CPU's. Nothing here evaluates an array unless it says so. Not
/// thread-safe: caches of one storage are used by one thread at a time (PagedStorage).
class PagedKVCache {
 public:
  using KeysAndValues = std::pair<mlx::core::array, mlx::core::array>;

  /// A cache of `owners.size()` empty rows, row i for the request owners[i].
  /// @throws std::invalid_argument if `storage` is null, or a field of `config` is not allowed.
  PagedKVCache(std::shared_ptr<PagedStorage> storage, PagedKVCacheConfig config,
               std::span<const Owner> owners);
  ~PagedKVCache();
  PagedKVCache(const PagedKVCache&) = delete;
  PagedKVCache& operator=(const PagedKVCache&) = delete;

  /// Appends to each row the columns first[i] to first[i] + count[i] of keys and values,
  /// (B, n_kv_heads, S, head_dim); all S columns if the spans are empty.
  /// @throws BlockPoolExhaustedError, std::invalid_argument: no row has changed.
  /// Evaluates keys and values if config().check_finite.
  void append(const mlx::core::array& keys, const mlx::core::array& values,
              std::span<const std::int64_t> first = {}, std::span<const std::int64_t> count = {});

  /// All tokens, (B, n_kv_heads, longest row, head_dim), shorter rows to the right after zeros. With a
  /// sliding window only those that the tokens appended last can see.
  /// Costs nothing unless it is evaluated.
  KeysAndValues fetch() const;

  /// Attention of `queries` (B, n_heads, S, head_dim) over each row's tokens, S of those appended
  /// last. Result as the queries, with the values' head dim. A query that sees no token gets zeros.
  /// @throws std::invalid_argument naming what does not fit.
  mlx::core::array attend(const mlx::core::array& queries, float scale, const AttentionMask& mask,
                          const std::optional<mlx::core::array>& sinks = std::nullopt,
                          std::int64_t window = 0, float soft_cap = 0.0F);

  std::int64_t n_rows() const noexcept { return static_cast<std::int64_t>(rows_.size()); }
  std::vector<std::int64_t> lengths() const;
  /// Tokens of the longest row.
  std::int64_t size() const noexcept;
  /// Whether every row can be shortened: no block was given back that slid out of reach.
  bool is_trimmable() const noexcept;
  /// Forgets up to `n` of each row's last tokens, exactly: what remains is bit for bit what was
  /// there. @return how many of the longest row; 0 for a negative `n` or if not trimmable.
  std::int64_t trim(std::int64_t n);
  /// Frees all blocks; rows stay, empty.
  void release() noexcept;

  /// The rows `indices` of `other`, by reference, each under the owner of the same place, in place of
  /// this cache's own. @throws std::invalid_argument if the storages or configurations differ.
  void fork_rows(const PagedKVCache& other, std::span<const std::int64_t> indices,
                 std::span<const Owner> owners);
  /// Moves the rows of `other` behind this cache's own.
  void take_rows(PagedKVCache& other);
  /// Keeps the rows `indices`, in that order; frees the others.
  void keep_rows(std::span<const std::int64_t> indices);

  /// A row's blocks as bytes, lazily: nothing is copied unless they are evaluated. Nothing for a row
  /// without tokens.
  std::optional<PagedRowImage> save_row(std::int64_t row) const;
  /// Holds images as its rows, under `owners`, in place of what it held; one that is missing is an
  /// empty row.
  /// @throws std::invalid_argument if it is not consistent or does not fit this cache;
  ///         BlockPoolExhaustedError. Nothing has changed then.
  void load_rows(std::span<const std::optional<PagedRowImage>> images,
                 std::span<const Owner> owners);

  /// Bytes of the blocks held; shared ones count for each holder.
  std::size_t nbytes() const noexcept;
  /// Evaluating it runs all writes so far, of all caches of the storage.
  mlx::core::array pending() const;

  const std::shared_ptr<PagedStorage>& storage() const noexcept { return storage_; }
  const PagedKVCacheConfig& config() const noexcept { return config_; }
  std::vector<Owner> owners() const;

 private:
  std::unique_ptr<detail::LayerFormat> make_format(std::int64_t n_kv_heads, std::int64_t key_dim,
                                                   std::int64_t value_dim,
                                                   mlx::core::Dtype dtype) const;
  void require_row(std::int64_t row) const;
  void require_encodable(const detail::LayerFormat& format, int role, const mlx::core::array& rows,
                         std::span<const std::int64_t> first,
                         std::span<const std::int64_t> count) const;
  void adopt_format(const PagedKVCache& other);
  std::uint64_t codebook_identity() const noexcept;

  std::shared_ptr<PagedStorage> storage_;
  std::shared_ptr<detail::BlockMemory> memory_;  ///< Of new blocks.
  PagedKVCacheConfig config_;
  std::vector<std::unique_ptr<detail::Sequence>> rows_;
  std::unique_ptr<detail::LayerFormat> format_;  ///< Null until the first append.
  std::optional<mlx::core::Dtype> dtype_;
  std::vector<std::int64_t> first_positions_;  ///< Of column 0 of the last append, a row.
};

}  // namespace kvpool
