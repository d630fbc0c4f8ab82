#pragma once

#include <algorithm>
#include <array>

#include "kernels/avx512/common.h"
#include "kernels/vector_layout.h"

/// The columns of a run, which are its tokens one after the other, a chunk at a time.
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

}  // namespace kvpool::kernels::avx512
