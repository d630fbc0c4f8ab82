#include <mlx/mlx.h>

#include "kvpool/mlx_block_storage.h"
#include "testing.h"

namespace kvpool {
namespace {

namespace mx = mlx::core;
using testing::error_of;
using testing::one_block;
using testing::pool_of;
using testing::random_rows;
using testing::same;

struct Case {
  const char* format;
  mx::ShapeElem n_kv_heads;
  mx::ShapeElem head_dim;
};

/// Calls `check` for each geometry of the test's format.
class EveryFormat : public ::testing::TestWithParam<const char*> {
 protected:
  static void for_each_case(auto check) {
    for (const mx::ShapeElem n_kv_heads : {1, 3}) {
      for (const mx::ShapeElem head_dim : {1, 40, 64, 80, 96, 112, 128, 192, 256}) {
        SCOPED_TRACE(std::to_string(n_kv_heads) + " heads of " + std::to_string(head_dim));
        check(Case{GetParam(), n_kv_heads, head_dim});
      }
    }
  }
};

mx::Shape rows(const Case& c, mx::ShapeElem n) {
  return c.n_kv_heads == 1 ? mx::Shape{n, c.head_dim} : mx::Shape{c.n_kv_heads, n, c.head_dim};
}

mx::array first(const mx::array& a, mx::ShapeElem from, mx::ShapeElem to) {
  mx::Shape start(a.ndim(), 0);
  mx::Shape stop = a.shape();
  start[a.ndim() - 2] = from;
  stop[a.ndim() - 2] = to;
  return mx::slice(a, start, stop);
}

/// As the header says: lowest bit first, each row from a byte on.
mx::array packed(const mx::array& codes, int bits) {
  const mx::ShapeElem width = codes.shape(-1);
  const mx::ShapeElem row_bytes = (width * bits + 7) / 8;
  const auto n_rows = static_cast<mx::ShapeElem>(codes.size()) / width;
  mx::array flat = mx::contiguous(codes);
  mx::eval(flat);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(n_rows * row_bytes));
  for (mx::ShapeElem i = 0; i < n_rows * width * bits; ++i) {
    const mx::ShapeElem row = i / (width * bits);
    const mx::ShapeElem bit = i % (width * bits);
    const int value = flat.data<std::uint8_t>()[row * width + bit / bits] >> (bit % bits) & 1;
    bytes[static_cast<std::size_t>(row * row_bytes + bit / 8)] |=
        static_cast<std::uint8_t>(value << (bit % 8));
  }
  mx::Shape shape = codes.shape();
  shape.back() = row_bytes;
  return mx::array(bytes.begin(), shape, mx::uint8);
}

void expect_round_trip(const Case& c) {
  const auto pool = pool_of(4);
  MLXBlockStorage storage(pool, c.head_dim, c.n_kv_heads);
  const Block block = one_block(*pool, 16, 1, c.format);
  const mx::array written = random_rows(rows(c, 7), c.format);
  storage.write(block, 0, first(written, 0, 4));
  storage.write(block, 4, first(written, 4, 7));
  const mx::array expected =
      mx::concatenate({written, mx::zeros(rows(c, 9), written.dtype())}, -2);
  EXPECT_TRUE(same(storage.read(block), expected));

  const BlockFormat format = block_format(c.format);
  const mx::array whole = storage.buffer_for(block);
  EXPECT_TRUE(same(whole, format.is_code() ? packed(expected, format.bits) : expected));
  EXPECT_EQ(static_cast<std::int64_t>(whole.nbytes()),
            c.n_kv_heads * 16 * format.row_bytes(c.head_dim));
}

void expect_neighbours_apart(const Case& c) {
  const auto pool = pool_of(80);
  MLXBlockStorage storage(pool, c.head_dim, c.n_kv_heads);
  const std::vector<Block> blocks = pool->allocate(Stream::kKey, 40 * 16, 1, c.format);
  std::vector<mx::array> written;
  for (const Block& block : blocks) {
    written.push_back(random_rows(rows(c, 16), c.format));
    storage.write(block, 0, written.back());
  }
  const mx::array again = random_rows(rows(c, 1), c.format);
  storage.write(blocks[20], 15, again);
  written[20] = mx::concatenate({first(written[20], 0, 15), again}, -2);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    ASSERT_TRUE(same(storage.read(blocks[i]), written[i])) << i;
  }
}

TEST_P(EveryFormat, GivesBackWhatWasWrittenAndZerosElsewhere) { for_each_case(expect_round_trip); }

TEST_P(EveryFormat, KeepsNeighboursApart) { for_each_case(expect_neighbours_apart); }

INSTANTIATE_TEST_SUITE_P(Formats, EveryFormat, ::testing::ValuesIn(testing::kFormats),
                         [](const auto& test) { return std::string(test.param); });

TEST(BlockFormats, CodesKeepTheirLowBitsOfAnyIntegerType) {
  const auto pool = pool_of(2);
  MLXBlockStorage storage(pool, 8);
  const Block block = one_block(*pool, 1, 1, "int3");
  const int values[] = {0, 1, 7, 8, 9, 255, -1, 1000};
  const int low_bits[] = {0, 1, 7, 0, 1, 7, 7, 0};
  for (const mx::Dtype dtype : {mx::int32, mx::int64, mx::int16, mx::uint32}) {
    storage.write(block, 0, mx::astype(mx::array(values, {1, 8}), dtype));
    EXPECT_TRUE(same(storage.read(block), mx::array(low_bits, {1, 8}, mx::uint8)));
  }
}

TEST(BlockFormats, FloatsAreCastToTheBlocksType) {
  const auto pool = pool_of(2);
  MLXBlockStorage storage(pool, 4);
  const Block block = one_block(*pool, 1, 1, "bf16");
  const mx::array values = mx::array({1.001F, -2.5F, 3e38F, 1e-40F}, {1, 4});
  storage.write(block, 0, values);
  EXPECT_TRUE(same(storage.read(block), mx::astype(values, mx::bfloat16)));
}

TEST(BlockFormats, RawFormatsKeepNaNAndInfinity) {
  const auto pool = pool_of(2);
  MLXBlockStorage storage(pool, 3);
  const Block block = one_block(*pool, 1, 1, "fp16");
  const mx::array odd = mx::array({NAN, INFINITY, -INFINITY}, {1, 3}, mx::float16);
  storage.write(block, 0, odd);
  EXPECT_TRUE(same(storage.read(block), odd));
}

TEST(BlockFormats, StridedAndBroadcastValuesAreWrittenAsTheyLook) {
  const auto pool = pool_of(2);
  MLXBlockStorage storage(pool, 4, 2);
  const Block block = one_block(*pool, 3, 1, "fp32");
  const mx::array transposed = mx::transpose(mx::reshape(mx::arange(24.0F), {4, 3, 2}));
  storage.write(block, 0, transposed);
  EXPECT_TRUE(same(storage.read(block), mx::contiguous(transposed)));
  storage.write(block, 0, mx::broadcast_to(mx::array(3.0F), {2, 3, 4}));
  EXPECT_TRUE(same(storage.read(block), mx::full({2, 3, 4}, 3.0F)));
}

TEST(BlockFormats, OneSegmentListHoldsManyFormats) {
  const auto pool = pool_of(44);
  MLXBlockStorage storage(pool, 40);
  std::vector<std::pair<Block, mx::array>> written;
  for (const char* format : testing::kFormats) {
    for (const Block& block : pool->allocate(Stream::kKey, 32, 1, format)) {
      written.emplace_back(block, random_rows({16, 40}, format));
      storage.write(block, 0, written.back().second);
    }
  }
  for (const auto& [block, rows] : written) EXPECT_TRUE(same(storage.read(block), rows));
}

TEST(BlockFormats, OtherTagsAreRefused) {
  for (const char* tag : {"", "fp8", "int", "int0", "int9", "int10", "INT4", "fp16 ", "kivi2"}) {
    const std::string error = error_of<std::invalid_argument>([&] { block_format(tag); });
    EXPECT_NE(error.find(std::string("got '") + tag + "'"), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace kvpool
