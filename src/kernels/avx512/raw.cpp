#include "kernels/avx512/common.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::avx512 {
namespace {

/// kStep elements. Which go to `a` and which to `b` is the type's choice.
struct Pair {
  __m512 a;
  __m512 b;
};

struct Fp32 {
  static constexpr std::size_t kSize = 4;
  static constexpr bool kAlternate = false;
  static Pair load(const std::byte* from) {
    return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + 64)};
  }
  static Pair load(const std::byte* from, __mmask32 mask) {
    return {_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from),
            _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + 64)};
  }
};

struct Fp16 {
  static constexpr std::size_t kSize = 2;
  static constexpr bool kAlternate = false;
  static Pair load(const std::byte* from) { return {load_halves(from), load_halves(from + 32)}; }
  static Pair load(const std::byte* from, __mmask32 mask) {
    return {load_halves(from, static_cast<__mmask16>(mask)),
            load_halves(from + 32, static_cast<__mmask16>(mask >> 16))};
  }
};

/// Elements of even index go to `a`: each half of a dword is a shift or a mask away from its fp32.
struct Bf16 {
  static constexpr std::size_t kSize = 2;
  static constexpr bool kAlternate = true;
  static Pair split(__m512i x) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-65536)))};
  }
  static Pair load(const std::byte* from) { return split(_mm512_loadu_si512(from)); }
  static Pair load(const std::byte* from, __mmask32 mask) {
    return split(_mm512_maskz_loadu_epi16(mask, from));
  }
};

/// Where element i of a step is kept.
template <typename Type>
std::size_t place_in_step(std::size_t i) {
  return Type::kAlternate ? i % 2 * 16 + i / 2 : i;
}

__mmask32 tail_mask(const PartShape& shape) {
  return (1U << (as_size(shape.head_dim) % kStep)) - 1U;
}

template <typename Type>
void prepare(const PartShape& shape, const float* queries, int n_queries, std::byte* prepared) {
  auto* out = reinterpret_cast<float*>(prepared);
  const std::size_t dim = as_size(shape.head_dim);
  const std::size_t stride = n_steps(shape) * kStep;
  for (std::size_t q = 0; q < as_size(n_queries); ++q, out += stride) {
    for (std::size_t i = 0; i < stride; ++i) {
      out[i / kStep * kStep + place_in_step<Type>(i % kStep)] =
          i < dim ? queries[q * dim + i] : 0.0F;
    }
  }
}

/// The sums of four vectors.
__m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 quads = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, _MM_SHUFFLE(1, 0, 1, 0)),
                                     _mm512_shuffle_ps(ab, cd, _MM_SHUFFLE(3, 2, 3, 2)));
  const __m256 halves =
      _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

/// Scores of kTokens rows, one behind the other.
template <typename Type, int kQueries, int kTokens>
void score_rows(const PartShape& shape, const std::byte* rows, const float* queries, float* scores,
                std::size_t stride) {
  const std::size_t row_bytes = as_size(shape.head_dim) * Type::kSize;
  const std::size_t n_full = as_size(shape.head_dim) / kStep;
  const std::size_t query_stride = n_steps(shape) * kStep;
  __m512 sums[kQueries][kTokens];
  for (auto& of_query : sums) {
    for (__m512& sum : of_query) sum = _mm512_setzero_ps();
  }
  const auto add = [&](std::size_t step, const auto&... mask) {
    for (int t = 0; t < kTokens; ++t) {
      const Pair pair =
          Type::load(rows + as_size(t) * row_bytes + step * kStep * Type::kSize, mask...);
      for (int q = 0; q < kQueries; ++q) {
        const float* const query = queries + as_size(q) * query_stride + step * kStep;
        sums[q][t] = _mm512_fmadd_ps(pair.a, _mm512_load_ps(query), sums[q][t]);
        sums[q][t] = _mm512_fmadd_ps(pair.b, _mm512_load_ps(query + 16), sums[q][t]);
      }
    }
  };
  for (std::size_t step = 0; step < n_full; ++step) add(step);
  if (n_full < n_steps(shape)) add(n_full, tail_mask(shape));
  for (int q = 0; q < kQueries; ++q) {
    if constexpr (kTokens == 4) {
      _mm_storeu_ps(scores + as_size(q) * stride,
                    sums_of(sums[q][0], sums[q][1], sums[q][2], sums[q][3]));
    } else {
      scores[as_size(q) * stride] = _mm512_reduce_add_ps(sums[q][0]);
    }
  }
}

template <typename Type>
void scores(const PartShape& shape, const PartRun& run, const std::byte* prepared, int n_queries,
            float* out, std::size_t stride) {
  const std::size_t row_bytes = as_size(shape.head_dim) * Type::kSize;
  const std::size_t query_stride = n_steps(shape) * kStep;
  Ahead ahead(run, 16 * row_bytes);
  for_query_chunks(n_queries, [&](int first, auto n) {
    const auto* const queries =
        reinterpret_cast<const float*>(prepared) + as_size(first) * query_stride;
    float* to = out + as_size(first) * stride;
    for (std::size_t p = 0; p < run.n_parts; ++p) {
      const std::byte* rows = run.parts[p];
      const int n_tokens = run.n_tokens[p];
      int t = 0;
      for (; t + 4 <= n_tokens; t += 4, rows += 4 * row_bytes, to += 4) {
        ahead.fetch(4 * row_bytes);
        score_rows<Type, n(), 4>(shape, rows, queries, to, stride);
      }
      for (; t < n_tokens; ++t, rows += row_bytes, ++to) {
        score_rows<Type, n(), 1>(shape, rows, queries, to, stride);
      }
    }
  });
}

/// Adds weighted rows to kSteps steps of the sums, which stay in registers meanwhile.
template <typename Type, int kQueries, int kSteps, typename... Mask>
void add_rows(const std::byte* rows, std::size_t row_bytes, int n_rows, const float* weights,
              std::size_t stride, float* sums, std::size_t sum_stride, Ahead& ahead, Mask... mask) {
  __m512 acc[kQueries][2 * kSteps];
  for (int q = 0; q < kQueries; ++q) {
    for (int i = 0; i < 2 * kSteps; ++i) {
      acc[q][i] = _mm512_load_ps(sums + as_size(q) * sum_stride + as_size(16 * i));
    }
  }
  for (int t = 0; t < n_rows; ++t, rows += row_bytes) {
    ahead.fetch(kSteps * kStep * Type::kSize);
    Pair pairs[kSteps];
    for (int s = 0; s < kSteps; ++s) {
      pairs[s] = Type::load(rows + as_size(s) * kStep * Type::kSize, mask...);
    }
    for (int q = 0; q < kQueries; ++q) {
      const __m512 weight = _mm512_set1_ps(weights[as_size(q) * stride + as_size(t)]);
      for (int s = 0; s < kSteps; ++s) {
        acc[q][2 * s] = _mm512_fmadd_ps(weight, pairs[s].a, acc[q][2 * s]);
        acc[q][2 * s + 1] = _mm512_fmadd_ps(weight, pairs[s].b, acc[q][2 * s + 1]);
      }
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    for (int i = 0; i < 2 * kSteps; ++i) {
      _mm512_store_ps(sums + as_size(q) * sum_stride + as_size(16 * i), acc[q][i]);
    }
  }
}

template <typename Type, int kQueries>
void accumulate_chunk(const PartShape& shape, const PartRun& run, const float* weights,
                      std::size_t stride, float* out, Ahead& ahead) {
  const std::size_t dim = as_size(shape.head_dim);
  const std::size_t row_bytes = dim * Type::kSize;
  const std::size_t sum_stride = n_steps(shape) * kStep;
  alignas(64) float sums[kQueries * codec::kMaxHeadDim] = {};
  for (std::size_t p = 0; p < run.n_parts; ++p) {
    const int n = run.n_tokens[p];
    std::size_t step = 0;
    for (; (step + 2) * kStep <= dim; step += 2) {
      add_rows<Type, kQueries, 2>(run.parts[p] + step * kStep * Type::kSize, row_bytes, n, weights,
                                  stride, sums + step * kStep, sum_stride, ahead);
    }
    if ((step + 1) * kStep <= dim) {
      add_rows<Type, kQueries, 1>(run.parts[p] + step * kStep * Type::kSize, row_bytes, n, weights,
                                  stride, sums + step * kStep, sum_stride, ahead);
      ++step;
    }
    if (step * kStep < dim) {
      add_rows<Type, kQueries, 1>(run.parts[p] + step * kStep * Type::kSize, row_bytes, n, weights,
                                  stride, sums + step * kStep, sum_stride, ahead, tail_mask(shape));
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
  Ahead ahead(run, 16 * as_size(shape.head_dim) * Type::kSize);
  for_query_chunks(n_queries, [&](int first, auto n) {
    accumulate_chunk<Type, n()>(shape, run, weights + as_size(first) * stride, stride,
                                out + as_size(first) * as_size(shape.head_dim), ahead);
  });
}

template <typename Type>
KeyKernels keys_of(Layout layout) {
  KeyKernels kernels = scalar::raw_keys(layout);
  kernels.prepared_bytes = fp32_query_bytes;
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

std::size_t fp32_query_bytes(const PartShape& shape, int n_queries) {
  return as_size(n_queries) * n_steps(shape) * kStep * sizeof(float);
}

void prepare_fp32_queries(const PartShape& shape, const float* queries, int n_queries,
                          std::byte* prepared) {
  prepare<Fp32>(shape, queries, n_queries, prepared);
}

void score_fp32_rows(const PartShape& shape, const float* rows, int n_rows,
                     const std::byte* prepared, int n_queries, float* out, std::size_t stride) {
  const auto* const part = reinterpret_cast<const std::byte*>(rows);
  scores<Fp32>(shape, {&part, &n_rows, 1}, prepared, n_queries, out, stride);
}

void accumulate_fp32_rows(const PartShape& shape, const float* rows, int n_rows,
                          const float* weights, std::size_t stride, int n_queries, float* out) {
  const auto* const part = reinterpret_cast<const std::byte*>(rows);
  accumulate<Fp32>(shape, {&part, &n_rows, 1}, weights, stride, n_queries, out);
}

KeyKernels raw_keys(Layout layout) {
  if (layout == Layout::kFp32) return keys_of<Fp32>(layout);
  return layout == Layout::kFp16 ? keys_of<Fp16>(layout) : keys_of<Bf16>(layout);
}

ValueKernels raw_values(Layout layout) {
  if (layout == Layout::kFp32) return values_of<Fp32>(layout);
  return layout == Layout::kFp16 ? values_of<Fp16>(layout) : values_of<Bf16>(layout);
}

}  // namespace kvpool::kernels::avx512
