#include "backend/ops/ops_backend.h"

#include <mlx/ops.h>

#include <algorithm>

#include "kernels/kernels.h"

namespace mx = mlx::core;

namespace kvpool::detail {

std::shared_ptr<BlockBytes> ShelfMemory::take(std::size_t bytes, Stay /*stay*/) {
  std::unique_lock guard(mutex_);
  std::shared_ptr<Shelf>& shelf = shelves_[bytes];
  if (shelf == nullptr) shelf = std::make_shared<Shelf>(bytes);
  return shelf->take();
}

std::size_t ShelfMemory::resident_bytes() const {
  const std::lock_guard guard(mutex_);
  std::size_t bytes = 0;
  for (const auto& [_, shelf] : shelves_) bytes += shelf->resident_bytes();
  return bytes;
}

void ShelfMemory::add_pending(std::vector<mx::array>& versions) {
  const std::lock_guard guard(mutex_);
  for (const auto& [_, shelf] : shelves_) {
    shelf->pack();
    const auto& version = shelf->version();
    if (version && !version->is_available()) versions.push_back(*version);
  }
}

std::string_view OpsBackend::level() const { return kernels::kOps; }

std::shared_ptr<BlockMemory> OpsBackend::memory_for_cache() {
  auto memory = std::make_shared<ShelfMemory>();
  const std::lock_guard guard(mutex_);
  std::erase_if(memories_, [](const auto& known) { return known.expired(); });
  memories_.push_back(memory);
  return memory;
}

std::vector<std::shared_ptr<ShelfMemory>> OpsBackend::memories() const {
  std::vector<std::shared_ptr<ShelfMemory>> memories;
  const std::lock_guard guard(mutex_);
  for (const auto& entry : memories_) {
    if (auto memory = entry.lock()) memories.push_back(std::move(memory));
  }
  return memories;
}

OpsFormat OpsBackend::with_vectors(const LayerFormat& format) {
  const std::lock_guard guard(mutex_);
  const auto parts = [this](const std::shared_ptr<const codec::VectorQuantizer>& quantizer) {
    if (quantizer == nullptr) return std::shared_ptr<const VectorParts>();
    if (const auto known = vector_parts_.find(quantizer); known != vector_parts_.end()) {
      return known->second;
    }
    std::erase_if(vector_parts_, [](const auto& entry) { return entry.first.expired(); });
    return vector_parts_[quantizer] = std::make_shared<const VectorParts>(*quantizer);
  };
  return {format, {parts(format.quantizers[0]), parts(format.quantizers[1])}};
}

std::size_t OpsBackend::resident_bytes() const {
  std::size_t bytes = 0;
  for (const auto& memory : memories()) bytes += memory->resident_bytes();
  return bytes;
}

mx::array OpsBackend::pending() {
  std::vector<mx::array> versions;
  for (const auto& memory : memories()) memory->add_pending(versions);
  const mx::array link({std::uint8_t{0}}, mx::uint8);
  return versions.empty() ? link : mx::depends({link}, versions).front();
}

std::int64_t OpsBackend::recover() {
  pending().eval();
  return 0;
}

}  // namespace kvpool::detail
