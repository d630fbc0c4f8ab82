#include "kvpool/kivi_kv_cache.h"

#include <mlx/ops.h>

#include <cmath>
#include <stdexcept>

#include "util/concat.h"
#include "util/shape_text.h"

namespace mx = mlx::core;

namespace kvpool {

namespace {

std::string message(const auto&... parts) { return detail::concat("KiviKVCache: ", parts...); }

}  // namespace

KiviKVCache::KiviKVCache(std::int64_t head_dim, int bits, int group_size, std::int64_t residual)
    : head_dim_(head_dim), bits_(bits), group_size_(group_size), residual_(residual) {
  if (bits != 2 && bits != 4 && bits != 8) {
    throw std::invalid_argument(message("bits must be 2, 4 or 8, got ", bits));
  }
  if (group_size != 32 && group_size != 64 && group_size != 128) {
    throw std::invalid_argument(message("group_size must be 32, 64 or 128, got ", group_size));
  }
  if (head_dim < 1 || head_dim % group_size != 0) {
    throw std::invalid_argument(message("head_dim must be a multiple of group_size (", group_size,
                                        "), since values are quantised in such groups; got ",
                                        head_dim));
  }
  if (residual < 0) throw std::invalid_argument(message("residual must be >= 0, got ", residual));
}

mx::array KiviKVCache::checked(const char* what, const mx::array& vector) const {
  if (vector.ndim() != 1 || vector.shape(0) != head_dim_) {
    throw std::invalid_argument(message(what, " must be (", head_dim_, ",), got ",
                                        detail::shape_text(vector.shape())));
  }
  return mx::astype(vector, mx::float16);
}

void KiviKVCache::append_key(const mx::array& k) {
  keys_.raw.push_back(checked("k", k));
  ++n_keys_;
}

void KiviKVCache::append_value(const mx::array& v) {
  if (n_values_ == n_keys_) throw std::invalid_argument(message("v comes before its key"));
  values_.raw.push_back(checked("v", v));
  ++n_values_;
  if (static_cast<std::int64_t>(values_.raw.size()) >= residual_ + group_size_) seal_oldest();
}

bool KiviKVCache::drop_last_key() {
  if (n_keys_ == n_values_) return false;
  keys_.raw.pop_back();
  --n_keys_;
  return true;
}

void KiviKVCache::seal_oldest() {
  const auto oldest = [n = group_size_](const std::vector<mx::array>& raw) {
    return mx::stack({raw.begin(), raw.begin() + n}, 0);
  };
  Packed k = mx::quantize(mx::transpose(oldest(keys_.raw)), group_size_, bits_);
  Packed v = mx::quantize(oldest(values_.raw), group_size_, bits_);
  keys_.sealed.push_back(std::move(k));
  values_.sealed.push_back(std::move(v));
  keys_.raw.erase(keys_.raw.begin(), keys_.raw.begin() + group_size_);
  values_.raw.erase(values_.raw.begin(), values_.raw.begin() + group_size_);
}

/// (tokens, head_dim), fp32.
mx::array KiviKVCache::unpacked(const Lane& lane) const {
  std::vector<mx::array> parts;
  for (const Packed& group : lane.sealed) {
    const mx::array rows = mx::dequantize(group[0], group[1], group[2], group_size_, bits_);
    parts.push_back(&lane == &keys_ ? mx::transpose(rows) : rows);
  }
  if (!lane.raw.empty()) parts.push_back(mx::stack(lane.raw, 0));
  return mx::astype(mx::concatenate(parts, 0), mx::float32);
}

mx::array KiviKVCache::attend(const mx::array& q) {
  const mx::array query = mx::astype(checked("q", q), mx::float32);
  if (n_values_ == 0) throw std::invalid_argument(message("there is no token to attend to"));
  if (n_keys_ != n_values_) throw std::invalid_argument(message("the last key has no value yet"));
  const mx::array scale(1.0F / std::sqrt(static_cast<float>(head_dim_)));
  const mx::array scores = mx::matmul(unpacked(keys_), mx::multiply(query, scale));
  const mx::array attended = mx::matmul(mx::softmax(scores, 0), unpacked(values_));
  return mx::astype(attended, mx::float16);
}

std::int64_t KiviKVCache::memory_bytes() const {
  std::size_t bytes = 0;
  for (const Lane* lane : {&keys_, &values_}) {
    for (const Packed& group : lane->sealed) {
      for (const mx::array& part : group) bytes += part.nbytes();
    }
    for (const mx::array& vector : lane->raw) bytes += vector.nbytes();
  }
  return static_cast<std::int64_t>(bytes);
}

void KiviKVCache::reset() {
  keys_ = {};
  values_ = {};
  n_keys_ = 0;
  n_values_ = 0;
}

}  // namespace kvpool
