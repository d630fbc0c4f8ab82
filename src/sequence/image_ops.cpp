#include <mlx/allocator.h>
#include <mlx/backend/cpu/encoder.h>
#include <mlx/ops.h>

#include <cstring>
#include <memory>

#include "backend/native.h"
#include "sequence/image_layout.h"
#include "storage/cpu_op.h"

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

/// A block as addresses in memory; holds it until this is gone.
struct ImageWork {
  LayerFormat format;
  std::vector<TokenBlock> blocks;

  template <typename Copy>
  void each_stretch(int role, Copy copy) const {
    std::size_t at = 0;
    for (const TokenBlock& block : blocks) {
      const Stretch stretch = stretch_of(format, block, role);
      std::byte* address = native(block.bytes[role]).address();
      for (int head = 0; head < format.n_kv_heads; ++head) {
        copy(address, at, stretch.in_image);
        address += stretch.in_memory;
        at += stretch.in_image;
      }
    }
  }
};

class ImageOp : public CpuOp {
 public:
  ImageOp(mx::Stream stream, std::shared_ptr<const ImageWork> work)
      : CpuOp(stream), work_(std::move(work)) {}

 protected:
  const std::shared_ptr<const ImageWork> work_;
};

class ReadImage final : public ImageOp {
 public:
  using ImageOp::ImageOp;
  const char* name() const override { return "kvpool::ReadImage"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.set_input_array(inputs[0]);
    std::byte* out[2];
    for (std::size_t role = 0; role < 2; ++role) {
      outputs[role].set_data(mx::allocator::malloc(outputs[role].nbytes()));
      encoder.set_output_array(outputs[role]);
      out[role] = outputs[role].data<std::byte>();
    }
    encoder.dispatch([work = work_, keys = out[0], values = out[1]] {
      for (const int role : {0, 1}) {
        std::byte* image = role == 0 ? keys : values;
        work->each_stretch(role, [image](const std::byte* block, std::size_t at, std::size_t n) {
          std::memcpy(image + at, block, n);
        });
      }
    });
  }
};

class WriteImage final : public ImageOp {
 public:
  using ImageOp::ImageOp;
  const char* name() const override { return "kvpool::WriteImage"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    outputs[0].copy_shared_buffer(inputs[0]);
    for (const mx::array& input : inputs) encoder.set_input_array(input);
    encoder.set_output_array(outputs[0]);
    encoder.dispatch([work = work_, keys = inputs[1].data<std::byte>(),
                      values = inputs[2].data<std::byte>()] {
      for (const int role : {0, 1}) {
        const std::byte* image = role == 0 ? keys : values;
        work->each_stretch(role, [image](std::byte* block, std::size_t at, std::size_t n) {
          std::memcpy(block, image + at, n);
        });
      }
    });
  }
};

}  // namespace

NativeBackend::KeysAndValues NativeBackend::read_image(const LayerFormat& format,
                                                       std::vector<TokenBlock> blocks) {
  const auto shape = [&](int role) {
    return mx::Shape{static_cast<mx::ShapeElem>(image_bytes(format, blocks, role))};
  };
  const mx::Shape shapes[] = {shape(0), shape(1)};
  auto work = std::make_shared<ImageWork>(ImageWork{format, std::move(blocks)});
  auto outputs = mx::array::make_arrays({shapes[0], shapes[1]}, {mx::uint8, mx::uint8},
                                        std::make_shared<ReadImage>(cpu_stream(), std::move(work)),
                                        {pending()});
  return {outputs[0], outputs[1]};
}

void NativeBackend::write_image(const LayerFormat& format, std::span<const TokenBlock> blocks,
                                const mx::array& keys, const mx::array& values) {
  const mx::Stream stream = cpu_stream();
  auto work = std::make_shared<ImageWork>(ImageWork{format, {blocks.begin(), blocks.end()}});
  const mx::array k = mx::contiguous(keys, false, stream);
  const mx::array v = mx::contiguous(values, false, stream);
  extend_chain([&](const mx::array& latest) {
    return mx::array(latest.shape(), mx::uint8,
                     std::make_shared<WriteImage>(stream, std::move(work)), {latest, k, v});
  });
}

}  // namespace kvpool::detail
