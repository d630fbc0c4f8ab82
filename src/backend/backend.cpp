#include "backend/backend.h"

#include <mlx/ops.h>
#include <mlx/utils.h>

#include <stdexcept>

#include "backend/native.h"
#include "backend/ops/ops_backend.h"
#include "kernels/kernels.h"
#include "util/concat.h"
#include "util/shape_text.h"

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

std::string message(const auto&... parts) { return concat("[attend] ", parts...); }

void check_mask(const mx::array& mask, const mx::Shape& wanted) {
  bool fits =
      mask.ndim() <= 4 && (mask.dtype() == mx::bool_ || mx::issubdtype(mask.dtype(), mx::floating));
  for (int axis = 1; fits && axis <= static_cast<int>(mask.ndim()); ++axis) {
    fits =
        mask.shape(-axis) == 1 || mask.shape(-axis) == wanted[static_cast<std::size_t>(4 - axis)];
  }
  if (fits) return;
  throw std::invalid_argument(message("mask must be bool or float and broadcast to ",
                                      shape_text(wanted), ", got ", shape_text(mask.shape())));
}

}  // namespace

void check_attend(const LayerFormat& format, std::span<const AttendRow> rows,
                  const mx::array& queries, const Visibility& visibility) {
  if (queries.ndim() != 4 || queries.shape(0) != static_cast<mx::ShapeElem>(rows.size()) ||
      queries.shape(3) != format.raw[0].head_dim || queries.shape(1) < 1 ||
      queries.shape(1) % format.n_kv_heads != 0) {
    throw std::invalid_argument(message("queries must be (", rows.size(), ", a multiple of ",
                                        format.n_kv_heads, ", S, ", format.raw[0].head_dim,
                                        "), got ", shape_text(queries.shape())));
  }
  if (const mx::Dtype dtype = queries.dtype();
      dtype != mx::float32 && dtype != mx::float16 && dtype != mx::bfloat16) {
    throw std::invalid_argument(message("queries must be float32, float16 or bfloat16"));
  }
  if (!(visibility.soft_cap >= 0.0F)) {
    throw std::invalid_argument(message("soft_cap must be >= 0, got ", visibility.soft_cap));
  }
  if (visibility.mask) {
    std::int64_t length = 0;
    for (const AttendRow& row : rows) {
      length = row.sequence->length();
      if (length != rows.front().sequence->length()) {
        throw std::invalid_argument(message("a mask array needs rows of one length"));
      }
    }
    check_mask(*visibility.mask, {queries.shape(0), queries.shape(1), queries.shape(2),
                                  static_cast<mx::ShapeElem>(length)});
  }
  if (visibility.sinks &&
      (visibility.sinks->ndim() != 1 || visibility.sinks->shape(0) != queries.shape(1))) {
    throw std::invalid_argument(message("sinks must be (", queries.shape(1), ",), got ",
                                        shape_text(visibility.sinks->shape())));
  }
}

mx::array laid_out(const mx::array& mask, std::int64_t n_keys, attention::Mask& out,
                   mx::Stream stream) {
  const bool is_bool = mask.dtype() == mx::bool_;
  const mx::array plain =
      mx::contiguous(is_bool ? mask : mx::astype(mask, mx::float32, stream), false, stream);
  out.kind = is_bool ? attention::Mask::Kind::kBool : attention::Mask::Kind::kAdditive;
  out.n_keys = n_keys;
  std::int64_t stride = 1;
  for (int axis = 1; axis <= static_cast<int>(mask.ndim()); ++axis) {
    const std::int64_t extent = plain.shape(-axis);
    out.strides[static_cast<std::size_t>(4 - axis)] = extent == 1 ? 0 : stride;
    stride *= extent;
  }
  return plain;
}

std::shared_ptr<Backend> make_backend(std::shared_ptr<MlxBufferPool> buffers) {
  const std::string forced = kernels::forced_level();
  const bool on_gpu = mx::to_stream({}).device == mx::Device::gpu;
  if (forced == kernels::kOps) return std::make_shared<OpsBackend>();
  if (forced == kernels::kCuda || (forced.empty() && on_gpu)) {
    if (std::shared_ptr<Backend> cuda = make_cuda_backend()) return cuda;
    if (forced.empty()) return std::make_shared<OpsBackend>();
    throw std::invalid_argument(
        "KVPOOL_KERNELS: no kernels 'cuda' here: this kvpool was built without them, or they do not "
        "run on the device that MLX uses");
  }
  if (!forced.empty()) kernels::table_named(forced);  // Refused here, not when an op runs.
  return std::make_shared<NativeBackend>(std::move(buffers));
}

}  // namespace kvpool::detail
