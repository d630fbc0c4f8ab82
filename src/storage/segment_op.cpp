#include "storage/segment_op.h"

#include <mlx/allocator.h>
#include <mlx/backend/cpu/encoder.h>
#include <mlx/ops.h>

#include <cstring>

#include "kernels/scalar/bit_pack.h"
#include "storage/cpu_op.h"

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

/// What the ops on a segment have in common: the segment comes first, in and out, and its outgoing
/// version shares the incoming one's buffer. A task holds the buffer until it has run, so that a
/// segment given back meanwhile is neither freed nor handed on under it.
class SegmentOp : public CpuOp {
 public:
  SegmentOp(mx::Stream stream, const BlockPlace& place) : CpuOp(stream), place_(place) {}

 protected:
  /// Shares the buffer and gives the address of the block.
  std::uint8_t* open(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs,
                     mx::cpu::CommandEncoder& encoder) const {
    outputs[0].copy_shared_buffer(inputs[0]);
    encoder.set_input_array(inputs[0]);
    encoder.set_output_array(outputs[0]);
    return outputs[0].data<std::uint8_t>() + place_.offset;
  }

  const BlockPlace place_;
};

class ClearBlock final : public SegmentOp {
 public:
  using SegmentOp::SegmentOp;
  const char* name() const override { return "kvpool::ClearBlock"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    std::uint8_t* block = open(inputs, outputs, encoder);
    encoder.dispatch([keep = outputs[0].data_shared_ptr(), block, n = place_.block_bytes()] { std::memset(block, 0, n); });
  }
};

class WriteRows final : public SegmentOp {
 public:
  WriteRows(mx::Stream stream, const BlockPlace& place, std::int64_t first)
      : SegmentOp(stream, place), first_(first) {}
  const char* name() const override { return "kvpool::WriteRows"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    std::uint8_t* block = open(inputs, outputs, encoder);
    encoder.set_input_array(inputs[1]);
    encoder.dispatch([keep = outputs[0].data_shared_ptr(), block, place = place_, first = first_, n = inputs[1].shape(1),
                      rows = inputs[1].data<std::uint8_t>()]() mutable {
      const std::size_t stride = place.row_bytes();
      const std::size_t row_in = place.format.is_code() ? static_cast<std::size_t>(place.width)
                                                        : stride;
      for (std::int64_t head = 0; head < place.n_heads; ++head) {
        std::uint8_t* to =
            block + static_cast<std::size_t>(head * place.block_size + first) * stride;
        if (!place.format.is_code()) {
          std::memcpy(to, rows, static_cast<std::size_t>(n) * stride);
          rows += static_cast<std::size_t>(n) * stride;
          continue;
        }
        for (std::int64_t i = 0; i < n; ++i, to += stride, rows += row_in) {
          kernels::scalar::pack_bits(rows, row_in, place.format.bits, to);
        }
      }
    });
  }

 private:
  const std::int64_t first_;
};

class ReadRows final : public SegmentOp {
 public:
  ReadRows(mx::Stream stream, const BlockPlace& place, std::int64_t n, bool unpack)
      : SegmentOp(stream, place), n_(n), unpack_(unpack) {}
  const char* name() const override { return "kvpool::ReadRows"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const std::uint8_t* block = open(inputs, outputs, encoder);
    outputs[1].set_data(mx::allocator::malloc(outputs[1].nbytes()));
    encoder.set_output_array(outputs[1]);
    encoder.dispatch([keep = outputs[0].data_shared_ptr(), block, place = place_, n = n_, unpack = unpack_,
                      rows = outputs[1].data<std::uint8_t>()]() mutable {
      const std::size_t stride = place.row_bytes();
      for (std::int64_t head = 0; head < place.n_heads; ++head) {
        const std::uint8_t* from = block + static_cast<std::size_t>(head * place.block_size) * stride;
        if (!unpack) {
          std::memcpy(rows, from, static_cast<std::size_t>(n) * stride);
          rows += static_cast<std::size_t>(n) * stride;
          continue;
        }
        for (std::int64_t i = 0; i < n; ++i, from += stride, rows += place.width) {
          kernels::scalar::unpack_bits(from, static_cast<std::size_t>(place.width),
                                       place.format.bits, rows);
        }
      }
    });
  }

 private:
  const std::int64_t n_;
  const bool unpack_;
};

mx::array read(mx::array& segment, const BlockPlace& place, std::int64_t n, std::int64_t width,
               bool unpack, mx::Stream stream) {
  mx::Shape shape{static_cast<mx::ShapeElem>(place.n_heads), static_cast<mx::ShapeElem>(n),
                  static_cast<mx::ShapeElem>(width)};
  auto outputs =
      mx::array::make_arrays({segment.shape(), std::move(shape)}, {mx::uint8, place.format.dtype},
                             std::make_shared<ReadRows>(stream, place, n, unpack), {segment});
  segment = outputs[0];
  return outputs[1];
}

}  // namespace

void clear_block(mx::array& segment, const BlockPlace& place, mx::Stream stream) {
  segment = mx::array(segment.shape(), mx::uint8, std::make_shared<ClearBlock>(stream, place),
                      {segment});
}

void write_rows(mx::array& segment, const BlockPlace& place, std::int64_t first,
                const mx::array& rows, mx::Stream stream) {
  segment = mx::array(segment.shape(), mx::uint8, std::make_shared<WriteRows>(stream, place, first),
                      {segment, mx::contiguous(rows, false, stream)});
}

mx::array read_rows(mx::array& segment, const BlockPlace& place, std::int64_t n,
                    mx::Stream stream) {
  return read(segment, place, n, place.width, place.format.is_code(), stream);
}

mx::array read_packed(mx::array& segment, const BlockPlace& place, mx::Stream stream) {
  const std::int64_t width =
      place.format.is_code() ? place.format.row_bytes(place.width) : place.width;
  return read(segment, place, place.block_size, width, false, stream);
}

}  // namespace kvpool::detail
