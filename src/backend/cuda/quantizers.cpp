#include "backend/cuda/quantizers.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "backend/cuda/device.h"

namespace kvpool::detail {

namespace {

/// Arrays one behind the other, each at a multiple of 16 bytes.
class Packed {
 public:
  /// Starts an array. @return where.
  std::size_t begin() {
    bytes_.resize((bytes_.size() + 15) / 16 * 16);
    return bytes_.size();
  }
  template <typename T>
  void add(const T* items, std::size_t n) {
    const auto* const first = reinterpret_cast<const std::uint8_t*>(items);
    bytes_.insert(bytes_.end(), first, first + n * sizeof(T));
  }
  const std::vector<std::uint8_t>& bytes() const noexcept { return bytes_; }

 private:
  std::vector<std::uint8_t> bytes_;
};

DeviceQuantizers::Entry upload(const codec::VectorQuantizer& from) {
  Packed packed;
  const std::size_t centroids = packed.begin();
  for (const auto& book : from.codebooks) {
    packed.add(book->centroids.data(), book->centroids.size());
  }
  const std::size_t scales = packed.begin();
  for (const auto& book : from.codebooks) packed.add(&book->scale, 1);
  const std::size_t smooth = packed.begin();
  for (const auto& head : from.transforms) packed.add(head.smooth.data(), head.smooth.size());
  const std::size_t mean = packed.begin();
  for (const auto& head : from.transforms) packed.add(head.mean.data(), head.mean.size());
  const std::size_t hadamard = packed.begin();
  for (const auto& head : from.transforms) {
    const std::uint8_t turned = head.hadamard ? 1 : 0;
    packed.add(&turned, 1);
  }

  mlx::core::array memory = to_device(packed.bytes());
  const std::byte* const base = device_address(memory);
  cuda::Quantizer quantizer;
  quantizer.sub_dim = from.codebooks.front()->sub_dim;
  quantizer.code_bits = from.codebooks.front()->code_bits;
  quantizer.centroids = reinterpret_cast<const std::int8_t*>(base + centroids);
  quantizer.scales = reinterpret_cast<const float*>(base + scales);
  quantizer.smooth = reinterpret_cast<const float*>(base + smooth);
  quantizer.mean = reinterpret_cast<const float*>(base + mean);
  quantizer.hadamard = reinterpret_cast<const std::uint8_t*>(base + hadamard);
  return {quantizer, std::move(memory)};
}

}  // namespace

const DeviceQuantizers::Entry& DeviceQuantizers::of(
    const std::shared_ptr<const codec::VectorQuantizer>& quantizer) {
  if (const auto found = known_.find(quantizer.get());
      found != known_.end() && !found->second.owner.expired()) {
    return found->second.entry;
  }
  std::erase_if(known_, [](const auto& item) { return item.second.owner.expired(); });
  return known_.emplace(quantizer.get(), Known{quantizer, upload(*quantizer)}).first->second.entry;
}

}  // namespace kvpool::detail
