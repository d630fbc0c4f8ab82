#pragma once

#include "codec/codec.h"

namespace kvpool::codec {

struct HeadTransform;

/// The space that a head's rows are stored in, as seen from the model's own: a row x is stored as
/// (x - mean) / smooth, turned by hadamard() or a rotation, or with one of the two steps only, or as
/// it is.
class Space {
 public:
  /// The model's own.
  Space() = default;
  /// That of a format, which must validate, for one KV head; what it refers to must outlive this.
  Space(const Format& format, int kv_head) noexcept;

  bool is_plain() const noexcept { return transform_ == nullptr && !hadamard_; }
  /// Whether scores and sums have a part that the stored rows lack: that of the mean.
  bool has_mean() const noexcept { return transform_ != nullptr; }
  bool operator==(const Space&) const = default;

  /// (n_rows, dim) to and from the space, in place.
  void enter(float* rows, int n_rows, int dim) const;
  void leave(float* rows, int n_rows, int dim) const;

  /// Turns queries so that their products with stored keys, plus offsets[row], are those with the
  /// keys themselves. `offsets` is for spaces with a mean.
  void enter_queries(float* queries, int n_rows, int dim, float* offsets) const;
  /// Turns sums of weighted stored values into those of the values themselves; weights[row] is the
  /// sum of the weights, and for spaces with a mean.
  void leave_sums(float* sums, int n_rows, int dim, const float* weights) const;

 private:
  void turn(float* rows, int n_rows, int dim) const;
  void turn_back(float* rows, int n_rows, int dim) const;

  const HeadTransform* transform_ = nullptr;
  bool hadamard_ = false;
  bool rotates_ = false;
};

}  // namespace kvpool::codec
