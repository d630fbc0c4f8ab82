#include "kvpool/mlx_buffer_pool.h"

#include <mlx/allocator.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <deque>
#include <limits>
#include <mutex>
#include <optional>

#include "pool/backoff_mutex.h"
#include "util/concat.h"

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

constexpr std::size_t kClasses = std::numeric_limits<std::size_t>::digits;

std::string message(const auto&... parts) { return concat("MlxBufferPool: ", parts...); }

std::size_t size_class(std::size_t byte_len) {
  return static_cast<std::size_t>(std::bit_width(byte_len - 1));
}

/// A byte array over new, zeroed memory. MLX's dimensions are 32-bit, hence the second one.
mx::array zeroed_bytes(std::size_t capacity) {
  constexpr std::size_t kWidest = std::size_t{1} << 30;
  mx::allocator::Data data = mx::allocator::malloc(capacity);
  std::memset(data.buffer().raw_ptr(), 0, capacity);
  const auto width = static_cast<mx::ShapeElem>(std::min(capacity, kWidest));
  const auto height = static_cast<mx::ShapeElem>(std::max(capacity / kWidest, std::size_t{1}));
  return mx::array(std::move(data), mx::Shape{height, width}, mx::uint8);
}

std::size_t bytes_of(const mx::Shape& shape, mx::Dtype dtype) {
  std::size_t bytes = mx::size_of(dtype);
  for (const mx::ShapeElem extent : shape) {
    if (extent < 0) {
      throw std::invalid_argument(message("shape must not be negative, got ", extent));
    }
    if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(extent), &bytes)) {
      throw std::invalid_argument(message("shape has more bytes than can be counted"));
    }
  }
  return bytes;
}

}  // namespace

enum class BufferStanding : std::uint8_t { kInUse, kReleased, kReset };

/// A place for one buffer; outlives the buffers that pass through it.
struct BufferEntry {
  std::optional<mx::array> bytes;
  std::atomic<std::uint64_t> generation{0};  ///< Grows when the buffer is handed out.
  std::atomic<BufferStanding> standing{BufferStanding::kReleased};
  std::size_t capacity = 0;
  BufferEntry* older = nullptr;  ///< Neighbours in the list of those in use, or of the free ones.
  BufferEntry* newer = nullptr;
  BufferEntry* below = nullptr;  ///< Neighbours in the free stack of its class.
  BufferEntry* above = nullptr;
};

class BufferPoolState : public std::enable_shared_from_this<BufferPoolState> {
 public:
  explicit BufferPoolState(std::size_t max_free_bytes) : max_free_bytes_(max_free_bytes) {}

  void validate(const BufferRequest& request) const {
    if (request.byte_len == 0 || request.byte_len > std::bit_floor(SIZE_MAX) / 2) {
      throw std::invalid_argument(message("byte_len must be 1 to ", std::bit_floor(SIZE_MAX) / 2,
                                          ", got ", request.byte_len));
    }
    const std::size_t needed = bytes_of(request.shape, request.dtype);
    if (needed > request.byte_len) {
      throw std::invalid_argument(message("byte_len must be at least the ", needed,
                                          " bytes of shape and dtype, got ", request.byte_len));
    }
  }

  MlxBuffer alloc(std::size_t byte_len, mx::Dtype dtype, mx::Shape shape) {
    const std::lock_guard guard(mutex_);
    BufferEntry* entry = take(size_class(byte_len));
    return MlxBuffer(shared_from_this(), entry, byte_len, dtype, std::move(shape));
  }

  std::vector<MlxBuffer> alloc_batch(std::span<const BufferRequest> requests) {
    std::vector<MlxBuffer> buffers;
    buffers.reserve(requests.size());
    const std::lock_guard guard(mutex_);
    try {
      for (const BufferRequest& request : requests) {
        BufferEntry* entry = take(size_class(request.byte_len));
        buffers.push_back(MlxBuffer(shared_from_this(), entry, request.byte_len, request.dtype,
                                    request.shape));
      }
    } catch (...) {
      for (const MlxBuffer& buffer : buffers) give_back(*buffer.entry_, BufferStanding::kReleased);
      throw;
    }
    return buffers;
  }

  void release(const MlxBuffer& buffer) {
    if (buffer.pool_.get() != this) {
      throw std::invalid_argument(message("the buffer is of another pool"));
    }
    const std::lock_guard guard(mutex_);
    BufferEntry& entry = *buffer.entry_;
    require_not_reused(buffer);
    if (entry.standing == BufferStanding::kInUse) give_back(entry, BufferStanding::kReleased);
  }

  void reset() {
    const std::lock_guard guard(mutex_);
    while (in_use_.newest != nullptr) give_back(*in_use_.newest, BufferStanding::kReset);
  }

  void clear() {
    const std::lock_guard guard(mutex_);
    shed(0);
  }

  mx::array array(const MlxBuffer& buffer) {
    const std::lock_guard guard(mutex_);
    require_not_reused(buffer);
    BufferEntry& entry = *buffer.entry_;
    if (entry.standing != BufferStanding::kInUse) {
      throw StaleBufferError(message("the buffer was released"));
    }
    mx::array view(buffer.shape_, buffer.dtype_, nullptr, {});
    view.copy_shared_buffer(*entry.bytes, view.strides(), {true, true, view.ndim() < 2},
                            view.size());
    view.set_status(mx::array::Status::available);
    return view;
  }

  std::size_t free_count() const {
    const std::lock_guard guard(mutex_);
    return free_.count;
  }
  std::size_t free_bytes() const {
    const std::lock_guard guard(mutex_);
    return free_bytes_;
  }
  std::size_t in_use_count() const {
    const std::lock_guard guard(mutex_);
    return in_use_.count;
  }
  std::size_t created_bytes() const {
    const std::lock_guard guard(mutex_);
    return created_bytes_;
  }
  std::size_t max_free_bytes() const noexcept { return max_free_bytes_; }

 private:
  /// Entries in the order in which they came.
  struct Queue {
    BufferEntry* oldest = nullptr;
    BufferEntry* newest = nullptr;
    std::size_t count = 0;

    void push(BufferEntry& entry) noexcept {
      entry.older = newest;
      entry.newer = nullptr;
      (newest != nullptr ? newest->newer : oldest) = &entry;
      newest = &entry;
      ++count;
    }
    void remove(BufferEntry& entry) noexcept {
      (entry.older != nullptr ? entry.older->newer : oldest) = entry.newer;
      (entry.newer != nullptr ? entry.newer->older : newest) = entry.older;
      --count;
    }
  };

  static void require_not_reused(const MlxBuffer& buffer) {
    const BufferEntry& entry = *buffer.entry_;
    if (entry.generation != buffer.generation_) {
      throw StaleBufferError(message("the buffer was given back and handed on since"));
    }
    if (entry.standing == BufferStanding::kReset) {
      throw StaleBufferError(message("the pool was reset since the buffer was handed out"));
    }
  }

  BufferEntry* take(std::size_t cls) {
    BufferEntry* entry = tops_[cls];
    if (entry == nullptr && cls + 1 < kClasses) entry = tops_[cls + 1];
    if (entry != nullptr) {
      remove_free(*entry);
    } else {
      entry = create(std::size_t{1} << cls);
    }
    entry->generation.fetch_add(1, std::memory_order_relaxed);
    entry->standing.store(BufferStanding::kInUse, std::memory_order_release);
    in_use_.push(*entry);
    return entry;
  }

  BufferEntry* create(std::size_t capacity) {
    mx::array bytes = zeroed_bytes(capacity);
    if (spare_.empty()) {
      spare_.reserve(entries_.size() + 1);
      spare_.push_back(&entries_.emplace_back());
    }
    BufferEntry* entry = spare_.back();
    spare_.pop_back();
    entry->bytes = std::move(bytes);
    entry->capacity = capacity;
    created_bytes_ += capacity;
    return entry;
  }

  /// Memory that an array still refers to is left to that array: handing it on would be aliasing.
  void give_back(BufferEntry& entry, BufferStanding standing) noexcept {
    entry.standing.store(standing, std::memory_order_release);
    in_use_.remove(entry);
    if (entry.bytes->data_shared_ptr().use_count() > 1) {
      drop(entry);
      return;
    }
    BufferEntry*& top = tops_[size_class(entry.capacity)];
    entry.below = top;
    entry.above = nullptr;
    if (top != nullptr) top->above = &entry;
    top = &entry;
    free_.push(entry);
    free_bytes_ += entry.capacity;
    shed(max_free_bytes_);
  }

  void remove_free(BufferEntry& entry) noexcept {
    (entry.above != nullptr ? entry.above->below : tops_[size_class(entry.capacity)]) = entry.below;
    if (entry.below != nullptr) entry.below->above = entry.above;
    free_.remove(entry);
    free_bytes_ -= entry.capacity;
  }

  void shed(std::size_t bytes) noexcept {
    while (free_bytes_ > bytes) {
      BufferEntry& oldest = *free_.oldest;
      remove_free(oldest);
      drop(oldest);
    }
  }

  void drop(BufferEntry& entry) noexcept {
    entry.bytes.reset();
    spare_.push_back(&entry);
  }

  const std::size_t max_free_bytes_;
  mutable BackoffMutex mutex_;
  std::deque<BufferEntry> entries_;
  std::vector<BufferEntry*> spare_;  ///< Entries without a buffer; has room for all.
  std::array<BufferEntry*, kClasses> tops_{};
  Queue in_use_;
  Queue free_;
  std::size_t free_bytes_ = 0;
  std::size_t created_bytes_ = 0;
};

}  // namespace kvpool::detail

namespace kvpool {

namespace {

/// MLX's memory is one for all devices of a backend, so that any free buffer will do.
void require_available(mx::Device device) {
  if (mx::is_available(device)) return;
  throw std::invalid_argument(detail::message(
      "device ", device == mx::Device::gpu ? "gpu" : "cpu", " is not one of this MLX"));
}

}  // namespace

MlxBuffer::MlxBuffer(std::shared_ptr<detail::BufferPoolState> pool, detail::BufferEntry* entry,
                     std::size_t byte_len, mx::Dtype dtype, mx::Shape shape)
    : pool_(std::move(pool)),
      entry_(entry),
      generation_(entry->generation),
      byte_len_(byte_len),
      capacity_(entry->capacity),
      dtype_(dtype),
      shape_(std::move(shape)) {}

bool MlxBuffer::live() const noexcept {
  return entry_->generation == generation_ &&
         entry_->standing == detail::BufferStanding::kInUse;
}

mx::array MlxBuffer::array() const { return pool_->array(*this); }

MlxBufferPool::MlxBufferPool(std::size_t max_free_bytes)
    : state_(std::make_shared<detail::BufferPoolState>(max_free_bytes)) {}

MlxBufferPool::~MlxBufferPool() = default;

MlxBuffer MlxBufferPool::alloc(mx::Device device, std::size_t byte_len, mx::Dtype dtype,
                               mx::Shape shape) {
  const BufferRequest request{byte_len, dtype, std::move(shape)};
  require_available(device);
  state_->validate(request);
  return state_->alloc(byte_len, dtype, request.shape);
}

std::vector<MlxBuffer> MlxBufferPool::alloc_batch(mx::Device device,
                                                  std::span<const BufferRequest> requests) {
  require_available(device);
  for (const BufferRequest& request : requests) state_->validate(request);
  return state_->alloc_batch(requests);
}

void MlxBufferPool::release(const MlxBuffer& buffer) { state_->release(buffer); }

void MlxBufferPool::reset() { state_->reset(); }

void MlxBufferPool::clear() { state_->clear(); }

std::size_t MlxBufferPool::free_count() const { return state_->free_count(); }

std::size_t MlxBufferPool::free_bytes() const { return state_->free_bytes(); }

std::size_t MlxBufferPool::in_use_count() const { return state_->in_use_count(); }

std::size_t MlxBufferPool::created_bytes() const { return state_->created_bytes(); }

std::size_t MlxBufferPool::max_free_bytes() const { return state_->max_free_bytes(); }

}  // namespace kvpool
