#include "kvpool/mlx_block_storage.h"

#include <mlx/ops.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "kvpool/block_format.h"
#include "storage/cpu_op.h"
#include "storage/segment_op.h"
#include "storage/segments.h"
#include "util/concat.h"
#include "util/shape_text.h"

namespace mx = mlx::core;

namespace kvpool {

namespace {

/// A segment is a power of two of bytes along one of MLX's dimensions, which are 32-bit.
constexpr std::int64_t kLargestBlock = std::int64_t{1} << 30;

std::string message(const auto&... parts) {
  return detail::concat("MLXBlockStorage: ", parts...);
}

std::invalid_argument not_held(const Block& block) {
  return std::invalid_argument(message(
      "block ", block.block_id(), " is not held: its handle was freed, or is of another pool"));
}

/// Of the calling thread; unlike a thread's id never given out again.
std::uint64_t this_thread() {
  static std::atomic<std::uint64_t> n_threads{0};
  thread_local const std::uint64_t number = ++n_threads;
  return number;
}

}  // namespace

/// Which block has which place, and in which of its lives the block took it.
class MLXBlockStorage::Segments {
 public:
  /// A block's segment and its place there.
  struct Opened {
    mx::array& segment;
    detail::BlockPlace place;
  };

  explicit Segments(std::shared_ptr<MlxBufferPool> buffers) : buffers_(std::move(buffers)) {}

  /// Takes a place if the block has none of this format; zeroes it when the block's life is new.
  Opened open(const Block& block, detail::BlockPlace place, const BlockPoolAllocator& pool,
              mx::Stream stream) {
    Home& home = home_of(block, place, pool);
    place.offset = home.place.offset();
    mx::array& segment = home.place.segment->version;
    std::uint64_t& thread = home.place.segment->thread;
    if (thread != this_thread() && segment.status() == mx::array::Status::unscheduled) {
      throw std::runtime_error(message(
          "another thread's reads or writes of block ", block.block_id(),
          ", or of one that lies beside it, are not evaluated yet; MLX runs lazy work only in the "
          "thread that asked for it, so evaluate it there first"));
    }
    thread = this_thread();
    if (!home.cleared) detail::clear_block(segment, place, stream);
    home.cleared = true;
    return {segment, place};
  }

  void release(const Block& block, const BlockPoolAllocator& pool) noexcept {
    const auto found = homes_.find(block.block_id());
    if (found != homes_.end() && found->second.block.life() <= block.life() &&
        !pool.is_held(found->second.block)) {
      drop(found);
    }
  }

  std::size_t resident_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const auto& [thread, places] : places_) bytes += places.resident_bytes();
    return bytes;
  }

  mutable std::mutex mutex;

 private:
  struct Home {
    detail::Place place;
    std::uint64_t thread;
    BlockFormat format;
    Block block;  ///< A handle of the life that took the place.
    bool cleared = false;
  };
  using Homes = std::unordered_map<BlockId, Home>;

  Home& home_of(const Block& block, const detail::BlockPlace& place,
                const BlockPoolAllocator& pool) {
    const auto found = homes_.find(block.block_id());
    if (found != homes_.end()) {
      Home& home = found->second;
      if (home.block.life() == block.life()) return home;
      if (home.block.life() > block.life()) throw not_held(block);
      if (home.format == place.format && home.thread == this_thread()) {
        home.block = block;
        home.cleared = false;
        return home;
      }
      drop(found);
    }
    const std::size_t bytes = place.block_bytes();
    detail::SegmentList& places = places_.try_emplace(this_thread(), buffers_).first->second;
    if (!places.has_free(bytes)) drop_unheld(pool);
    const detail::Place taken = places.take(bytes);
    try {
      return homes_.emplace(block.block_id(), Home{taken, this_thread(), place.format, block})
          .first->second;
    } catch (...) {
      places.give_back(taken);
      throw;
    }
  }

  Homes::iterator drop(Homes::iterator home) noexcept {
    places_.at(home->second.thread).give_back(home->second.place);
    return homes_.erase(home);
  }

  void drop_unheld(const BlockPoolAllocator& pool) noexcept {
    for (auto home = homes_.begin(); home != homes_.end();) {
      home = pool.is_held(home->second.block) ? std::next(home) : drop(home);
    }
  }

  const std::shared_ptr<MlxBufferPool> buffers_;
  /// By thread, so that no thread's lazy work hangs on another's.
  std::unordered_map<std::uint64_t, detail::SegmentList> places_;
  Homes homes_;
};

MLXBlockStorage::MLXBlockStorage(std::shared_ptr<BlockPoolAllocator> pool, std::int64_t head_dim,
                                 std::int64_t n_kv_heads, std::shared_ptr<MlxBufferPool> buffers)
    : pool_(std::move(pool)),
      head_dim_(head_dim),
      n_kv_heads_(n_kv_heads),
      segments_(std::make_unique<Segments>(buffers != nullptr ? std::move(buffers)
                                                              : std::make_shared<MlxBufferPool>())) {
  if (pool_ == nullptr) throw std::invalid_argument(message("pool must not be null"));
  if (head_dim < 1) throw std::invalid_argument(message("head_dim must be >= 1, got ", head_dim));
  if (n_kv_heads < 1) {
    throw std::invalid_argument(message("n_kv_heads must be >= 1, got ", n_kv_heads));
  }
  std::int64_t bytes = static_cast<std::int64_t>(sizeof(float));
  if (__builtin_mul_overflow(bytes, head_dim, &bytes) ||
      __builtin_mul_overflow(bytes, n_kv_heads, &bytes) ||
      __builtin_mul_overflow(bytes, pool_->config().block_size, &bytes) ||
      bytes > kLargestBlock) {
    throw std::invalid_argument(
        message("an fp32 block of block_size ", pool_->config().block_size, ", n_kv_heads ",
                n_kv_heads, " and head_dim ", head_dim, " must have at most 2^30 bytes"));
  }
}

MLXBlockStorage::~MLXBlockStorage() = default;

namespace {

/// Where the block's rows go, but for the offset.
detail::BlockPlace place_of(const Block& block, const MLXBlockStorage& storage) {
  if (!block.live() || !storage.pool()->is_held(block)) throw not_held(block);
  return {0, block_format(block.format()), storage.n_kv_heads(),
          storage.pool()->config().block_size, storage.head_dim()};
}

void require_fits(const Block& block, const detail::BlockPlace& place, std::int64_t offset,
                  const mx::array& values) {
  const bool has_heads = place.n_heads > 1;
  if (values.ndim() != (has_heads ? 3U : 2U) || values.shape(-1) != place.width ||
      (has_heads && values.shape(0) != place.n_heads)) {
    throw std::invalid_argument(
        message("values must be (", has_heads ? std::to_string(place.n_heads) + ", n, " : "n, ",
                place.width, "), got ", detail::shape_text(values.shape())));
  }
  const std::int64_t n = values.shape(-2);
  if (offset < 0 || offset > place.block_size || n > place.block_size - offset) {
    throw std::invalid_argument(message(n, " row(s) at offset ", offset,
                                        " do not fit a block of ", place.block_size, " slots"));
  }
  if (place.format.is_code() && !mx::issubdtype(values.dtype(), mx::integer)) {
    throw std::invalid_argument(message("format ", block.format(),
                                        " takes codes of an integer type, got floats"));
  }
}

}  // namespace

mx::array MLXBlockStorage::buffer_for(const Block& block) {
  const detail::BlockPlace where = place_of(block, *this);
  const mx::Stream stream = detail::cpu_stream();
  const std::lock_guard guard(segments_->mutex);
  const auto [segment, place] = segments_->open(block, where, *pool_, stream);
  const mx::array packed = detail::read_packed(segment, place, stream);
  return n_kv_heads_ == 1 ? mx::squeeze(packed, 0, stream) : packed;
}

void MLXBlockStorage::write(const Block& block, std::int64_t offset, const mx::array& values) {
  const detail::BlockPlace where = place_of(block, *this);
  require_fits(block, where, offset, values);
  if (values.shape(-2) == 0) return;
  const mx::Stream stream = detail::cpu_stream();
  mx::array rows = mx::astype(values, where.format.dtype, stream);
  if (n_kv_heads_ == 1) rows = mx::expand_dims(rows, 0, stream);
  const std::lock_guard guard(segments_->mutex);
  const auto [segment, place] = segments_->open(block, where, *pool_, stream);
  detail::write_rows(segment, place, offset, rows, stream);
}

mx::array MLXBlockStorage::read(const Block& block) {
  const detail::BlockPlace where = place_of(block, *this);
  const mx::Stream stream = detail::cpu_stream();
  const std::lock_guard guard(segments_->mutex);
  const auto [segment, place] = segments_->open(block, where, *pool_, stream);
  const mx::array rows = detail::read_rows(segment, place, block.n_used(), stream);
  return n_kv_heads_ == 1 ? mx::squeeze(rows, 0, stream) : rows;
}

std::size_t MLXBlockStorage::resident_bytes() const {
  const std::lock_guard guard(segments_->mutex);
  return segments_->resident_bytes();
}

void MLXBlockStorage::release(const Block& block) {
  if (block.live()) {
    throw std::invalid_argument(
        message("block ", block.block_id(), " is still held: free it before its memory"));
  }
  const std::lock_guard guard(segments_->mutex);
  segments_->release(block, *pool_);
}

}  // namespace kvpool
