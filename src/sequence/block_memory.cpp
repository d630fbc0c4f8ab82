#include "sequence/block_memory.h"

#include <mlx/ops.h>
#include <mlx/primitives.h>

#include <algorithm>
#include <limits>
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

namespace {

/// MLX may report here, once, that other work has failed: that says nothing of this array.
bool can_be_evaluated(mx::array array) {
  try {
    array.eval();
    return true;
  } catch (const std::exception&) {
    return array.status() != mx::array::Status::unscheduled;
  }
}

/// An array that can be evaluated and holds NaN, whether as numbers or as a block's bytes.
mx::array not_a_number(const mx::array& like, mx::Stream stream) {
  const mx::array value = like.dtype() == mx::uint8
                              ? mx::array(255, mx::uint8)
                              : mx::array(std::numeric_limits<float>::quiet_NaN());
  return mx::contiguous(mx::full(like.shape(), value, like.dtype(), stream), false, stream);
}

/// Makes all that a link depends on beside the link before it NaN if any of it cannot be evaluated.
bool replace_failing_inputs(mx::array& link) {
  const std::vector<mx::array> inputs(link.inputs().begin() + 1, link.inputs().end());
  if (std::ranges::all_of(inputs, can_be_evaluated)) return false;
  const mx::Stream stream = link.primitive().stream();
  std::vector<mx::array> outputs = link.outputs();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const mx::array replacement = not_a_number(inputs[i], stream);
    for (mx::array& output : outputs) output.inputs()[i + 1] = replacement;
  }
  return true;
}

}  // namespace

std::int64_t BlockMemory::recover() {
  std::vector<mx::array> pending;
  for (mx::array link = latest_link(); link.status() == mx::array::Status::unscheduled;
       link = mx::array(link.inputs()[0])) {
    pending.push_back(link);
  }
  std::int64_t n_replaced = 0;
  for (; !pending.empty(); pending.pop_back()) {
    mx::array& link = pending.back();
    if (can_be_evaluated(link)) continue;
    if (replace_failing_inputs(link)) ++n_replaced;
    if (!can_be_evaluated(link)) link.eval();
  }
  return n_replaced;
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

std::int64_t PagedStorage::recover() { return memory_->recover(); }

}  // namespace kvpool
