#include "backend/cuda/quantizers.h"

#include <algorithm>
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

cuda::Turn turn_of(const codec::HeadTransform& head) {
  if (!head.rotation.empty()) return cuda::Turn::kRotation;
  return head.hadamard ? cuda::Turn::kHadamard : cuda::Turn::kNone;
}

}  // namespace

DeviceQuantizers::Known DeviceQuantizers::upload(
    const std::shared_ptr<const codec::VectorQuantizer>& owner) const {
  const codec::VectorQuantizer& from = *owner;
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
  const std::size_t turns = packed.begin();
  for (const auto& head : from.transforms) {
    const cuda::Turn turn = turn_of(head);
    packed.add(&turn, 1);
  }
  const bool rotates =
      std::ranges::any_of(from.transforms, [](const auto& head) { return !head.rotation.empty(); });
  const auto add_matrices = [&](std::vector<float> codec::HeadTransform::*matrix) {
    const std::size_t start = packed.begin();
    for (const auto& head : from.transforms) {
      std::vector<float> numbers = head.*matrix;
      numbers.resize(head.smooth.size() * head.smooth.size());  // Those without have no use for it.
      packed.add(numbers.data(), numbers.size());
    }
    return start;
  };
  const std::size_t rotation = rotates ? add_matrices(&codec::HeadTransform::rotation) : 0;
  const std::size_t back = rotates ? add_matrices(&codec::HeadTransform::back) : 0;

  Known known{owner, OpMemory(changes_, packed.bytes()), {}};
  const std::byte* const base = known.memory.address();
  cuda::Quantizer& quantizer = known.quantizer;
  quantizer.sub_dim = from.codebooks.front()->sub_dim;
  quantizer.code_bits = from.codebooks.front()->code_bits;
  quantizer.centroids = reinterpret_cast<const std::int8_t*>(base + centroids);
  quantizer.scales = reinterpret_cast<const float*>(base + scales);
  quantizer.smooth = reinterpret_cast<const float*>(base + smooth);
  quantizer.mean = reinterpret_cast<const float*>(base + mean);
  quantizer.turns = reinterpret_cast<const cuda::Turn*>(base + turns);
  if (rotates) {
    quantizer.rotation = reinterpret_cast<const float*>(base + rotation);
    quantizer.back = reinterpret_cast<const float*>(base + back);
  }
  return known;
}

const cuda::Quantizer& DeviceQuantizers::of(
    const std::shared_ptr<const codec::VectorQuantizer>& quantizer) {
  if (const auto found = known_.find(quantizer.get());
      found != known_.end() && !found->second.owner.expired()) {
    return found->second.quantizer;
  }
  std::erase_if(known_, [](const auto& item) { return item.second.owner.expired(); });
  return known_.emplace(quantizer.get(), upload(quantizer)).first->second.quantizer;
}

}  // namespace kvpool::detail
