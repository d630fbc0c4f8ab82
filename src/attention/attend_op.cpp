#include <mlx/allocator.h>
#include <mlx/backend/cpu/encoder.h>
#include <mlx/ops.h>

#include <memory>

#include "attention/attention.h"
#include "backend/native.h"
#include "storage/cpu_op.h"

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

attention::DType dtype_of(mx::Dtype dtype) {
  if (dtype == mx::float32) return attention::DType::kFp32;
  return dtype == mx::float16 ? attention::DType::kFp16 : attention::DType::kBf16;
}

/// Arguments with all but the addresses of the arrays.
struct AttendWork {
  LayerFormat format;  ///< Keeps what the views' formats point to.
  attention::Arguments arguments;
  std::vector<std::shared_ptr<const AttendView>> views;
  std::vector<attention::SequenceRef> sequences;
  bool has_mask = false;
  bool has_sinks = false;
};

class AttendOp final : public CpuOp {
 public:
  AttendOp(mx::Stream stream, std::shared_ptr<const AttendWork> work)
      : CpuOp(stream), work_(std::move(work)) {}
  const char* name() const override { return "kvpool::Attend"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    outputs[0].copy_shared_buffer(inputs[0]);
    outputs[1].set_data(mx::allocator::malloc(outputs[1].nbytes()));
    for (const mx::array& input : inputs) encoder.set_input_array(input);
    for (mx::array& output : outputs) encoder.set_output_array(output);

    attention::Arguments arguments = work_->arguments;
    std::size_t next = 1;
    arguments.queries = inputs[next++].data<void>();
    if (work_->has_mask) arguments.mask.data = inputs[next++].data<void>();
    if (work_->has_sinks) arguments.sinks = inputs[next++].data<float>();
    arguments.out = outputs[1].data<void>();
    encoder.dispatch([work = work_, arguments] { attention::attend(arguments); });
  }

 private:
  const std::shared_ptr<const AttendWork> work_;
};

}  // namespace

mx::array NativeBackend::attend(const LayerFormat& format, std::span<const AttendRow> rows,
                                const mx::array& queries, float scale,
                                const Visibility& visibility) {
  const mx::Stream stream = cpu_stream();
  auto work = std::make_shared<AttendWork>();
  work->format = format;
  attention::Arguments& arguments = work->arguments;
  arguments.n_heads = queries.shape(1);
  arguments.n_kv_heads = format.n_kv_heads;
  arguments.head_dim = format.raw[0].head_dim;
  arguments.value_dim = format.raw[1].head_dim;
  arguments.n_queries = queries.shape(2);
  arguments.scale = scale;
  arguments.dtype = dtype_of(queries.dtype());
  arguments.query_strides =
      attention::contiguous(arguments.n_heads, arguments.n_queries, arguments.head_dim);
  arguments.out_strides =
      attention::contiguous(arguments.n_heads, arguments.n_queries, arguments.value_dim);
  arguments.causal = visibility.causal;
  arguments.window = visibility.window;
  arguments.soft_cap = visibility.soft_cap;

  for (const AttendRow& row : rows) {
    work->views.push_back(row.sequence->view(format));
    work->sequences.push_back({work->views.back()->blocks, row.query_position});
  }
  arguments.sequences = work->sequences;

  std::vector<mx::array> inputs{pending(), mx::contiguous(queries, false, stream)};
  if (visibility.mask) {
    const std::int64_t n_keys = rows.empty() ? 0 : rows.front().sequence->length();
    inputs.push_back(laid_out(*visibility.mask, n_keys, arguments.mask, stream));
    work->has_mask = true;
  }
  if (visibility.sinks) {
    inputs.push_back(
        mx::contiguous(mx::astype(*visibility.sinks, mx::float32, stream), false, stream));
    work->has_sinks = true;
  }

  mx::Shape out_shape = queries.shape();
  out_shape[3] = format.raw[1].head_dim;
  mx::array out = queries;
  extend_chain([&](const mx::array& latest) {
    inputs.front() = latest;
    auto outputs =
        mx::array::make_arrays({latest.shape(), out_shape}, {mx::uint8, queries.dtype()},
                               std::make_shared<AttendOp>(stream, std::move(work)), inputs);
    out = outputs[1];
    return outputs[0];
  });
  return out;
}

}  // namespace kvpool::detail
