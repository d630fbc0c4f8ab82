#include "kvpool/vecinfer_codebooks.h"

#include <mlx/ops.h>
#include <mlx/random.h>
#include <mlx/transforms.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <span>
#include <stdexcept>
#include <utility>

#include "codec/codec.h"
#include "codec/vector_quantizer.h"
#include "util/concat.h"
#include "util/shape_text.h"

namespace mx = mlx::core;

namespace kvpool {

namespace {

/// For sums of bits that are rounded.
constexpr double kBitsTolerance = 1e-9;

std::string message(const auto&... parts) {
  return detail::concat("VecInferCodebooks: ", parts...);
}

codec::Code code_of(const std::string& format) {
  if (format.starts_with("vecinfer")) return codec::code_of(format);
  throw std::invalid_argument(
      message("format must be vecinfer1, vecinfer1.5, vecinfer2, vecinfer3 or vecinfer4, got '",
              format, "'"));
}

/// FNV-1a.
class Hash {
 public:
  void add(const void* bytes, std::size_t n) noexcept {
    const auto* const at = static_cast<const unsigned char*>(bytes);
    for (std::size_t i = 0; i < n; ++i) value_ = (value_ ^ at[i]) * 0x100000001B3U;
  }
  void add(const auto& numbers) noexcept {
    add(std::data(numbers), std::size(numbers) * sizeof(*std::data(numbers)));
  }
  std::uint64_t value() const noexcept { return value_ != 0 ? value_ : 1; }

 private:
  std::uint64_t value_ = 0xCBF29CE484222325U;
};

/// One stream's arrays, checked, as plain numbers.
class Stream {
 public:
  Stream(const char* name, const VecInferStream& stream) : name_(name) {
    const mx::Shape& heads = stream.codebook_of.shape();
    if (heads.size() != 2 || heads[0] < 1 || heads[1] < 1) {
      refuse("codebook_of must be (n_layers, n_kv_heads), got ", detail::shape_text(heads));
    }
    n_layers = heads[0];
    n_kv_heads = heads[1];
    const mx::Shape& rows = stream.smooth.shape();
    if (rows.size() != 3 || rows[0] != heads[0] || rows[1] != heads[1] || rows[2] < 8 ||
        rows[2] % 8 != 0 || rows[2] > codec::kMaxHeadDim) {
      refuse("smooth must be (", heads[0], ", ", heads[1], ", a multiple of 8 up to ",
             codec::kMaxHeadDim, "), got ", detail::shape_text(rows));
    }
    head_dim = rows[2];
    const mx::ShapeElem n_books = stream.scales.ndim() == 1 ? stream.scales.shape(0) : 0;
    if (n_books < 1) {
      refuse("scales must be (n_codebooks,), got ", detail::shape_text(stream.scales.shape()));
    }
    require("codes", stream.codes, {n_books, 2}, mx::int32, "int32");
    require("centroids", stream.centroids, {n_centroid_numbers(stream)}, mx::int8, "int8");
    require("scales", stream.scales, {n_books}, mx::float32, "float32");
    require("codebook_of", stream.codebook_of, heads, mx::int32, "int32");
    require("smooth", stream.smooth, rows, mx::float32, "float32");
    require("mean", stream.mean, rows, mx::float32, "float32");
    if (stream.rotation) {
      require("rotation", *stream.rotation, {rows[0], rows[1], rows[2], rows[2]}, mx::int8, "int8");
    }
    hadamard_ = stream.hadamard;
    read_books(stream);
    read_transforms(stream);
  }

  /// The quantizer of a layer.
  std::shared_ptr<const codec::VectorQuantizer> layer(std::int64_t index) {
    auto quantizer = std::make_shared<codec::VectorQuantizer>();
    for (std::int64_t head = 0; head < n_kv_heads; ++head) {
      const auto at = static_cast<std::size_t>(index * n_kv_heads + head);
      quantizer->transforms.push_back(std::move(transforms_[at]));
      quantizer->codebooks.push_back(books_[book_of_[at]]);
    }
    return quantizer;
  }

  /// Bits an element over all layers.
  double bits() const {
    double sum = 0.0;
    for (const std::size_t book : book_of_) sum += books_[book]->code().bits();
    return sum / static_cast<double>(book_of_.size());
  }

  /// Before layer().
  std::size_t nbytes() const {
    std::size_t bytes = 0;
    for (const codec::HeadTransform& transform : transforms_) bytes += transform.nbytes();
    for (const auto& book : books_) {
      bytes += book->nbytes();
    }
    return bytes;
  }

  /// Before layer().
  void add_to(Hash& hash) const {
    const auto add_number = [&hash](std::int64_t number) { hash.add(&number, sizeof(number)); };
    add_number(hadamard_ ? 1 : 0);
    for (std::size_t i = 0; i < transforms_.size(); ++i) {
      const codec::Codebook& book = *books_[book_of_[i]];
      for (const int number : {book.sub_dim, book.code_bits}) add_number(number);
      hash.add(&book.scale, sizeof(book.scale));
      hash.add(book.centroids);
      hash.add(transforms_[i].smooth);
      hash.add(transforms_[i].mean);
      hash.add(transforms_[i].rotation);
    }
    for (const std::int64_t number : {n_layers, n_kv_heads, head_dim}) add_number(number);
  }

  std::int64_t n_layers = 0;
  std::int64_t n_kv_heads = 0;
  std::int64_t head_dim = 0;

 private:
  [[noreturn]] void refuse(const auto&... parts) const {
    throw std::invalid_argument(message(name_, ": ", parts...));
  }

  void require(const char* what, const mx::array& array, const mx::Shape& shape, mx::Dtype dtype,
               const char* type) const {
    if (array.shape() == shape && array.dtype() == dtype) return;
    refuse(what, " must be ", detail::shape_text(shape), " of ", type, ", got ",
           detail::shape_text(array.shape()), array.dtype() == dtype ? "" : " of another type");
  }

  template <typename T>
  static std::vector<T> numbers(const mx::array& array) {
    mx::array plain = mx::contiguous(array, false, mx::Device::cpu);
    plain.eval();
    return {plain.data<T>(), plain.data<T>() + plain.size()};
  }

  mx::ShapeElem n_centroid_numbers(const VecInferStream& stream) {
    const std::vector<std::int32_t> codes = numbers<std::int32_t>(stream.codes);
    std::int64_t n = 0;
    for (std::size_t i = 0; i < codes.size(); i += 2) {
      const codec::VectorCode code{codes[i], codes[i + 1]};
      try {
        codec::validate(code);
      } catch (const std::invalid_argument& error) {
        refuse(error.what());
      }
      codes_.push_back(code);
      n += std::int64_t{code.sub_dim} << code.code_bits;
    }
    return static_cast<mx::ShapeElem>(std::min<std::int64_t>(n, std::numeric_limits<mx::ShapeElem>::max()));
  }

  void read_books(const VecInferStream& stream) {
    const std::vector<float> scales = numbers<float>(stream.scales);
    const auto centroids = numbers<std::int8_t>(stream.centroids);
    auto first = centroids.begin();
    for (std::size_t i = 0; i < scales.size(); ++i) {
      const auto [sub_dim, code_bits] = codes_[i];
      const auto end = first + (std::ptrdiff_t{sub_dim} << code_bits);
      try {
        books_.push_back(codec::make_codebook(sub_dim, code_bits, scales[i], {first, end}));
      } catch (const std::invalid_argument& error) {
        refuse(error.what());
      }
      first = end;
    }
    for (const std::int32_t book : numbers<std::int32_t>(stream.codebook_of)) {
      if (book < 0 || static_cast<std::size_t>(book) >= books_.size()) {
        refuse("codebook_of must be 0 to ", books_.size() - 1, ", got ", book);
      }
      book_of_.push_back(static_cast<std::size_t>(book));
      const std::size_t layer = (book_of_.size() - 1) / static_cast<std::size_t>(n_kv_heads);
      const std::size_t before = book_of_[layer * static_cast<std::size_t>(n_kv_heads)];
      if (books_[book_of_.back()]->code() != books_[before]->code()) {
        refuse("the heads of layer ", layer, " have different codes");
      }
    }
  }

  void read_transforms(const VecInferStream& stream) {
    const std::vector<float> smooth = numbers<float>(stream.smooth);
    const std::vector<float> mean = numbers<float>(stream.mean);
    for (const float x : smooth) {
      if (!std::isfinite(x) || !(x > 0.0F)) refuse("smooth must be finite and above 0, got ", x);
    }
    for (const float x : mean) {
      if (!std::isfinite(x)) refuse("mean must be finite, got ", x);
    }
    for (std::size_t at = 0; at < smooth.size(); at += static_cast<std::size_t>(head_dim)) {
      const auto part = [&](const std::vector<float>& all) {
        const auto first = all.begin() + static_cast<std::ptrdiff_t>(at);
        return std::vector<float>(first, first + head_dim);
      };
      codec::HeadTransform& transform = transforms_.emplace_back();
      transform.smooth = part(smooth);
      transform.mean = part(mean);
      transform.hadamard = stream.hadamard;
    }
    if (!stream.rotation) return;
    const std::vector<std::int8_t> rotation = numbers<std::int8_t>(*stream.rotation);
    const auto size = static_cast<std::size_t>(head_dim * head_dim);
    for (std::size_t i = 0; i < transforms_.size(); ++i) {
      try {
        codec::set_rotation(transforms_[i], std::span(rotation).subspan(i * size, size));
      } catch (const std::invalid_argument& error) {
        refuse(error.what());
      }
    }
  }

  const char* const name_;
  std::vector<codec::VectorCode> codes_;
  std::vector<std::shared_ptr<const codec::Codebook>> books_;
  std::vector<std::size_t> book_of_;
  std::vector<codec::HeadTransform> transforms_;
  bool hadamard_ = true;
};

}  // namespace

VecInferCodebooks::VecInferCodebooks(std::string format, const VecInferStream& keys,
                                     const VecInferStream& values)
    : format_(std::move(format)) {
  const codec::Code code = code_of(format_);
  Stream k("keys", keys);
  Stream v("values", values);
  if (k.n_layers != v.n_layers || k.n_kv_heads != v.n_kv_heads || k.head_dim != v.head_dim) {
    throw std::invalid_argument(message("values have ", v.n_layers, " layers of ", v.n_kv_heads,
                                        " heads of ", v.head_dim, " channels, keys ", k.n_layers,
                                        " of ", k.n_kv_heads, " of ", k.head_dim));
  }
  average_bits_ = (k.bits() + v.bits()) / 2.0;
  const double most = codec::vector_bits(code);
  if (average_bits_ > most + kBitsTolerance) {
    throw std::invalid_argument(message(format_, " has ", most, " bits an element, these codebooks ",
                                        average_bits_, " on average"));
  }
  n_kv_heads_ = k.n_kv_heads;
  head_dim_ = k.head_dim;
  nbytes_ = k.nbytes() + v.nbytes();
  Hash hash;
  hash.add(format_);
  k.add_to(hash);
  v.add_to(hash);
  identity_ = hash.value();
  for (std::int64_t i = 0; i < k.n_layers; ++i) layers_.push_back({k.layer(i), v.layer(i)});
}

VecInferCodebooks VecInferCodebooks::random(const std::string& format, std::int64_t n_layers,
                                            std::int64_t n_kv_heads, std::int64_t head_dim,
                                            std::uint64_t seed, bool rotates) {
  constexpr std::int64_t kMost = 1 << 20;
  for (const std::int64_t size : {n_layers, n_kv_heads, head_dim}) {
    if (size >= 1 && size <= kMost) continue;
    throw std::invalid_argument(
        message("n_layers, n_kv_heads and head_dim must be 1 to ", kMost, ", got ", size));
  }
  const mx::Device cpu = mx::Device::cpu;
  const mx::Shape heads{static_cast<mx::ShapeElem>(n_layers),
                        static_cast<mx::ShapeElem>(n_kv_heads)};
  const mx::Shape rows{heads[0], heads[1], static_cast<mx::ShapeElem>(head_dim)};
  const auto whole = [&](const mx::Shape& shape, float deviation, const mx::array& key) {
    const mx::array normal = mx::random::normal(shape, mx::float32, 0.0F, deviation, key, cpu);
    const mx::array rounded = mx::round(normal, 0, cpu);
    const mx::array clipped = mx::clip(rounded, mx::array(-127.0F), mx::array(127.0F), cpu);
    return mx::astype(clipped, mx::int8, cpu);
  };
  const auto stream = [&](codec::Role role) {
    constexpr float kSteps = 32.0F;  // A centroid reaches 127 / kSteps.
    const codec::VectorCode code = codec::vector_code(code_of(format), role);
    const mx::array key = mx::random::key(2 * seed + (role == codec::Role::kKeys ? 0 : 1));
    VecInferStream result{
        mx::array({code.sub_dim, code.code_bits}, {1, 2}, mx::int32),
        whole({code.sub_dim << code.code_bits}, kSteps, key),
        mx::full({1}, 1.0F / kSteps, mx::float32, cpu),
        mx::zeros(heads, mx::int32, cpu),
        mx::ones(rows, mx::float32, cpu),
        mx::zeros(rows, mx::float32, cpu)};
    if (rotates && role == codec::Role::kKeys) {
      result.rotation =
          whole({heads[0], heads[1], rows[2], rows[2]}, kSteps, mx::random::split(key, cpu).first);
    }
    return result;
  };
  return {format, stream(codec::Role::kKeys), stream(codec::Role::kValues)};
}

const VecInferLayer& VecInferCodebooks::layer(std::int64_t index) const {
  if (index >= 0 && index < n_layers()) return layers_[static_cast<std::size_t>(index)];
  throw std::out_of_range(message("layer must be 0 to ", n_layers() - 1, ", got ", index));
}

}  // namespace kvpool
