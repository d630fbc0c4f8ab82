#include "backend/ops/shelf.h"

#include <mlx/ops.h>

#include <algorithm>

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

constexpr std::size_t kGrowthDivisor = 32;
/// Of the places in use: free ones that are kept, and one besides.
constexpr std::size_t kSpareDivisor = 16;

mx::ShapeElem as_extent(std::size_t n) { return static_cast<mx::ShapeElem>(n); }

mx::array index_of(std::span<const std::uint32_t> places) {
  return mx::array(places.data(), {as_extent(places.size())}, mx::uint32);
}

}  // namespace

ShelfBytes::~ShelfBytes() { shelf_->give_back(*this); }

std::shared_ptr<ShelfBytes> Shelf::take() {
  auto bytes = std::make_shared<ShelfBytes>(shared_from_this());
  const std::lock_guard guard(mutex_);
  while (first_free_ < holders_.size() && holders_[first_free_] != nullptr) ++first_free_;
  if (first_free_ == holders_.size()) holders_.push_back(nullptr);
  holders_[first_free_] = bytes.get();
  bytes->place_ = static_cast<std::uint32_t>(first_free_++);
  ++n_taken_;
  return bytes;
}

void Shelf::give_back(const ShelfBytes& bytes) noexcept {
  const std::lock_guard guard(mutex_);
  if (bytes.place_ == ShelfBytes::kNone) return;
  holders_[bytes.place_] = nullptr;
  first_free_ = std::min<std::size_t>(first_free_, bytes.place_);
  --n_taken_;
  if (n_taken_ == 0) {
    n_rows_ = 0;
    version_.reset();
  }
  while (holders_.size() > n_rows_ && holders_.back() == nullptr) holders_.pop_back();
}

std::size_t Shelf::resident_bytes() const {
  const std::lock_guard guard(mutex_);
  return holders_.size() * words() * 4;
}

void Shelf::pack() {
  const std::lock_guard guard(mutex_);
  if (n_rows_ <= n_taken_ + n_taken_ / kSpareDivisor + 1) return;
  std::vector<std::uint32_t> places;
  for (ShelfBytes* holder : holders_) {
    if (holder == nullptr) continue;
    places.push_back(holder->place_);
    holders_[places.size() - 1] = holder;
    holder->place_ = static_cast<std::uint32_t>(places.size() - 1);
  }
  holders_.resize(places.size());
  first_free_ = places.size();
  // Places without a row have nothing to move.
  std::erase_if(places, [this](std::uint32_t place) { return place >= n_rows_; });
  n_rows_ = places.size();
  version_ = mx::take(*version_, index_of(places), 0);
}

void Shelf::fit() {
  const std::lock_guard guard(mutex_);
  if (n_rows_ >= holders_.size()) return;
  const std::size_t grown = holders_.size() + holders_.size() / kGrowthDivisor;
  holders_.resize(grown, nullptr);
  const mx::array added = mx::zeros({as_extent(grown - n_rows_), as_extent(words())}, mx::uint32);
  version_ = version_ ? mx::concatenate({*version_, added}, 0) : added;
  n_rows_ = grown;
}

mx::array Shelf::read(std::span<const std::uint32_t> places) const {
  const mx::array bytes = mx::view(mx::take(*version_, index_of(places), 0), mx::uint8);
  return mx::slice(bytes, {0, 0}, {bytes.shape(0), as_extent(place_bytes_)});
}

void Shelf::write(std::span<const std::uint32_t> places, const mx::array& bytes) {
  const auto padding = static_cast<int>(4 * words() - place_bytes_);
  const mx::array rows =
      mx::view(padding == 0 ? bytes : mx::pad(bytes, {{0, 0}, {0, padding}}), mx::uint32);
  version_ = mx::scatter(*version_, index_of(places), mx::expand_dims(rows, 1), 0);
}

}  // namespace kvpool::detail
