#pragma once

#include <mlx/array.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvpool {

namespace codec {
struct VectorQuantizer;
}  // namespace codec

/// How the keys, or the values, of all layers of a model are product-quantised. Plain data.
struct VecInferStream {
  /// (n_codebooks, 2), int32: channels to a code (2, 4 or 8), and bits of a code (8; 12 with 8
  /// channels). The heads of a layer have one code; layers may differ.
  mlx::core::array codes;
  /// int8: of each codebook in turn (2^bits, channels) numbers; centroid c of codebook i is scales[i]
  /// times row c of its numbers.
  mlx::core::array centroids;
  /// (n_codebooks,), float32.
  mlx::core::array scales;
  /// (n_layers, n_kv_heads), int32: the codebook of each head; layers and heads may share.
  mlx::core::array codebook_of;
  /// (n_layers, n_kv_heads, head_dim), float32: what is coded is (x - mean) / smooth, rotated; if there
  /// is no rotation, after a Hadamard transform.
  mlx::core::array smooth;
  mlx::core::array mean;
  /// (n_layers, n_kv_heads, head_dim, head_dim), int8: rows that are made orthonormal, each in turn;
  /// element i of what is coded is the product with row i.
  std::optional<mlx::core::array> rotation = std::nullopt;
  bool hadamard = true;
};

/// What one layer needs; shared by all caches of the layer.
struct VecInferLayer {
  std::shared_ptr<const codec::VectorQuantizer> keys;
  std::shared_ptr<const codec::VectorQuantizer> values;
};

/// The codebooks of one model for one of the formats vecinfer1 to vecinfer4. Layers may have codes of
/// more or fewer bits than the format's, if all together have no more. Immutable; thread-safe.
class VecInferCodebooks {
 public:
  /// Evaluates the arrays and copies them.
  /// @param format  "vecinfer1", "vecinfer1.5", "vecinfer2", "vecinfer3" or "vecinfer4".
  /// @throws std::invalid_argument naming the array that does not fit the others or the format, and
  ///         what is allowed.
  VecInferCodebooks(std::string format, const VecInferStream& keys, const VecInferStream& values);

  /// Centroids drawn from a normal distribution, the same for the same seed, and no mean or scales.
  /// They make a cache work without a model to calibrate on; what they lose is not what trained ones
  /// lose.
  /// @param rotates  whether keys are rotated, at random, as those of trained sets.
  /// @throws std::invalid_argument as the constructor.
  static VecInferCodebooks random(const std::string& format, std::int64_t n_layers,
                                  std::int64_t n_kv_heads, std::int64_t head_dim,
                                  std::uint64_t seed, bool rotates = false);

  const std::string& format() const noexcept { return format_; }
  std::int64_t n_layers() const noexcept { return static_cast<std::int64_t>(layers_.size()); }
  std::int64_t n_kv_heads() const noexcept { return n_kv_heads_; }
  std::int64_t head_dim() const noexcept { return head_dim_; }
  /// @throws std::out_of_range.
  const VecInferLayer& layer(std::int64_t index) const;
  /// Bytes of the centroids, scales and transforms as they are held, all layers together.
  std::size_t nbytes() const noexcept { return nbytes_; }
  /// Bits an element of keys and values, on average over the layers: at most the format's.
  double average_bits() const noexcept { return average_bits_; }
  /// A hash of all that codes depend on: what one set coded, only an equal one decodes. Never 0.
  std::uint64_t identity() const noexcept { return identity_; }

 private:
  std::string format_;
  std::int64_t n_kv_heads_ = 0;
  std::int64_t head_dim_ = 0;
  std::vector<VecInferLayer> layers_;
  std::size_t nbytes_ = 0;
  double average_bits_ = 0.0;
  std::uint64_t identity_ = 0;
};

}  // namespace kvpool
