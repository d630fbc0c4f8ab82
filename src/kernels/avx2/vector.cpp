#include "kernels/avx2/avx2.h"
#include "kernels/avx2/common.h"
#include "kernels/scalar/scalar.h"
#include "kernels/vector_search.h"

namespace kvpool::kernels::avx2 {
namespace {

struct Lanes {
  static constexpr int kLanes = 8;
  using Float = __m256;
  using Int = __m256i;
  static Float load(const float* from) { return _mm256_load_ps(from); }
  static Float broadcast(float x) { return _mm256_set1_ps(x); }
  static Int broadcast(std::int32_t x) { return _mm256_set1_epi32(x); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float above(Float a, Float b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
  static Float select(Float mask, Float a, Float b) { return _mm256_blendv_ps(b, a, mask); }
  static Int select(Float mask, Int a, Int b) {
    return _mm256_blendv_epi8(b, a, _mm256_castps_si256(mask));
  }
  static void store(std::int32_t* to, Int x) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), x);
  }
};

/// A centroid's numbers times the scale.
template <int kSubDim>
void write_centroid(const std::int8_t* centroid, __m256 scale, float* to) {
  if constexpr (kSubDim == 8) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(centroid));
    const __m256 numbers = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    _mm256_storeu_ps(to, _mm256_mul_ps(scale, numbers));
  } else {
    std::int32_t four = 0;
    std::memcpy(&four, centroid, kSubDim);
    const __m128 numbers = _mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(four)));
    const __m128 scaled = _mm_mul_ps(_mm256_castps256_ps128(scale), numbers);
    if constexpr (kSubDim == 4) {
      _mm_storeu_ps(to, scaled);
    } else {
      _mm_storel_pi(reinterpret_cast<__m64*>(to), scaled);
    }
  }
}

template <int kSubDim, int kBits>
void decode(const PartShape& shape, const std::byte* part, int first_token, int n_tokens,
            float* rows) {
  const std::int8_t* const centroids = shape.codebook->centroids.data();
  const __m256 scale = _mm256_set1_ps(shape.codebook->scale);
  for (int sub = 0; sub < n_subs(kSubDim, shape.head_dim); ++sub) {
    float* to = rows + sub * kSubDim;
    for (int token = first_token; token < first_token + n_tokens; ++token, to += shape.head_dim) {
      const std::size_t code = read_vector_code<kSubDim, kBits>(shape, part, sub, token);
      write_centroid<kSubDim>(centroids + code * kSubDim, scale, to);
    }
  }
}

/// Tokens that are decoded at a time, to be worked on as fp32.
constexpr int kTokens = 32;

template <int kSubDim, int kBits>
void scores(const PartShape& shape, const PartRun& run, const std::byte* prepared, int n_queries,
            float* out, std::size_t stride) {
  static const KeyKernels kRaw = raw_keys(Layout::kFp32);
  alignas(32) float rows[kTokens * codec::kMaxHeadDim];
  const auto* const part = reinterpret_cast<const std::byte*>(rows);
  Ahead ahead(run);
  for (std::size_t p = 0; p < run.n_parts; ++p) {
    for (int t = 0; t < run.n_tokens[p]; t += kTokens) {
      const std::int32_t n = std::min(kTokens, run.n_tokens[p] - t);
      ahead.fetch(as_size(n) * as_size(shape.head_dim) / kSubDim);
      decode<kSubDim, kBits>(shape, run.parts[p], t, n, rows);
      kRaw.scores(shape, {&part, &n, 1}, prepared, n_queries, out, stride);
      out += n;
    }
  }
}

template <int kSubDim, int kBits>
void accumulate(const PartShape& shape, const PartRun& run, const float* weights,
                std::size_t stride, int n_queries, float* out) {
  static const ValueKernels kRaw = raw_values(Layout::kFp32);
  alignas(32) float rows[kTokens * codec::kMaxHeadDim];
  const auto* const part = reinterpret_cast<const std::byte*>(rows);
  Ahead ahead(run);
  for (std::size_t p = 0; p < run.n_parts; ++p) {
    for (int t = 0; t < run.n_tokens[p]; t += kTokens) {
      const std::int32_t n = std::min(kTokens, run.n_tokens[p] - t);
      ahead.fetch(as_size(n) * as_size(shape.head_dim) / kSubDim);
      decode<kSubDim, kBits>(shape, run.parts[p], t, n, rows);
      kRaw.accumulate(shape, {&part, &n, 1}, weights, stride, n_queries, out);
      weights += n;
    }
  }
}

template <int kSubDim, int kBits>
KeyKernels keys_of() {
  KeyKernels kernels = raw_keys(Layout::kFp32);
  kernels.encode = VectorEncoder<Lanes, kSubDim, kBits>::encode;
  kernels.decode = decode<kSubDim, kBits>;
  kernels.scores = scores<kSubDim, kBits>;
  return kernels;
}

template <int kSubDim, int kBits>
ValueKernels values_of() {
  return {VectorEncoder<Lanes, kSubDim, kBits>::encode, decode<kSubDim, kBits>,
          accumulate<kSubDim, kBits>};
}

}  // namespace

KeyKernels vector_keys(Layout layout) {
  if (layout == Layout::kVector8Wide) return keys_of<8, 12>();
  if (layout == Layout::kVector8) return keys_of<8, 8>();
  return layout == Layout::kVector4 ? keys_of<4, 8>() : keys_of<2, 8>();
}

ValueKernels vector_values(Layout layout) {
  if (layout == Layout::kVector8Wide) return values_of<8, 12>();
  if (layout == Layout::kVector8) return values_of<8, 8>();
  return layout == Layout::kVector4 ? values_of<4, 8>() : values_of<2, 8>();
}

}  // namespace kvpool::kernels::avx2
