#include "kernels/avx2/avx2.h"
#include "kernels/avx2/common.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::avx2 {
namespace {

/// Elements are worked on in steps of 16; the last may have 8.
constexpr std::size_t kStep = 16;

/// A step. Which elements go to `a` and which to `b` is the type's choice.
struct Pair {
  __m256 a;
  __m256 b;
};

struct Fp32 {
  static constexpr std::size_t kSize = 4;
  static constexpr bool kAlternate = false;
  static __m256 eight(const std::byte* from) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  }
  static Pair load(const std::byte* from) { return {eight(from), eight(from + 32)}; }
  static Pair load_half(const std::byte* from) { return {eight(from), _mm256_setzero_ps()}; }
};

struct Fp16 {
  static constexpr std::size_t kSize = 2;
  static constexpr bool kAlternate = false;
  static Pair load(const std::byte* from) { return {load_halves(from), load_halves(from + 16)}; }
  static Pair load_half(const std::byte* from) { return {load_halves(from), _mm256_setzero_ps()}; }
};

/// Elements of even index go to `a`: each half of a dword is a shift or a mask away from its fp32.
struct Bf16 {
  static constexpr std::size_t kSize = 2;
  static constexpr bool kAlternate = true;
  static Pair split(__m256i x) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(-65536)))};
  }
  static Pair load(const std::byte* from) {
    return split(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Pair load_half(const std::byte* from) {
    return split(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
};

/// Where element i of a step is kept.
template <typename Type>
std::size_t place_in_step(std::size_t i) {
  return Type::kAlternate ? i % 2 * 8 + i / 2 : i;
}

std::size_t n_steps(const PartShape& shape) { return ceil_div(as_size(shape.head_dim), kStep); }

std::size_t prepared_bytes(const PartShape& shape, int n_queries) {
  return as_size(n_queries) * n_steps(shape) * kStep * sizeof(float);
}

template <typename Type>
void prepare(const PartShape& shape, const float* queries, int n_queries, std::byte* prepared) {
  auto* out = reinterpret_cast<float*>(prepared);
  const std::size_t dim = as_size(shape.head_dim);
  const std::size_t stride = n_steps(shape) * kStep;
  for (std::size_t q = 0; q < as_size(n_queries); ++q, out += stride) {
    for (std::size_t i = 0; i < stride; ++i) {
      // A step of 8 fills the front of both halves where these alternate.
      out[i / kStep * kStep + place_in_step<Type>(i % kStep)] =
          i < dim ? queries[q * dim + i] : 0.0F;
    }
  }
}

/// Scores of kTokens rows, one behind the other.
template <typename Type, int kQueries, int kTokens>
void score_rows(const PartShape& shape, const std::byte* rows, const float* queries, float* scores,
                std::size_t stride) {
  const std::size_t row_bytes = as_size(shape.head_dim) * Type::kSize;
  const std::size_t n_full = as_size(shape.head_dim) / kStep;
  const std::size_t query_stride = n_steps(shape) * kStep;
  __m256 sums[kQueries][kTokens];
  for (auto& of_query : sums) {
    for (__m256& sum : of_query) sum = _mm256_setzero_ps();
  }
  const auto add = [&](std::size_t step, auto load) {
    for (int t = 0; t < kTokens; ++t) {
      const Pair pair = load(rows + as_size(t) * row_bytes + step * kStep * Type::kSize);
      for (int q = 0; q < kQueries; ++q) {
        const float* const query = queries + as_size(q) * query_stride + step * kStep;
        sums[q][t] = _mm256_fmadd_ps(pair.a, _mm256_load_ps(query), sums[q][t]);
        sums[q][t] = _mm256_fmadd_ps(pair.b, _mm256_load_ps(query + 8), sums[q][t]);
      }
    }
  };
  for (std::size_t step = 0; step < n_full; ++step) add(step, Type::load);
  if (n_full < n_steps(shape)) add(n_full, Type::load_half);
  for (int q = 0; q < kQueries; ++q) {
    for (int t = 0; t < kTokens; ++t) scores[as_size(q) * stride + as_size(t)] = sum_of(sums[q][t]);
  }
}

template <typename Type>
void scores(const PartShape& shape, const PartRun& run, const std::byte* prepared, int n_queries,
            float* out, std::size_t stride) {
  const std::size_t row_bytes = as_size(shape.head_dim) * Type::kSize;
  const std::size_t query_stride = n_steps(shape) * kStep;
  Ahead ahead(run);
  for_query_chunks(n_queries, [&](int first, auto n) {
    const auto* const queries =
        reinterpret_cast<const float*>(prepared) + as_size(first) * query_stride;
    float* to = out + as_size(first) * stride;
    for (std::size_t p = 0; p < run.n_parts; ++p) {
      const std::byte* rows = run.parts[p];
      int t = 0;
      for (; t + 2 <= run.n_tokens[p]; t += 2, rows += 2 * row_bytes, to += 2) {
        ahead.fetch(2 * row_bytes);
        score_rows<Type, n(), 2>(shape, rows, queries, to, stride);
      }
      if (t < run.n_tokens[p]) score_rows<Type, n(), 1>(shape, rows, queries, to++, stride);
    }
  });
}

/// Adds weighted rows to one step of the sums, which stay in registers meanwhile.
template <int kQueries, typename Load>
void add_rows(const std::byte* rows, std::size_t row_bytes, int n_rows, const float* weights,
              std::size_t stride, float* sums, std::size_t sum_stride, const Load& load) {
  __m256 a[kQueries];
  __m256 b[kQueries];
  for (int q = 0; q < kQueries; ++q) {
    a[q] = _mm256_load_ps(sums + as_size(q) * sum_stride);
    b[q] = _mm256_load_ps(sums + as_size(q) * sum_stride + 8);
  }
  for (int t = 0; t < n_rows; ++t, rows += row_bytes) {
    const Pair pair = load(rows);
    for (int q = 0; q < kQueries; ++q) {
      const __m256 weight = _mm256_set1_ps(weights[as_size(q) * stride + as_size(t)]);
      a[q] = _mm256_fmadd_ps(weight, pair.a, a[q]);
      b[q] = _mm256_fmadd_ps(weight, pair.b, b[q]);
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    _mm256_store_ps(sums + as_size(q) * sum_stride, a[q]);
    _mm256_store_ps(sums + as_size(q) * sum_stride + 8, b[q]);
  }
}

template <typename Type, int kQueries>
void accumulate_chunk(const PartShape& shape, const PartRun& run, const float* weights,
                      std::size_t stride, float* out, Ahead& ahead) {
  const std::size_t dim = as_size(shape.head_dim);
  const std::size_t row_bytes = dim * Type::kSize;
  const std::size_t sum_stride = n_steps(shape) * kStep;
  alignas(32) float sums[kQueries * codec::kMaxHeadDim] = {};
  for (std::size_t p = 0; p < run.n_parts; ++p) {
    const int n = run.n_tokens[p];
    ahead.fetch(as_size(n) * row_bytes);
    for (std::size_t d = 0; d < dim; d += kStep) {
      const std::byte* const rows = run.parts[p] + d * Type::kSize;
      if (d + kStep <= dim) {
        add_rows<kQueries>(rows, row_bytes, n, weights, stride, sums + d, sum_stride,
                           [](const std::byte* at) { return Type::load(at); });
      } else {
        add_rows<kQueries>(rows, row_bytes, n, weights, stride, sums + d, sum_stride,
                           [](const std::byte* at) { return Type::load_half(at); });
      }
    }
    weights += n;
  }
  for (std::size_t q = 0; q < as_size(kQueries); ++q) {
    for (std::size_t d = 0; d < dim; ++d) {
      out[q * dim + d] += sums[q * sum_stride + d / kStep * kStep + place_in_step<Type>(d % kStep)];
    }
  }
}

template <typename Type>
void accumulate(const PartShape& shape, const PartRun& run, const float* weights,
                std::size_t stride, int n_queries, float* out) {
  Ahead ahead(run);
  for_query_chunks(n_queries, [&](int first, auto n) {
    accumulate_chunk<Type, n()>(shape, run, weights + as_size(first) * stride, stride,
                                out + as_size(first) * as_size(shape.head_dim), ahead);
  });
}

template <typename Type>
KeyKernels keys_of(Layout layout) {
  KeyKernels kernels = scalar::raw_keys(layout);
  kernels.prepared_bytes = prepared_bytes;
  kernels.prepare = prepare<Type>;
  kernels.scores = scores<Type>;
  return kernels;
}

template <typename Type>
ValueKernels values_of(Layout layout) {
  ValueKernels kernels = scalar::raw_values(layout);
  kernels.accumulate = accumulate<Type>;
  return kernels;
}

}  // namespace

KeyKernels raw_keys(Layout layout) {
  if (layout == Layout::kFp32) return keys_of<Fp32>(layout);
  return layout == Layout::kFp16 ? keys_of<Fp16>(layout) : keys_of<Bf16>(layout);
}

ValueKernels raw_values(Layout layout) {
  if (layout == Layout::kFp32) return values_of<Fp32>(layout);
  return layout == Layout::kFp16 ? values_of<Fp16>(layout) : values_of<Bf16>(layout);
}

}  // namespace kvpool::kernels::avx2
