#include "kernels/neon/common.h"
#include "kernels/neon/neon.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::neon {
namespace {

/// 8 elements; every head_dim is a multiple.
struct Eight {
  float32x4_t low;
  float32x4_t high;
};

struct Fp32 {
  static constexpr std::size_t kSize = 4;
  static Eight load(const std::byte* at) { return {load_floats(at), load_floats(at + 16)}; }
};

struct Fp16 {
  static constexpr std::size_t kSize = 2;
  static Eight load(const std::byte* at) {
    const float16x8_t halves = vreinterpretq_f16_u16(load_8_halves(at));
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  }
};

struct Bf16 {
  static constexpr std::size_t kSize = 2;
  static Eight load(const std::byte* at) {
    const uint16x8_t halves = load_8_halves(at);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(halves, 16))};
  }
};

template <typename Type>
void decode(const PartShape& shape, const std::byte* part, int first_token, int n_tokens,
            float* rows) {
  const std::size_t dim = as_size(shape.head_dim);
  part += as_size(first_token) * dim * Type::kSize;
  for (std::size_t i = 0; i < as_size(n_tokens) * dim; i += 8) {
    const Eight x = Type::load(part + i * Type::kSize);
    vst1q_f32(rows + i, x.low);
    vst1q_f32(rows + i + 4, x.high);
  }
}

/// Scores of 4 rows, one behind the other.
template <typename Type, int kQueries>
void score_4_rows(std::size_t dim, const std::byte* rows, const float* queries, float* scores,
                  std::size_t stride) {
  float32x4_t sums[kQueries][4];
  for (auto& of_query : sums) {
    for (float32x4_t& sum : of_query) sum = vdupq_n_f32(0.0F);
  }
  for (std::size_t d = 0; d < dim; d += 8) {
    Eight row[4];
    for (std::size_t t = 0; t < 4; ++t) row[t] = Type::load(rows + (t * dim + d) * Type::kSize);
    for (std::size_t q = 0; q < kQueries; ++q) {
      const float32x4_t low = vld1q_f32(queries + q * dim + d);
      const float32x4_t high = vld1q_f32(queries + q * dim + d + 4);
      for (int t = 0; t < 4; ++t) {
        sums[q][t] = vfmaq_f32(vfmaq_f32(sums[q][t], row[t].low, low), row[t].high, high);
      }
    }
  }
  for (std::size_t q = 0; q < kQueries; ++q) {
    vst1q_f32(scores + q * stride, sums_of(sums[q][0], sums[q][1], sums[q][2], sums[q][3]));
  }
}

template <typename Type>
float score_row(std::size_t dim, const std::byte* row, const float* query) {
  float32x4_t low = vdupq_n_f32(0.0F);
  float32x4_t high = vdupq_n_f32(0.0F);
  for (std::size_t d = 0; d < dim; d += 8) {
    const Eight x = Type::load(row + d * Type::kSize);
    low = vfmaq_f32(low, x.low, vld1q_f32(query + d));
    high = vfmaq_f32(high, x.high, vld1q_f32(query + d + 4));
  }
  return vaddvq_f32(vaddq_f32(low, high));
}

template <typename Type>
void scores(const PartShape& shape, const PartRun& run, const std::byte* prepared, int n_queries,
            float* out, std::size_t stride) {
  const std::size_t dim = as_size(shape.head_dim);
  const std::size_t row_bytes = dim * Type::kSize;
  Ahead ahead(run);
  for_query_chunks(n_queries, [&](int first, auto n) {
    const auto* const queries = reinterpret_cast<const float*>(prepared) + as_size(first) * dim;
    float* to = out + as_size(first) * stride;
    for (std::size_t p = 0; p < run.n_parts; ++p) {
      const std::byte* rows = run.parts[p];
      int t = 0;
      for (; t + 4 <= run.n_tokens[p]; t += 4, rows += 4 * row_bytes, to += 4) {
        ahead.fetch(4 * row_bytes);
        score_4_rows<Type, n()>(dim, rows, queries, to, stride);
      }
      for (; t < run.n_tokens[p]; ++t, rows += row_bytes, ++to) {
        for (std::size_t q = 0; q < n(); ++q) {
          to[q * stride] = score_row<Type>(dim, rows, queries + q * dim);
        }
      }
    }
  });
}

/// Adds weighted rows to kSteps * 8 channels of the sums, which stay in registers meanwhile.
template <typename Type, int kQueries, int kSteps>
void add_rows(std::size_t dim, const std::byte* rows, int n_rows, const float* weights,
              std::size_t stride, float* out) {
  Eight sums[kQueries][kSteps];
  for (std::size_t q = 0; q < kQueries; ++q) {
    for (std::size_t i = 0; i < kSteps; ++i) {
      const float* const from = out + q * dim + 8 * i;
      sums[q][i] = {vld1q_f32(from), vld1q_f32(from + 4)};
    }
  }
  for (std::size_t t = 0; t < as_size(n_rows); ++t, rows += dim * Type::kSize) {
    for (std::size_t i = 0; i < kSteps; ++i) {
      const Eight row = Type::load(rows + 8 * i * Type::kSize);
      for (std::size_t q = 0; q < kQueries; ++q) {
        const float weight = weights[q * stride + t];
        sums[q][i] = {vfmaq_n_f32(sums[q][i].low, row.low, weight),
                      vfmaq_n_f32(sums[q][i].high, row.high, weight)};
      }
    }
  }
  for (std::size_t q = 0; q < kQueries; ++q) {
    for (std::size_t i = 0; i < kSteps; ++i) {
      float* const to = out + q * dim + 8 * i;
      vst1q_f32(to, sums[q][i].low);
      vst1q_f32(to + 4, sums[q][i].high);
    }
  }
}

template <typename Type>
void accumulate(const PartShape& shape, const PartRun& run, const float* weights,
                std::size_t stride, int n_queries, float* out) {
  const std::size_t dim = as_size(shape.head_dim);
  Ahead ahead(run);
  for_query_chunks(n_queries, [&](int first, auto n) {
    float* const sums = out + as_size(first) * dim;
    const float* from = weights + as_size(first) * stride;
    for (std::size_t p = 0; p < run.n_parts; ++p) {
      const std::byte* const rows = run.parts[p];
      const int n_rows = run.n_tokens[p];
      ahead.fetch(as_size(n_rows) * dim * Type::kSize);
      std::size_t d = 0;
      for (; d + 16 <= dim; d += 16) {
        add_rows<Type, n(), 2>(dim, rows + d * Type::kSize, n_rows, from, stride, sums + d);
      }
      if (d < dim) {
        add_rows<Type, n(), 1>(dim, rows + d * Type::kSize, n_rows, from, stride, sums + d);
      }
      from += n_rows;
    }
  });
}

template <typename Type>
KeyKernels keys_of(Layout layout) {
  KeyKernels kernels = scalar::raw_keys(layout);
  kernels.decode = decode<Type>;
  kernels.scores = scores<Type>;
  return kernels;
}

template <typename Type>
ValueKernels values_of(Layout layout) {
  ValueKernels kernels = scalar::raw_values(layout);
  kernels.decode = decode<Type>;
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

}  // namespace kvpool::kernels::neon
