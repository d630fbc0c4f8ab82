#include "sequence/block_memory.h"

#include <algorithm>
#include <stdexcept>

#include "kvpool/paged_storage.h"

namespace mx = mlx::core;

namespace kvpool {

namespace detail {

BlockBytes::BlockBytes(std::shared_ptr<BlockMemory> memory, Place place) noexcept
    : memory_(std::move(memory)),
      place_(place),
      address_(place.segment->version.data<std::byte>() + place.offset()) {}

BlockBytes::~BlockBytes() { memory_->give_back(place_); }

void keep(Buffers& buffers, const std::shared_ptr<BlockBytes>& bytes) {
  if (!buffers.empty() && buffers.back() == bytes->buffer()) return;
  if (std::find(buffers.begin(), buffers.end(), bytes->buffer()) == buffers.end()) {
    buffers.push_back(bytes->buffer());
  }
}

BlockMemory::BlockMemory(std::shared_ptr<MlxBufferPool> buffers)
    : places_(std::move(buffers)), chain_({std::uint8_t{0}}, mx::uint8) {}

std::shared_ptr<BlockBytes> BlockMemory::take(std::size_t bytes, Stay stay) {
  std::unique_lock guard(places_mutex_);
  const Place place = places_.take(bytes, stay);
  guard.unlock();
  try {
    return std::make_shared<BlockBytes>(shared_from_this(), place);
  } catch (...) {
    give_back(place);
    throw;
  }
}

void BlockMemory::give_back(const Place& place) noexcept {
  const std::lock_guard guard(places_mutex_);
  places_.give_back(place);
}

std::size_t BlockMemory::resident_bytes() const {
  const std::lock_guard guard(places_mutex_);
  return places_.resident_bytes();
}

}  // namespace detail

PagedStorage::PagedStorage(std::shared_ptr<BlockPoolAllocator> pool,
                           std::shared_ptr<MlxBufferPool> buffers)
    : pool_(std::move(pool)) {
  if (pool_ == nullptr) throw std::invalid_argument("PagedStorage: pool must not be null");
  if (buffers == nullptr) buffers = std::make_shared<MlxBufferPool>();
  memory_ = std::make_shared<detail::BlockMemory>(std::move(buffers));
}

std::size_t PagedStorage::resident_bytes() const { return memory_->resident_bytes(); }

}  // namespace kvpool
