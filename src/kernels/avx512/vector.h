#pragma once

#include <algorithm>
#include <array>

#include "kernels/avx512/common.h"
#include "kernels/vector_layout.h"
#include "kernels/vector_search.h"

namespace kvpool::kernels::avx512 {

/// Columns of a run that vector layouts work on at a time, and that a vector of 8-bit codes has.
inline constexpr int kChunkColumns = 1024;
inline constexpr int kColumns = 64;

/// Tokens of one part among the columns of a chunk.
struct Piece {
  const std::byte* part;
  int first_token;
  int n_tokens;
  int column;
};

/// Consecutive columns of a run, at most kMost.
template <int kMost>
struct Chunk {
  std::array<Piece, kMost> pieces;
  int n_pieces = 0;
  int n_columns = 0;

  std::span<const Piece> all() const { return std::span(pieces).first(as_size(n_pieces)); }
};

/// Calls take(chunk) over the columns of a run.
template <int kMost, typename Take>
inline void for_chunks(const PartRun& run, const Take& take) {
  Chunk<kMost> chunk;
  for (std::size_t p = 0; p < run.n_parts; ++p) {
    for (int t = 0; t < run.n_tokens[p];) {
      const int n = std::min(run.n_tokens[p] - t, kMost - chunk.n_columns);
      chunk.pieces[as_size(chunk.n_pieces++)] = {run.parts[p], t, n, chunk.n_columns};
      chunk.n_columns += n;
      t += n;
      if (chunk.n_columns < kMost) continue;
      take(chunk);
      chunk.n_pieces = chunk.n_columns = 0;
    }
  }
  if (chunk.n_columns > 0) take(chunk);
}

/// 8-bit codes by sub-vector and column: of a run where they lie, or of a chunk copied together. Up
/// to a multiple of kColumns there are codes, if of no token.
class ChunkCodes {
 public:
  /// Points at a run's codes, if it is no longer than a chunk and its parts make whole halves of
  /// vectors.
  /// @return its columns; 0 if it is not so.
  int point_at(const PartShape& shape, const PartRun& run) {
    if (shape.block_size % kHalf != 0) return 0;
    stride_ = as_size(shape.block_size);
    int n_columns = 0;
    const std::byte** to = halves_.data();
    for (std::size_t p = 0; p < run.n_parts; ++p) {
      const int n_tokens = run.n_tokens[p];
      if (n_columns % kHalf != 0 || n_tokens > kChunkColumns - n_columns) return 0;
      const std::byte* half = run.parts[p];
      for (int t = 0; t < n_tokens; t += kHalf, half += kHalf) *to++ = half;
      n_columns += n_tokens;
    }
    if (n_columns > 0) *to = to[-1];
    return n_columns;
  }

  /// Copies a run of parts of 16 tokens, of which the last may have fewer, if it is no longer than
  /// a chunk.
  /// @return its columns; 0 if it is not so.
  int copy_sixteens(int subs, const PartShape& shape, const PartRun& run) {
    const std::size_t last = run.n_parts - 1;
    if (shape.block_size != 16 || subs % 4 != 0 || run.n_parts == 0 ||
        run.n_parts > kChunkColumns / 16) {
      return 0;
    }
    for (std::size_t p = 0; p < last; ++p) {
      if (run.n_tokens[p] != 16) return 0;
    }
    point_at_copy();
    std::byte* column = codes_;
    for (std::size_t p = 0; p <= last; p += 4, column += kColumns) {
      const std::byte* from[4];
      for (std::size_t i = 0; i < 4; ++i) from[i] = run.parts[std::min(p + i, last)];
      for (int sub = 0; sub < subs; sub += 4) join_rows(from, sub, column + sub * kStride);
    }
    return static_cast<int>(16 * last) + run.n_tokens[last];
  }

  void copy(int subs, const PartShape& shape, const Chunk<kChunkColumns>& chunk) {
    point_at_copy();
    const auto block_size = as_size(shape.block_size);
    for (const Piece& piece : chunk.all()) {
      const std::byte* from = piece.part + piece.first_token;
      std::byte* to = codes_ + piece.column;
      const auto copy_rows = [&](const auto& copy_row) {
        for (int sub = 0; sub < subs; ++sub, from += block_size, to += kStride) copy_row(from, to);
      };
      if (piece.n_tokens == 16) {
        copy_rows(copy_16);
      } else {
        const int n = piece.n_tokens;
        copy_rows([n](const std::byte* a, std::byte* b) { copy_any(a, n, b); });
      }
    }
    for (int sub = 0; sub < subs; ++sub) {
      _mm512_storeu_si512(codes_ + sub * kStride + chunk.n_columns, _mm512_setzero_si512());
    }
  }

  /// The codes of 64 columns.
  __m512i at(int sub, int column) const {
    const std::byte* const* const halves = halves_.data() + column / kHalf;
    const std::size_t row = as_size(sub) * stride_;
    const auto* const first = reinterpret_cast<const __m256i*>(halves[0] + row);
    const auto* const second = reinterpret_cast<const __m256i*>(halves[1] + row);
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(first)),
                              _mm256_loadu_si256(second), 1);
  }

 private:
  static constexpr int kHalf = kColumns / 2;
  static constexpr int kStride = kChunkColumns + kColumns;

  void point_at_copy() {
    stride_ = kStride;
    for (std::size_t i = 0; i < halves_.size(); ++i) halves_[i] = codes_ + i * kHalf;
  }
  /// Of four parts of 16 tokens, sub-vectors `sub` to `sub` + 3: the tokens of each side by side.
  static void join_rows(const std::byte* const (&parts)[4], int sub, std::byte* to) {
    __m512i rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = _mm512_loadu_si512(parts[i] + 16 * sub);
    const __m512i low01 = _mm512_shuffle_i32x4(rows[0], rows[1], 0x44);
    const __m512i low23 = _mm512_shuffle_i32x4(rows[2], rows[3], 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(rows[0], rows[1], 0xEE);
    const __m512i high23 = _mm512_shuffle_i32x4(rows[2], rows[3], 0xEE);
    _mm512_store_si512(to, _mm512_shuffle_i32x4(low01, low23, 0x88));
    _mm512_store_si512(to + kStride, _mm512_shuffle_i32x4(low01, low23, 0xDD));
    _mm512_store_si512(to + 2 * kStride, _mm512_shuffle_i32x4(high01, high23, 0x88));
    _mm512_store_si512(to + 3 * kStride, _mm512_shuffle_i32x4(high01, high23, 0xDD));
  }
  static void copy_16(const std::byte* from, std::byte* to) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), codes);
  }
  /// May write zeros after the last, to be overwritten by what comes next.
  static void copy_any(const std::byte* from, int n, std::byte* to) {
    for (; n >= 64; n -= 64, from += 64, to += 64) {
      _mm512_storeu_si512(to, _mm512_loadu_si512(from));
    }
    const __mmask64 mask = (__mmask64{1} << n) - 1;
    if (n > 0) _mm512_storeu_si512(to, _mm512_maskz_loadu_epi8(mask, from));
  }

  std::size_t stride_ = 0;
  /// Of each kHalf columns, the first's code of the first sub-vector.
  std::array<const std::byte*, kStride / kHalf> halves_;
  alignas(64) std::byte codes_[codec::kMaxHeadDim / 2 * kStride];
};

/// Calls take(number of columns) with the codes of a run, a chunk at a time.
template <int kSubDim, typename Take>
inline void for_code_chunks(const PartShape& shape, const PartRun& run, ChunkCodes& codes,
                            const Take& take) {
  const int subs = n_subs(kSubDim, shape.head_dim);
  int n_columns = codes.point_at(shape, run);
  if (n_columns == 0) n_columns = codes.copy_sixteens(subs, shape, run);
  if (n_columns > 0) return take(n_columns);
  for_chunks<kChunkColumns>(run, [&](const Chunk<kChunkColumns>& chunk) {
    codes.copy(subs, shape, chunk);
    take(chunk.n_columns);
  });
}

/// A table of 256 bytes in registers.
class ByteTable {
 public:
  ByteTable() = default;
  /// With `flip`, each byte x becomes x ^ flip.
  explicit ByteTable(const std::int8_t* bytes, char flip = 0) {
    for (int i = 0; i < 4; ++i) {
      __m512i quarter =
          _mm512_xor_si512(_mm512_loadu_si512(bytes + 64 * i), _mm512_set1_epi8(flip));
      asm("" : "+v"(quarter));  // Or it would be read from memory wherever it is used.
      quarters_[i] = quarter;
    }
  }
  /// `high` is the highest bit of each code.
  __m512i operator()(__m512i codes, __mmask64 high) const {
    return _mm512_mask_blend_epi8(high, _mm512_permutex2var_epi8(quarters_[0], codes, quarters_[1]),
                                  _mm512_permutex2var_epi8(quarters_[2], codes, quarters_[3]));
  }

 private:
  __m512i quarters_[4];
};

/// Low and high bytes of 64 numbers of 16 bits, the byte kFirst of each lane and the next.
template <int kFirst = 0>
inline void store_bytes(const __m512i (&numbers)[4], void* low, void* high) {
  alignas(64) static constexpr auto kBytes = [] {
    std::array<std::uint8_t, 64> from{};
    for (std::size_t i = 0; i < 32; ++i) {
      from[i] = static_cast<std::uint8_t>(4 * i + kFirst);
      from[32 + i] = static_cast<std::uint8_t>(4 * i + kFirst + 1);
    }
    return from;
  }();
  const __m512i order = _mm512_load_si512(kBytes.data());
  const __m512i first = _mm512_permutex2var_epi8(numbers[0], order, numbers[1]);
  const __m512i second = _mm512_permutex2var_epi8(numbers[2], order, numbers[3]);
  _mm512_store_si512(low, _mm512_shuffle_i64x2(first, second, 0x44));
  _mm512_store_si512(high, _mm512_shuffle_i64x2(first, second, 0xEE));
}

/// A row of weights as unsigned digits: weight = step * (256 * high + low).
struct WeightDigits {
  float step;
  alignas(64) std::uint8_t low[kChunkColumns];
  alignas(64) std::uint8_t high[kChunkColumns];

  /// Zeros follow the n weights, up to a multiple of 64.
  void set(const float* weights, int n) {
    __m512 most[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    int at = 0;
    for (; at + 32 <= n; at += 32) {
      most[0] = _mm512_max_ps(most[0], _mm512_loadu_ps(weights + at));
      most[1] = _mm512_max_ps(most[1], _mm512_loadu_ps(weights + at + 16));
    }
    for (; at < n; at += 16) {
      most[0] = _mm512_max_ps(most[0], _mm512_maskz_loadu_ps(first_lanes(n - at), weights + at));
    }
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(most[0], most[1]));
    constexpr float kMostSteps = 65530.0F;
    step = largest / kMostSteps;
    const __m512 inverse = _mm512_set1_ps(largest > 1e-30F ? kMostSteps / largest : 0.0F);
    const auto all = [](int) { return __mmask16{0xFFFF}; };
    const auto some = [n](int column) { return first_lanes(std::max(0, n - column)); };
    int i = 0;
    for (; i + 64 <= n; i += 64) set_columns(weights, i, inverse, all);
    if (i < n) set_columns(weights, i, inverse, some);
  }

 private:
  /// Digits of 64 columns, of which those in the masks count.
  template <typename MaskAt>
  void set_columns(const float* weights, int first, __m512 inverse, const MaskAt& mask_at) {
    __m512i numbers[4];
    for (int k = 0; k < 4; ++k) {
      const int column = first + 16 * k;
      const __m512 weight = _mm512_maskz_loadu_ps(mask_at(column), weights + column);
      numbers[k] = _mm512_cvtps_epi32(_mm512_fmadd_ps(weight, inverse, kDither.at(column)));
    }
    store_bytes(numbers, low + first, high + first);
  }
};

/// Sums with both digits as numbers.
inline __m512 digit_total(__m512i low, __m512i high) {
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
}

/// Writes n of 64 columns' scores, of which vector k has the columns 4 k ... 4 k + 3 of each
/// sixteen; up to 15 more may be written.
inline void store_in_order(const __m512 (&sums)[4], int n, float* scores) {
  const __m512 a = _mm512_shuffle_f32x4(sums[0], sums[1], 0x44);
  const __m512 b = _mm512_shuffle_f32x4(sums[2], sums[3], 0x44);
  const __m512 c = _mm512_shuffle_f32x4(sums[0], sums[1], 0xEE);
  const __m512 d = _mm512_shuffle_f32x4(sums[2], sums[3], 0xEE);
  const __m512 in_order[4] = {_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD),
                              _mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xDD)};
  for (int k = 0; k < 4 && 16 * k < n; ++k) _mm512_storeu_ps(scores + 16 * k, in_order[k]);
}

/// The largest magnitude; NaN if there is one.
inline float largest_of(const float* row, int n) {
  __m512i most = _mm512_setzero_si512();
  for (int d = 0; d < n; d += 16) {
    const __m512 x = _mm512_abs_ps(_mm512_maskz_loadu_ps(first_lanes(n - d), row + d));
    // Bits of numbers >= 0 are in their order, with NaN above infinity.
    most = _mm512_max_epi32(most, _mm512_castps_si512(x));
  }
  return _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32(_mm512_reduce_max_epi32(most))));
}

/// Queries as digits; a query's number n stands for scale * n.
struct DigitQuery {
  float scale;
  std::int32_t sum;  ///< Of the numbers.
  /// Of channels 4 i ... 4 i + 3: low[i], high[i], a signed byte each.
  alignas(64) std::int32_t low[codec::kMaxHeadDim / 4];
  alignas(64) std::int32_t high[codec::kMaxHeadDim / 4];
};
std::size_t digit_query_bytes(const PartShape& shape, int n_queries);
void prepare_digit_queries(const PartShape& shape, const float* queries, int n_queries,
                           std::byte* prepared);

struct Lanes {
  static constexpr int kLanes = 16;
  using Float = __m512;
  using Int = __m512i;
  static Float load(const float* from) { return _mm512_load_ps(from); }
  static Float broadcast(float x) { return _mm512_set1_ps(x); }
  static Int broadcast(std::int32_t x) { return _mm512_set1_epi32(x); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static __mmask16 above(Float a, Float b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static Float select(__mmask16 mask, Float a, Float b) { return _mm512_mask_mov_ps(b, mask, a); }
  static Int select(__mmask16 mask, Int a, Int b) { return _mm512_mask_mov_epi32(b, mask, a); }
  static void store(std::int32_t* to, Int x) { _mm512_store_si512(to, x); }
};

/// Of kVector4 and kVector8.
KeyKernels table_keys(Layout layout);
KeyKernels wide_vector_keys();
ValueKernels wide_vector_values();

}  // namespace kvpool::kernels::avx512
