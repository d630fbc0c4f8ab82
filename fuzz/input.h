#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "codec/codec.h"
#include "kernels/kernels.h"

namespace kvpool::fuzz {

/// Stops the run if `condition` is false: what a fuzzer reports.
inline void require(bool condition) {
  if (!condition) __builtin_trap();
}

/// What a fuzzer's bytes stand for. They start again when they are used up.
class Input {
 public:
  explicit Input(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  std::uint8_t byte() {
    if (bytes_.empty()) return 0;
    const std::uint8_t next = bytes_[at_++ % bytes_.size()];
    // What is repeated differs, or a short input would be a flat one.
    return static_cast<std::uint8_t>(next + at_ / bytes_.size() * 37);
  }
  template <typename T>
  T number() {
    T value;
    std::uint8_t bytes[sizeof(T)];
    for (std::uint8_t& b : bytes) b = byte();
    std::memcpy(&value, bytes, sizeof(T));
    return value;
  }
  /// first ... last.
  int between(int first, int last) {
    return first + static_cast<int>(number<std::uint16_t>() % (last - first + 1));
  }
  /// -1 ... 1.
  float fraction() { return static_cast<float>(number<std::int16_t>()) / 32768.0F; }

  /// One that validate() takes.
  codec::PartGeometry geometry() {
    codec::PartGeometry geometry;
    geometry.format.code = static_cast<codec::Code>(between(0, 7));
    geometry.format.group_size = between(0, 1) == 0 ? 32 : 64;
    geometry.format.hadamard = !geometry.format.is_raw() && between(0, 1) == 0;
    geometry.role = between(0, 1) == 0 ? codec::Role::kKeys : codec::Role::kValues;
    geometry.block_size = between(1, 70);
    geometry.head_dim = 8 * between(1, codec::kMaxHeadDim / 8);
    codec::validate(geometry);
    return geometry;
  }

 private:
  std::span<const std::uint8_t> bytes_;
  std::size_t at_ = 0;
};

/// A part as kernels may meet it: at any address, with nothing behind it.
class Part {
 public:
  Part(const codec::PartGeometry& geometry, int offset)
      : offset_(static_cast<std::size_t>(offset)), memory_(offset_ + codec::part_bytes(geometry)) {}
  std::byte* data() { return memory_.data() + offset_; }
  std::span<std::byte> bytes() { return std::span(memory_).subspan(offset_); }

 private:
  std::size_t offset_;
  std::vector<std::byte> memory_;
};

/// What KeyKernels::prepare() asks for.
class Prepared {
 public:
  Prepared(const kernels::KeyKernels& kernels, const kernels::PartShape& shape,
           std::span<const float> queries, int n_queries)
      : memory_(static_cast<std::byte*>(
            ::operator new (kernels.prepared_bytes(shape, n_queries), std::align_val_t{64}))) {
    kernels.prepare(shape, queries.data(), n_queries, memory_.get());
  }
  const std::byte* data() const { return memory_.get(); }

 private:
  struct Delete {
    void operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{64}); }
  };
  std::unique_ptr<std::byte, Delete> memory_;
};

inline kernels::PartShape shape_of(const codec::PartGeometry& geometry) {
  return {geometry.block_size, geometry.head_dim, geometry.format.group_size};
}

inline std::size_t elements(int n_rows, int head_dim) {
  return static_cast<std::size_t>(n_rows) * static_cast<std::size_t>(head_dim);
}

/// Runs check(table) on each level of this CPU, the reference first.
template <typename Check>
void for_each_level(const Check& check) {
  for (const kernels::Level& level : kernels::levels()) {
    if (level.table != nullptr) check(*level.table);
  }
}

}  // namespace kvpool::fuzz
