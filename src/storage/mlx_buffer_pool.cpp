#include "kvpool/mlx_buffer_pool.h"

#include <mlx/allocator.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <mutex>
#include <new>
#include <optional>

#include "pool/backoff_mutex.h"
#include "util/concat.h"
#include "util/sole_holder.h"

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

constexpr std::size_t kClasses = std::numeric_limits<std::size_t>::digits;
constexpr std::size_t kLargest = std::size_t{1} << (kClasses - 2);
constexpr std::size_t kCacheLine = 64;

std::string message(const auto&... parts) { return concat("MlxBufferPool: ", parts...); }

std::size_t size_class(std::size_t byte_len) {
  return static_cast<std::size_t>(std::bit_width(byte_len - 1));
}

/// Whether MLX's memory is that of malloc().
bool is_host_memory() { return !mx::is_available(mx::Device::gpu); }

/// MLX's CPU allocator counts what the system refused as active for ever after, and with that every
/// evaluation waits for the one before.
void require_memory(std::size_t n_bytes) {
  constexpr std::size_t kMayBeRefused = std::size_t{1} << 20;
  if (n_bytes < kMayBeRefused || !is_host_memory()) return;
  void* volatile memory = std::malloc(n_bytes);  // Volatile: or the compiler leaves both calls out.
  if (memory == nullptr) throw std::bad_alloc();
  std::free(memory);
}

/// MLX's CPU allocator gives memory that begins within a line of the cache, where each wide load of
/// a kernel touches two. Room to begin at a line, where little is lost: MLX may serve a size that
/// is no power of two from a buffer up to two pages larger.
std::size_t alignment_room(std::size_t capacity) {
  return capacity >= 2048 * kCacheLine && is_host_memory() ? kCacheLine : 0;
}

/// A byte array over new, zeroed memory. MLX's dimensions are 32-bit, hence the second one.
mx::array zeroed_bytes(std::size_t capacity) {
  constexpr std::size_t kWidest = std::size_t{1} << 30;
  const std::size_t room = alignment_room(capacity);
  require_memory(capacity + room);
  mx::allocator::Data data = mx::allocator::malloc(capacity + room);
  void* const memory = data.buffer().raw_ptr();
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, capacity + room);
  const std::size_t past_line = reinterpret_cast<std::uintptr_t>(memory) % kCacheLine;
  const std::size_t offset = room > 0 && past_line > 0 ? kCacheLine - past_line : 0;
  const auto width = static_cast<mx::ShapeElem>(std::min(capacity, kWidest));
  const auto height = static_cast<mx::ShapeElem>(std::max(capacity / kWidest, std::size_t{1}));
  mx::array bytes(mx::Shape{height, width}, mx::uint8, nullptr, {});
  bytes.copy_shared_buffer(mx::array(std::move(data), mx::Shape{1}, mx::uint8), {width, 1},
                           {true, true, height == 1}, capacity,
                           static_cast<std::int64_t>(offset));
  bytes.set_status(mx::array::Status::available);
  return bytes;
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

void validate(std::size_t byte_len, mx::Dtype dtype, const mx::Shape& shape) {
  if (byte_len == 0 || byte_len > kLargest) {
    throw std::invalid_argument(message("byte_len must be 1 to ", kLargest, ", got ", byte_len));
  }
  const std::size_t needed = bytes_of(shape, dtype);
  if (needed > byte_len) {
    throw std::invalid_argument(message("byte_len must be at least the ", needed,
                                        " bytes of shape and dtype, got ", byte_len));
  }
}

/// MLX's memory is one for all devices of a backend, so that any free buffer will do.
void require_available(mx::Device device) {
  if (mx::is_available(device)) return;
  throw std::invalid_argument(
      message("device ", device == mx::Device::gpu ? "gpu" : "cpu", " is not one of this MLX"));
}

// A hand-out in one word, so that a handle and its buffer compare in one step: a number that grows
// by kNextHandOut, plus how it stands.
constexpr std::uint64_t kReleased = 1;
constexpr std::uint64_t kReset = 2;
constexpr std::uint64_t kNextHandOut = 4;

void grow_to(std::vector<BufferEntry*>& entries, std::size_t n) {
  if (entries.capacity() < n) entries.reserve(std::max(n, 2 * entries.capacity()));
}

}  // namespace

/// A place for one buffer; outlives the buffers that pass through it. A line of the cache holds all
/// that handing it out and taking it back touches.
struct alignas(64) BufferEntry {
  std::shared_ptr<mx::array::Data> data;
  std::atomic<std::uint64_t> hand_out{kReleased};
  std::uint64_t freed_at = 0;
  BufferEntry* below = nullptr;  ///< Neighbours in the stack of free buffers of its class.
  BufferEntry* above = nullptr;
  std::uint32_t in_use_index = 0;
  std::uint8_t cls = 0;
  std::optional<mx::array> bytes;  ///< Over `data`.

  std::size_t capacity() const noexcept { return std::size_t{1} << cls; }
  /// Whether arrays besides `bytes` refer to the memory. If none does, all that ran on it is seen.
  bool is_referred_to() const noexcept {
    constexpr long kOwnReferences = 2;
    return !detail::is_sole_holder(data, kOwnReferences);
  }
};

class BufferPoolState {
 public:
  explicit BufferPoolState(std::size_t max_free_bytes) : max_free_bytes_(max_free_bytes) {}

  /// @param self  what the handles keep alive: this.
  MlxBuffer alloc(const std::shared_ptr<BufferPoolState>& self, std::size_t byte_len,
                  mx::Dtype dtype, mx::Shape&& shape) {
    const std::lock_guard guard(mutex_);
    return MlxBuffer(self, take(size_class(byte_len)), byte_len, dtype, std::move(shape));
  }

  std::vector<MlxBuffer> alloc_batch(const std::shared_ptr<BufferPoolState>& self,
                                     std::span<const BufferRequest> requests) {
    std::vector<MlxBuffer> buffers;
    buffers.reserve(requests.size());
    const std::lock_guard guard(mutex_);
    const std::size_t n_before = in_use_.size();
    try {
      for (const BufferRequest& request : requests) {
        buffers.push_back(MlxBuffer(self, take(size_class(request.byte_len)), request.byte_len,
                                    request.dtype, mx::Shape(request.shape)));
      }
    } catch (...) {
      while (in_use_.size() > n_before) give_back(*in_use_.back(), kReleased);
      throw;
    }
    return buffers;
  }

  void release(const MlxBuffer& buffer) {
    if (buffer.pool_.get() != this) {
      throw std::invalid_argument(message("the buffer is of another pool"));
    }
    const std::lock_guard guard(mutex_);
    if (holds(buffer)) give_back(*buffer.entry_, kReleased);
  }

  void reset() {
    const std::lock_guard guard(mutex_);
    while (!in_use_.empty()) give_back(*in_use_.back(), kReset);
  }

  void clear() {
    const std::lock_guard guard(mutex_);
    shed(0);
  }

  mx::array array(const MlxBuffer& buffer) {
    const std::lock_guard guard(mutex_);
    if (!holds(buffer)) throw StaleBufferError(message("the buffer was released"));
    mx::array view(buffer.shape_, buffer.dtype_, nullptr, {});
    view.copy_shared_buffer(*buffer.entry_->bytes, view.strides(), {true, true, view.ndim() < 2},
                            view.size());
    view.set_status(mx::array::Status::available);
    return view;
  }

  std::size_t free_count() const {
    const std::lock_guard guard(mutex_);
    return free_count_;
  }
  std::size_t free_bytes() const {
    const std::lock_guard guard(mutex_);
    return free_bytes_;
  }
  std::size_t in_use_count() const {
    const std::lock_guard guard(mutex_);
    return in_use_.size();
  }
  std::size_t created_bytes() const {
    const std::lock_guard guard(mutex_);
    return created_bytes_;
  }
  std::size_t max_free_bytes() const noexcept { return max_free_bytes_; }

 private:
  /// Free buffers of one size; the one used last is on top.
  struct Stack {
    BufferEntry* top = nullptr;
    BufferEntry* bottom = nullptr;
  };

  /// False if the buffer was released; throws if it was reset or handed on since.
  static bool holds(const MlxBuffer& buffer) {
    switch (buffer.entry_->hand_out.load(std::memory_order_relaxed) - buffer.hand_out_) {
      case 0:
        return true;
      case kReleased:
        return false;
      case kReset:
        throw StaleBufferError(message("the pool was reset since the buffer was handed out"));
      default:
        throw StaleBufferError(message("the buffer was given back and handed on since"));
    }
  }

  BufferEntry& take(std::size_t cls) {
    BufferEntry* entry = stacks_[cls].top;
    if (entry == nullptr) entry = stacks_[cls + 1].top;
    if (entry != nullptr) {
      remove_free(*entry);
    } else {
      entry = &create(cls);
    }
    const std::uint64_t last = entry->hand_out.load(std::memory_order_relaxed);
    entry->hand_out.store((last & ~(kNextHandOut - 1)) + kNextHandOut, std::memory_order_release);
    entry->in_use_index = static_cast<std::uint32_t>(in_use_.size());
    in_use_.push_back(entry);
    return *entry;
  }

  BufferEntry& create(std::size_t cls) {
    mx::array bytes = zeroed_bytes(std::size_t{1} << cls);
    if (spare_.empty()) {
      grow_to(spare_, entries_.size() + 1);
      grow_to(in_use_, entries_.size() + 1);
      spare_.push_back(&entries_.emplace_back());
    }
    BufferEntry& entry = *spare_.back();
    spare_.pop_back();
    entry.data = bytes.data_shared_ptr();
    entry.bytes = std::move(bytes);
    entry.cls = static_cast<std::uint8_t>(cls);
    created_bytes_ += entry.capacity();
    return entry;
  }

  /// Memory that an array still refers to is left to that array: handing it on would be aliasing.
  void give_back(BufferEntry& entry, std::uint64_t standing) noexcept {
    entry.hand_out.store(entry.hand_out.load(std::memory_order_relaxed) + standing,
                         std::memory_order_release);
    in_use_.back()->in_use_index = entry.in_use_index;
    in_use_[entry.in_use_index] = in_use_.back();
    in_use_.pop_back();
    if (entry.capacity() > max_free_bytes_ || entry.is_referred_to()) {
      drop(entry);
      return;
    }
    Stack& stack = stacks_[entry.cls];
    entry.freed_at = ++n_freed_;
    entry.below = stack.top;
    entry.above = nullptr;
    (stack.top != nullptr ? stack.top->above : stack.bottom) = &entry;
    stack.top = &entry;
    ++free_count_;
    free_bytes_ += entry.capacity();
    shed(max_free_bytes_);
  }

  void remove_free(BufferEntry& entry) noexcept {
    Stack& stack = stacks_[entry.cls];
    (entry.above != nullptr ? entry.above->below : stack.top) = entry.below;
    (entry.below != nullptr ? entry.below->above : stack.bottom) = entry.above;
    --free_count_;
    free_bytes_ -= entry.capacity();
  }

  void shed(std::size_t bytes) noexcept {
    while (free_bytes_ > bytes) {
      BufferEntry* oldest = nullptr;
      for (const Stack& stack : stacks_) {
        if (stack.bottom != nullptr &&
            (oldest == nullptr || stack.bottom->freed_at < oldest->freed_at)) {
          oldest = stack.bottom;
        }
      }
      remove_free(*oldest);
      drop(*oldest);
    }
  }

  void drop(BufferEntry& entry) noexcept {
    entry.bytes.reset();
    entry.data.reset();
    spare_.push_back(&entry);
  }

  const std::size_t max_free_bytes_;
  mutable BackoffMutex mutex_;
  std::deque<BufferEntry> entries_;
  std::vector<BufferEntry*> spare_;   ///< Entries without a buffer; has room for all.
  std::vector<BufferEntry*> in_use_;  ///< In any order; has room for all.
  std::array<Stack, kClasses> stacks_{};
  std::size_t free_count_ = 0;
  std::size_t free_bytes_ = 0;
  std::size_t created_bytes_ = 0;
  std::uint64_t n_freed_ = 0;
};

}  // namespace kvpool::detail

namespace kvpool {

MlxBuffer::MlxBuffer(const std::shared_ptr<detail::BufferPoolState>& pool,
                     detail::BufferEntry& entry, std::size_t byte_len, mx::Dtype dtype,
                     mx::Shape&& shape)
    : pool_(pool),
      entry_(&entry),
      hand_out_(entry.hand_out.load(std::memory_order_relaxed)),
      byte_len_(byte_len),
      capacity_(entry.capacity()),
      dtype_(dtype),
      shape_(std::move(shape)) {}

bool MlxBuffer::live() const noexcept {
  return entry_->hand_out.load(std::memory_order_acquire) == hand_out_;
}

mx::array MlxBuffer::array() const { return pool_->array(*this); }

MlxBufferPool::MlxBufferPool(std::size_t max_free_bytes)
    : state_(std::make_shared<detail::BufferPoolState>(max_free_bytes)) {}

MlxBufferPool::~MlxBufferPool() = default;

MlxBuffer MlxBufferPool::alloc(mx::Device device, std::size_t byte_len, mx::Dtype dtype,
                               mx::Shape shape) {
  detail::require_available(device);
  detail::validate(byte_len, dtype, shape);
  return state_->alloc(state_, byte_len, dtype, std::move(shape));
}

std::vector<MlxBuffer> MlxBufferPool::alloc_batch(mx::Device device,
                                                  std::span<const BufferRequest> requests) {
  detail::require_available(device);
  for (const auto& [byte_len, dtype, shape] : requests) detail::validate(byte_len, dtype, shape);
  return state_->alloc_batch(state_, requests);
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
