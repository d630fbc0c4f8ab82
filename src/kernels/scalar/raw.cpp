#include <cstring>

#include "codec/half.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::scalar {
namespace {

struct Fp32 {
  using Stored = float;
  static float load(float value) { return value; }
  static float store(float value) { return value; }
};
struct Fp16 {
  using Stored = std::uint16_t;
  static float load(Stored value) { return codec::half_to_float(value); }
  static Stored store(float value) { return codec::float_to_half(value); }
};
struct Bf16 {
  using Stored = std::uint16_t;
  static float load(Stored value) { return codec::bf16_to_float(value); }
  static Stored store(float value) { return codec::float_to_bf16(value); }
};

template <typename Type>
void encode(const PartShape& shape, const float* rows, int first_token, int n_tokens,
            std::byte* part) {
  constexpr std::size_t kSize = sizeof(typename Type::Stored);
  const auto dim = static_cast<std::size_t>(shape.head_dim);
  const std::size_t n = static_cast<std::size_t>(n_tokens) * dim;
  part += static_cast<std::size_t>(first_token) * dim * kSize;
  for (std::size_t i = 0; i < n; ++i) {
    const typename Type::Stored value = Type::store(rows[i]);
    std::memcpy(part + i * kSize, &value, kSize);
  }
}

template <typename Type>
void decode(const PartShape& shape, const std::byte* part, int first_token, int n_tokens,
            float* rows) {
  constexpr std::size_t kSize = sizeof(typename Type::Stored);
  const auto dim = static_cast<std::size_t>(shape.head_dim);
  const std::size_t n = static_cast<std::size_t>(n_tokens) * dim;
  part += static_cast<std::size_t>(first_token) * dim * kSize;
  for (std::size_t i = 0; i < n; ++i) {
    typename Type::Stored value;
    std::memcpy(&value, part + i * kSize, kSize);
    rows[i] = Type::load(value);
  }
}

template <typename Type>
constexpr KeyKernels kKeys = {encode<Type>, decode<Type>, query_bytes, copy_queries,
                              scores<decode<Type>>};
template <typename Type>
constexpr ValueKernels kValues = {encode<Type>, decode<Type>, accumulate<decode<Type>>};

}  // namespace

KeyKernels raw_keys(Layout layout) {
  if (layout == Layout::kFp32) return kKeys<Fp32>;
  return layout == Layout::kFp16 ? kKeys<Fp16> : kKeys<Bf16>;
}

ValueKernels raw_values(Layout layout) {
  if (layout == Layout::kFp32) return kValues<Fp32>;
  return layout == Layout::kFp16 ? kValues<Fp16> : kValues<Bf16>;
}

}  // namespace kvpool::kernels::scalar
