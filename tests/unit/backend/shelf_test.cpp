#include "backend/ops/shelf.h"

#include <gtest/gtest.h>
#include <mlx/ops.h>

namespace mx = mlx::core;

namespace kvpool::detail {
namespace {

constexpr std::size_t kBytes = 10;  // no multiple of a word

class ShelfTest : public ::testing::Test {
 protected:
  std::shared_ptr<Shelf> shelf_ = std::make_shared<Shelf>(kBytes);
  std::vector<std::shared_ptr<ShelfBytes>> held_;

  static mx::array filled(std::uint8_t number) {
    return mx::full({1, static_cast<int>(kBytes)}, number, mx::uint8);
  }
  void add(std::uint8_t number) {
    held_.push_back(shelf_->take());
    shelf_->fit();
    const std::uint32_t place[] = {held_.back()->place()};
    shelf_->write(place, filled(number));
  }
  bool holds(std::size_t which, std::uint8_t number) const {
    const std::uint32_t place[] = {held_[which]->place()};
    return mx::array_equal(shelf_->read(place), filled(number)).item<bool>();
  }
};

TEST_F(ShelfTest, PlacesThatArePackedKeepTheirBytes) {
  for (std::uint8_t i = 0; i < 100; ++i) add(i);
  const mx::array before = *shelf_->version();
  std::vector<std::shared_ptr<ShelfBytes>> kept;
  for (std::size_t i = 0; i < held_.size(); i += 3) kept.push_back(held_[i]);
  held_ = std::move(kept);
  std::vector<std::shared_ptr<ShelfBytes>> planned;
  for (int i = 0; i < 10; ++i) planned.push_back(shelf_->take());
  shelf_->pack();
  EXPECT_EQ(shelf_->resident_bytes(), 44 * 12U);
  for (std::size_t i = 0; i < held_.size(); ++i) {
    EXPECT_LT(held_[i]->place(), 44U) << i;
    EXPECT_TRUE(holds(i, static_cast<std::uint8_t>(3 * i))) << i;
  }
  // Who holds an older version reads that.
  EXPECT_EQ(mx::slice(before, {99, 0}, {100, 1}).item<std::uint32_t>(), 99U * 0x01010101U);
  add(200);
  EXPECT_TRUE(holds(held_.size() - 1, 200));
}

TEST_F(ShelfTest, AFewFreePlacesAreUsedAgainWithoutPacking) {
  for (std::uint8_t i = 0; i < 64; ++i) add(i);
  const std::size_t bytes = shelf_->resident_bytes();
  held_.erase(held_.begin() + 5);
  shelf_->pack();
  add(77);
  EXPECT_EQ(held_.back()->place(), 5U);
  EXPECT_EQ(shelf_->resident_bytes(), bytes);
}

TEST_F(ShelfTest, PlacesTakenAndGivenBackLeaveNothing) {
  add(1);
  const std::size_t bytes = shelf_->resident_bytes();
  {
    std::vector<std::shared_ptr<ShelfBytes>> planned;
    for (int i = 0; i < 50; ++i) planned.push_back(shelf_->take());
    EXPECT_GT(shelf_->resident_bytes(), bytes);
  }
  EXPECT_EQ(shelf_->resident_bytes(), bytes);
  EXPECT_TRUE(holds(0, 1));
  held_.clear();
  EXPECT_EQ(shelf_->resident_bytes(), 0U);
  EXPECT_FALSE(shelf_->version().has_value());
}

}  // namespace
}  // namespace kvpool::detail
