// Reads and writes take effect in the order in which they were asked for, however late and on
// whichever streams MLX runs them.

#include <gtest/gtest.h>
#include <mlx/mlx.h>
#include <rapidcheck/gtest.h>

#include <numeric>
#include <optional>

#include "kvpool/mlx_block_storage.h"
#include "testing.h"

namespace kvpool {
namespace {

namespace mx = mlx::core;
using testing::one_block;
using testing::pool_of;
using testing::same;

mx::array rows_of(float value) { return mx::full({16, 8}, value); }

TEST(Order, WritingAndReadingEvaluateNothing) {
  const auto pool = pool_of(2);
  MLXBlockStorage storage(pool, 8);
  const Block block = one_block(*pool, 16, 1, "fp32");
  const mx::array rows = rows_of(1);
  storage.write(block, 0, rows);
  const mx::array read = storage.read(block);
  const mx::array view = storage.buffer_for(block);
  for (const mx::array* array : {&rows, &read, &view}) {
    EXPECT_EQ(array->status(), mx::array::Status::unscheduled);
  }
}

TEST(Order, ALateReadShowsItsOwnersRows) {
  const auto pool = pool_of(2);
  MLXBlockStorage storage(pool, 8);
  const Block a = one_block(*pool, 16, 1, "fp32");
  storage.write(a, 0, rows_of(1));
  const mx::array of_a = storage.read(a);
  pool->free({{a}});
  const Block b = one_block(*pool, 16, 2, "fp32");
  ASSERT_EQ(a.block_id(), b.block_id());
  storage.write(b, 0, rows_of(2));
  const mx::array of_b = storage.read(b);
  EXPECT_TRUE(same(of_b, rows_of(2)));
  EXPECT_TRUE(same(of_a, rows_of(1)));
}

TEST(Order, ALateReadSurvivesRelease) {
  const auto pool = pool_of(2);
  const auto buffers = std::make_shared<MlxBufferPool>();
  std::optional<MLXBlockStorage> storage(std::in_place, pool, 8, 1, buffers);
  const Block a = one_block(*pool, 16, 1, "fp32");
  storage->write(a, 0, rows_of(1));
  const mx::array late = storage->read(a);
  pool->free({{a}});
  storage->release(a);
  EXPECT_EQ(buffers->free_count(), 0U) << "unfinished work keeps the memory from others";
  const MlxBuffer other = buffers->alloc(mx::Device::cpu, 512, mx::float32, {128});
  std::fill_n(other.array().data<float>(), 128, NAN);
  storage.reset();
  EXPECT_TRUE(same(late, rows_of(1)));
}

TEST(Order, MemoryGivenBackWhileTasksRunIsNotHandedOnUnderThem) {
  const auto pool = pool_of(8, 64);
  const auto buffers = std::make_shared<MlxBufferPool>();
  MLXBlockStorage storage(pool, 256, 8, buffers);
  std::vector<mx::array> reads;
  for (int round = 0; round < 200; ++round) {
    const auto value = static_cast<float>(round);
    const Block block = one_block(*pool, 64, round, "fp32");
    storage.write(block, 0, mx::full({8, 64, 256}, value));
    reads.push_back(mx::max(storage.read(block)));
    reads.push_back(mx::min(storage.read(block)));
    mx::async_eval({reads[reads.size() - 2], reads.back()});
    pool->free({{block}});
    storage.release(block);
    ASSERT_EQ(storage.resident_bytes(), 0U);
  }
  for (std::size_t i = 0; i < reads.size(); ++i) {
    ASSERT_EQ(reads[i].item<float>(), static_cast<float>(i / 2));
  }
}

TEST(Order, ReadsThatNobodyKeepsDoNoHarm) {
  const auto pool = pool_of(2);
  MLXBlockStorage storage(pool, 8);
  const Block block = one_block(*pool, 16, 1, "int4");
  for (int i = 0; i < 20000; ++i) storage.read(block);
  storage.write(block, 0, mx::full({16, 8}, 5, mx::int32));
  EXPECT_TRUE(same(storage.read(block), mx::full({16, 8}, 5, mx::uint8)));
}

TEST(Order, AReadIsNotChangedByWhatIsDoneToIt) {
  const auto pool = pool_of(2);
  MLXBlockStorage storage(pool, 8);
  const Block block = one_block(*pool, 16, 1, "fp32");
  storage.write(block, 0, rows_of(1));
  mx::eval(mx::add(storage.read(block), mx::array(1.0F)));
  mx::eval(mx::negative(storage.buffer_for(block)));
  EXPECT_TRUE(same(storage.read(block), rows_of(1)));
}

/// Random calls over blocks, owners, formats and streams, against dense arrays of what was written.
class Machine {
 public:
  static constexpr mx::ShapeElem kBlockSize = 4;
  static constexpr mx::ShapeElem kHeads = 2;
  static constexpr mx::ShapeElem kWidth = 5;

  void step() {
    const mx::StreamContext on(streams_[pick(streams_.size())]);
    switch (pick(9)) {
      case 0:
      case 1:
        return allocate();
      case 2:
      case 3:
      case 4:
        return with_live([this](Held& held) { write(held); });
      case 5:
      case 6:
        return with_live([this](Held& held) { read(held); });
      case 7:
        return with_live([this](Held& held) { free(held); });
      default:
        return evaluate_some();
    }
  }

  /// Evaluates what is left in a random order.
  void finish() {
    while (!reads_.empty()) {
      std::swap(reads_[pick(reads_.size())], reads_.back());
      const auto [read, expected] = reads_.back();
      reads_.pop_back();
      RC_ASSERT(same(read, expected));
    }
    for (const Held& held : live_) pool_->free({{held.block}});
    for (const Block& block : seen_) storage_.release(block);
    RC_ASSERT(storage_.resident_bytes() == 0U);
  }

 private:
  struct Held {
    Block block;
    std::vector<float> rows;  ///< (kHeads, kBlockSize, kWidth), as written.
  };
  struct Read {
    mx::array rows;
    mx::array expected;
  };

  static std::size_t pick(std::size_t below) {
    return *rc::gen::inRange<std::size_t>(0, below);
  }

  void allocate() {
    if (live_.size() == 6) return;
    const char* format = testing::kFormats[pick(std::size(testing::kFormats))];
    const Block block = one_block(*pool_, kBlockSize, static_cast<Owner>(pick(3)), format);
    live_.push_back({block, std::vector<float>(kHeads * kBlockSize * kWidth, 0.0F)});
    seen_.push_back(block);
  }

  void with_live(auto action) {
    if (!live_.empty()) action(live_[pick(live_.size())]);
  }

  void write(Held& held) {
    const auto first = static_cast<mx::ShapeElem>(pick(kBlockSize));
    const auto n = static_cast<mx::ShapeElem>(pick(kBlockSize - first)) + 1;
    const BlockFormat format = block_format(held.block.format());
    const std::size_t most = std::size_t{1} << (format.is_code() ? format.bits : 7);
    std::vector<float> values;
    for (mx::ShapeElem head = 0; head < kHeads; ++head) {
      for (mx::ShapeElem i = 0; i < n * kWidth; ++i) {
        values.push_back(static_cast<float>(pick(most)));
        held.rows[static_cast<std::size_t>((head * kBlockSize + first) * kWidth + i)] =
            values.back();
      }
    }
    storage_.write(held.block, first,
                   mx::array(values.begin(), {kHeads, n, kWidth}, format.dtype));
  }

  void read(const Held& held) {
    const BlockFormat format = block_format(held.block.format());
    reads_.push_back({storage_.read(held.block),
                      mx::array(held.rows.begin(), {kHeads, kBlockSize, kWidth}, format.dtype)});
  }

  void free(Held& held) {
    pool_->free({{held.block}});
    if (pick(2) == 0) storage_.release(held.block);
    std::swap(held, live_.back());
    live_.pop_back();
  }

  void evaluate_some() {
    std::vector<mx::array> some;
    for (std::size_t i = 0, n = std::min<std::size_t>(reads_.size(), pick(4)); i < n; ++i) {
      some.push_back(reads_[pick(reads_.size())].rows);
    }
    if (pick(2) == 0) {
      mx::async_eval(some);
    } else {
      mx::eval(some);
    }
  }

  std::vector<mx::Stream> streams_{mx::default_stream(mx::Device::cpu), second_stream()};
  std::shared_ptr<BlockPoolAllocator> pool_ = pool_of(12, kBlockSize);
  MLXBlockStorage storage_{pool_, kWidth, kHeads};
  std::vector<Held> live_;
  std::vector<Block> seen_;
  std::vector<Read> reads_;

  static mx::Stream second_stream() {
    static const mx::Stream stream = mx::new_stream(mx::Device::cpu);
    return stream;
  }
};

RC_GTEST_PROP(OrderProperty, LazyReadsAreThoseOfADenseModel, ()) {
  Machine machine;
  for (int i = 0, n = *rc::gen::inRange(1, 400); i < n; ++i) machine.step();
  machine.finish();
}

}  // namespace
}  // namespace kvpool
