#include <mlx/fast.h>
#include <mlx/ops.h>

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <stdexcept>

#include "backend/cuda/append_work.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_op.h"
#include "util/concat.h"

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

cuda::Element element_of(mx::Dtype dtype) {
  if (dtype == mx::float32) return cuda::Element::kFp32;
  return dtype == mx::float16 ? cuda::Element::kFp16 : cuda::Element::kBf16;
}

cuda::Element raw_element(const LayerFormat& format) {
  const codec::Code code = format.raw[0].format.code;
  if (code == codec::Code::kFp32) return cuda::Element::kFp32;
  return code == codec::Code::kFp16 ? cuda::Element::kFp16 : cuda::Element::kBf16;
}

/// Where in the scratch memory things lie, in bytes.
struct ScratchPlan {
  std::size_t sequences, costs, positions, queries, sealed_queries, biases, partials, total;
};

struct AttendWork {
  DeviceFormat device;
  std::shared_ptr<const AppendWork> append;  ///< What comes before it; null: nothing that it does.
  TableUpdates updates;
  std::vector<cuda::SequenceEntry> sequences;
  std::vector<std::int32_t> cost_before;
  std::vector<std::int64_t> query_positions;
  cuda::AttendParams params{};
  cuda::BlockEntry* blocks = nullptr;
  std::byte* scratch = nullptr;
  void* workspace = nullptr;
  ScratchPlan plan{};
  bool decode = false;  ///< The fast kernel can do it.
  /// Sealed keys, or values, are in a space of their own, and there are some.
  bool key_space = false;
  bool value_space = false;
  bool has_mask = false;
  bool has_sinks = false;
};

ScratchPlan plan_of(const AttendWork& work) {
  const cuda::AttendParams& p = work.params;
  ScratchPlan plan{};
  std::size_t end = 0;
  const auto place = [&end](std::size_t bytes) {
    const std::size_t start = end;
    end += (bytes + 255) / 256 * 256;
    return start;
  };
  const auto n_sequences = static_cast<std::size_t>(p.n_sequences);
  plan.sequences = place(n_sequences * sizeof(cuda::SequenceEntry));
  plan.costs = place((n_sequences + 1) * sizeof(std::int32_t));
  plan.positions = place(n_sequences * sizeof(std::int64_t));
  if (work.decode) {
    const std::size_t n_rows = n_sequences * static_cast<std::size_t>(p.n_heads);
    const std::size_t bytes = n_rows * static_cast<std::size_t>(p.head_dim) * sizeof(float);
    plan.queries = place(bytes);
    plan.sealed_queries = place(work.key_space ? bytes : 0);
    plan.biases = place(work.key_space ? n_rows * sizeof(float) : 0);
  }
  if (!work.decode && p.n_splits > 1) {
    plan.partials = place(cuda::partial_floats(p) * sizeof(float));
  }
  plan.total = end;
  return plan;
}

/// Inputs: the link, queries, memory for the result, the mask and the sinks if there are any, the
/// append's keys and values likewise, then what must only come before it.
class AttendOp final : public CudaOp {
 public:
  AttendOp(mx::Stream stream, std::shared_ptr<const AttendWork> work)
      : CudaOp(stream), work_(std::move(work)) {}
  const char* name() const override { return "kvpool::Attend"; }
  InputGroups given() const override {
    InputGroups groups{{1}};
    for (std::size_t i = kFirstOption; i < keys_at(); ++i) groups[0].push_back(i);
    if (work_->append != nullptr) groups.push_back({keys_at(), keys_at() + 1});
    return groups;
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::array& queries = inputs[1];
    mx::array& out = outputs[1];
    out.copy_shared_buffer(inputs[2], out.strides(), {true, true, false}, out.size());
    KernelQueue kernels = extend(inputs, outputs);
    prepare(kernels, inputs);
    if (out.size() == 0) return;
    if (work_->decode) {
      decode(kernels, queries, out);
    } else {
      attend(kernels, inputs, out);
    }
  }

 private:
  static constexpr std::size_t kFirstOption = 3;

  /// Where the append's keys are, if it has one.
  std::size_t keys_at() const {
    return kFirstOption + (work_->has_mask ? 1 : 0) + (work_->has_sinks ? 1 : 0);
  }

  template <typename T>
  T* scratch(std::size_t offset) const {
    return reinterpret_cast<T*>(work_->scratch + offset);
  }

  /// Whether the decode kernel has queries in fp32, from prepare().
  bool takes_copy(const mx::array& queries) const {
    return work_->decode && (work_->key_space || !queries.flags().row_contiguous);
  }

  /// Rows, tables, and queries for the decode kernel.
  void prepare(KernelQueue& kernels, const std::vector<mx::array>& inputs) const {
    const AttendWork& w = *work_;
    const std::size_t n_rows =
        w.append != nullptr && w.append->claim() ? w.append->writes.size() : 0;
    const auto fits = [&]<class Sizes>(Sizes) {
      return w.decode && w.updates.grown_places.size() <= Sizes::kGrown &&
             w.updates.entries.size() <= Sizes::kEntries &&
             w.sequences.size() <= Sizes::kSequences && n_rows <= Sizes::kRows;
    };
    if (fits(cuda::OneStep())) {
      send<cuda::OneStep>(kernels, inputs, n_rows);
    } else if (fits(cuda::Step())) {
      send<cuda::Step>(kernels, inputs, n_rows);
    } else if (fits(cuda::BatchStep())) {
      send<cuda::BatchStep>(kernels, inputs, n_rows);
    } else {
      send<cuda::Tables>(kernels, inputs, n_rows);
    }
  }

  template <class Sizes>
  void send(KernelQueue& kernels, const std::vector<mx::array>& inputs, std::size_t n_rows) const {
    const AttendWork& w = *work_;
    const mx::array& queries = inputs[1];
    cuda::PrepareParams<Sizes> p{};
    p.n_kv_heads = w.params.n_kv_heads;
    p.to_blocks = w.blocks;
    p.to_sequences = scratch<cuda::SequenceEntry>(w.plan.sequences);
    p.to_cost_before = scratch<std::int32_t>(w.plan.costs);
    if (!w.decode) p.to_query_positions = scratch<std::int64_t>(w.plan.positions);
    if (takes_copy(queries)) {
      p.queries = device_address(queries);
      p.query_type = w.params.type;
      p.n_rows = w.params.n_sequences * w.params.n_heads;
      p.n_heads = w.params.n_heads;
      p.head_dim = w.params.head_dim;
      p.query_strides[0] = queries.strides(0);
      p.query_strides[1] = queries.strides(1);
      p.query_strides[2] = queries.strides(3);
      p.to_queries = scratch<float>(w.plan.queries);
      if (w.key_space) {
        p.to_sealed = scratch<float>(w.plan.sealed_queries);
        p.to_bias = scratch<float>(w.plan.biases);
        p.sealed_keys = w.device.sealed[0];
        p.scale = w.params.scale;
      }
    }
    const std::size_t keys = keys_at();
    for (std::size_t role = 0; n_rows > 0 && role < 2; ++role) {
      p.layouts[role] = w.append->layout(static_cast<int>(role), inputs[keys + role]);
    }
    // How many of `all` are left after `done`, as many as a launch takes.
    const auto next = [](std::size_t all, std::size_t done, int most) {
      return std::min(all - done, static_cast<std::size_t>(most));
    };
    const TableUpdates& u = w.updates;
    std::size_t grown = 0;
    std::size_t entry = 0;
    std::size_t sequence = 0;
    std::size_t row = 0;
    while (grown < u.grown_places.size() || entry < u.entries.size() ||
           sequence < w.sequences.size() || row < n_rows) {
      const std::size_t n_grown = next(u.grown_places.size(), grown, Sizes::kGrown);
      const std::size_t n_entries = next(u.entries.size(), entry, Sizes::kEntries);
      const std::size_t n_sequences = next(w.sequences.size(), sequence, Sizes::kSequences);
      const std::size_t n_new_rows = next(n_rows, row, Sizes::kRows);
      std::copy_n(u.grown_places.data() + grown, n_grown, p.grown_places);
      std::copy_n(u.grown_ends.data() + grown, n_grown, p.grown_ends);
      std::copy_n(u.entries.data() + entry, n_entries, p.entries);
      std::copy_n(u.places.data() + entry, n_entries, p.places);
      std::copy_n(w.sequences.data() + sequence, n_sequences, p.sequences);
      if (!w.decode) {
        std::copy_n(w.query_positions.data() + sequence, n_sequences, p.query_positions);
      }
      if (n_sequences > 0) {
        std::copy_n(w.cost_before.data() + sequence, n_sequences + 1, p.cost_before);
      }
      for (std::size_t i = 0; i < n_new_rows; ++i) {
        p.rows[i] = w.append->new_rows(w.append->writes[row + i], inputs[keys], inputs[keys + 1]);
      }
      p.n_grown = static_cast<std::int32_t>(n_grown);
      p.n_entries = static_cast<std::int32_t>(n_entries);
      p.n_sequences = static_cast<std::int32_t>(n_sequences);
      p.first_sequence = static_cast<std::int32_t>(sequence);
      p.n_new_rows = static_cast<std::int32_t>(n_new_rows);
      kernels.run(cuda::prepare_tables<Sizes>(p));
      p.queries = nullptr;
      grown += n_grown;
      entry += n_entries;
      sequence += n_sequences;
      row += n_new_rows;
    }
  }

  void decode(KernelQueue& kernels, const mx::array& queries, const mx::array& out) const {
    const AttendWork& w = *work_;
    cuda::DecodeParams p{};
    p.blocks = w.blocks;
    p.sequences = scratch<const cuda::SequenceEntry>(w.plan.sequences);
    p.cost_before = scratch<const std::int32_t>(w.plan.costs);
    p.workspace = w.workspace;
    p.scale = w.params.scale;
    p.n_sequences = w.params.n_sequences;
    p.queries = device_address(queries);
    p.query_type = p.out_type = w.params.type;
    p.out = device_address(out);
    if (takes_copy(queries)) {
      p.queries = scratch<const float>(w.plan.queries);
      p.query_type = cuda::Element::kFp32;
    }
    if (w.device.geometry.sealed == cuda::Sealed::kVector) {
      const cuda::Quantizer& keys = w.device.sealed[0].quantizer;
      const cuda::Quantizer& values = w.device.sealed[1].quantizer;
      p.key_codebook = keys.centroids;
      p.key_scale = keys.scales;
      p.value_codebook = values.centroids;
      p.value_scale = values.scales;
      p.codebook_per_head = 1;
      if (w.key_space) p.sealed_bias = scratch<const float>(w.plan.biases);
      if (w.value_space) {
        p.value_smooth = values.smooth;
        p.value_mean = values.mean;
        // Where nothing is rotated, the one or the other.
        p.value_hadamard = reinterpret_cast<const std::uint8_t*>(values.turns);
      }
    } else {
      p.turned_values = w.value_space ? 1 : 0;
    }
    if (w.key_space) p.sealed_queries = scratch<const float>(w.plan.sealed_queries);
    cuda::DecodeLaunch launch;
    if (const cudaError_t error = cuda::prepare(w.device.geometry, p, n_processors(), &launch);
        error != cudaSuccess) {
      throw std::runtime_error(
          concat("[attend] the CUDA kernel cannot be launched: ", cudaGetErrorString(error)));
    }
    kernels.run(launch);
  }

  void attend(KernelQueue& kernels, const std::vector<mx::array>& inputs,
              const mx::array& out) const {
    const AttendWork& w = *work_;
    cuda::AttendParams p = w.params;
    p.blocks = w.blocks;
    p.sequences = scratch<const cuda::SequenceEntry>(w.plan.sequences);
    p.query_positions = scratch<const std::int64_t>(w.plan.positions);
    p.queries = device_address(inputs[1]);
    p.out = device_address(out);
    std::size_t next = kFirstOption;
    if (w.has_mask) p.mask = device_address(inputs[next++]);
    if (w.has_sinks) p.sinks = reinterpret_cast<const float*>(device_address(inputs[next++]));
    p.partials = scratch<float>(w.plan.partials);
    kernels.run(cuda::attend(p));
    if (p.n_splits > 1) kernels.run(cuda::merge(p));
  }

  const std::shared_ptr<const AttendWork> work_;
};

/// Whether a row's one query sees all its tokens.
bool sees_all(const AttendRow& row, const Visibility& visibility) {
  const std::int64_t length = row.sequence->length();
  return (!visibility.causal || row.query_position >= length - 1) &&
         (visibility.window == 0 || visibility.window > row.query_position);
}

/// Whether to unpack a layer's rows for MLX's fused attention, which is faster than our own for
/// many queries. It takes equal lengths, no more than a causal mask, and these dims.
bool fits_fused_prefill(const LayerFormat& format, std::span<const AttendRow> rows,
                        const mx::array& queries, const Visibility& visibility) {
  constexpr int kLeastQueries = 16;
  const int dim = format.raw[0].head_dim;
  const mx::Dtype dtype = queries.dtype();
  return queries.shape(2) >= kLeastQueries && (dim == 64 || dim == 128) &&
         format.raw[1].head_dim == dim && element_of(dtype) == raw_element(format) &&
         dtype != mx::float32 && !visibility.mask && !visibility.sinks &&
         visibility.soft_cap == 0.0F && visibility.window == 0 &&
         std::all_of(rows.begin(), rows.end(), [&](const AttendRow& row) {
           return row.sequence->length() == rows[0].sequence->length() &&
                  row.query_position + queries.shape(2) == row.sequence->length();
         });
}

}  // namespace

void CudaBackend::update_tables(std::span<const AttendRow> rows, TableUpdates& updates,
                                std::vector<const BlockTable*>& tables) {
  constexpr std::int32_t kFirstEntries = 1 << 12;
  const auto make_arena = [this](std::int32_t n_entries) {
    return std::make_shared<TableArena>(
        n_entries,
        OpMemory(changes_, static_cast<std::size_t>(n_entries) * sizeof(cuda::BlockEntry)));
  };
  if (arena_ == nullptr) arena_ = make_arena(kFirstEntries);
  for (std::size_t i = 0; i < rows.size();) {
    std::shared_ptr<void>& attachment = rows[i].sequence->attachment();
    if (attachment == nullptr) attachment = std::make_shared<BlockTable>();
    auto* const table = static_cast<BlockTable*>(attachment.get());
    if (table->update(*rows[i].sequence, arena_, updates)) {
      tables.push_back(table);
      ++i;
      continue;
    }
    // A larger arena, for all rows anew; other caches' rows follow when they attend.
    arena_ = make_arena(2 * arena_->n_entries());
    updates = {};
    tables.clear();
    i = 0;
  }
}

std::byte* CudaBackend::scratch(std::size_t bytes) {
  if (!scratch_ || scratch_->size() < bytes) {
    scratch_ = OpMemory(changes_, std::bit_ceil(std::max<std::size_t>(bytes, 1 << 16)));
  }
  return scratch_->address();
}

mx::array CudaBackend::result_memory(std::size_t bytes) {
  constexpr std::size_t kLargest = std::size_t{1} << 20;
  constexpr std::size_t kMost = 256;
  const auto make = [&] {
    return mx::zeros({static_cast<mx::ShapeElem>(bytes)}, mx::uint8, gpu_stream());
  };
  if (bytes == 0 || bytes > kLargest) return make();
  std::vector<mx::array>& memories = results_[bytes];
  const auto free = std::find_if(memories.begin(), memories.end(), [](const mx::array& memory) {
    return memory.data_shared_ptr() != nullptr && memory.is_donatable();
  });
  if (free != memories.end()) {
    std::rotate(memories.begin(), free + 1, memories.end());  // The next is likely free, too.
    return memories.back();
  }
  if (memories.size() >= kMost) return make();
  return memories.emplace_back(make());
}

void* CudaBackend::decode_workspace(const cuda::Geometry& g, int n_sequences) {
  const std::size_t bytes = cuda::workspace_bytes(
      g, static_cast<int>(std::bit_ceil(static_cast<unsigned>(n_sequences))), n_processors());
  const std::array<int, 9> key{g.n_heads,
                               g.n_kv_heads,
                               g.head_dim,
                               g.block_size,
                               g.group_size,
                               g.key_sub,
                               g.value_sub,
                               static_cast<int>(g.sealed),
                               static_cast<int>(g.raw)};
  auto found = workspaces_.find(key);
  if (found == workspaces_.end() || found->second.size() < bytes) {
    found = workspaces_.insert_or_assign(key, OpMemory(changes_, bytes)).first;
  }
  return found->second.address();
}

mx::array CudaBackend::attend(const LayerFormat& format, std::span<const AttendRow> rows,
                              const mx::array& queries, float scale, const Visibility& visibility) {
  const mx::Stream stream = gpu_stream();
  if (fits_fused_prefill(format, rows, queries, visibility)) {
    std::vector<RowBlocks> blocks;
    for (const AttendRow& row : rows) {
      blocks.push_back({row.sequence->snapshot(), 0, row.sequence->length()});
    }
    const auto [keys, values] = gather(format, std::move(blocks), queries.dtype());
    return mx::fast::scaled_dot_product_attention(
        queries, keys, values, scale, visibility.causal ? "causal" : "", {}, {}, false, stream);
  }
  auto work = std::make_shared<AttendWork>();
  work->device = device_format(format);
  cuda::Geometry& geometry = work->device.geometry;
  geometry.n_heads = queries.shape(1);

  cuda::AttendParams& p = work->params;
  p.type = element_of(queries.dtype());
  for (int role = 0; role < 2; ++role) {
    p.raw[role] = work->device.raw[role];
    p.sealed[role] = work->device.sealed[role];
    p.raw_bytes[role] = static_cast<std::uint32_t>(codec::part_bytes(format.raw[role]));
    p.sealed_bytes[role] = static_cast<std::uint32_t>(codec::part_bytes(format.sealed[role]));
  }
  p.n_sequences = static_cast<std::int32_t>(rows.size());
  p.n_heads = queries.shape(1);
  p.n_kv_heads = format.n_kv_heads;
  p.n_queries = queries.shape(2);
  p.head_dim = format.raw[0].head_dim;
  p.value_dim = format.raw[1].head_dim;
  p.scale = scale;
  p.soft_cap = visibility.soft_cap;
  p.causal = visibility.causal;
  p.window = visibility.window;

  std::vector<const BlockTable*> tables;
  update_tables(rows, work->updates, tables);
  int most_blocks = 0;
  work->cost_before.push_back(0);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const BlockTable& table = *tables[i];
    work->sequences.push_back(table.entry());
    work->query_positions.push_back(rows[i].query_position);
    work->cost_before.push_back(work->cost_before.back() +
                                cuda::cost(geometry, table.n_raw(), table.n_sealed()));
    work->key_space |= table.n_sealed() > 0 && p.sealed[0].has_space();
    work->value_space |= table.n_sealed() > 0 && p.sealed[1].has_space();
    most_blocks = std::max(most_blocks, table.n_raw() + table.n_sealed());
  }
  work->decode = work->device.decodes && p.n_queries == 1 && !visibility.mask &&
                 !visibility.sinks && visibility.soft_cap == 0.0F &&
                 std::all_of(rows.begin(), rows.end(),
                             [&](const AttendRow& row) { return sees_all(row, visibility); });
  p.n_splits = cuda::attend_splits(p, most_blocks, n_processors());
  work->plan = plan_of(*work);

  work->blocks = arena_->entries();
  work->scratch = scratch(work->plan.total);
  if (work->decode) work->workspace = decode_workspace(geometry, p.n_sequences);
  mx::Shape out_shape = queries.shape();
  out_shape[3] = p.value_dim;
  std::size_t out_elements = 1;
  for (const mx::ShapeElem extent : out_shape) out_elements *= static_cast<std::size_t>(extent);
  std::vector<mx::array> inputs{latest_link(),
                                work->decode ? queries : mx::contiguous(queries, false, stream),
                                result_memory(out_elements * mx::size_of(queries.dtype()))};
  if (visibility.mask) {
    attention::Mask mask;
    inputs.push_back(
        laid_out(*visibility.mask, rows.empty() ? 0 : rows[0].sequence->length(), mask, stream));
    std::copy_n(mask.strides.begin(), 4, p.mask_strides);
    p.mask_is_bool = mask.kind == attention::Mask::Kind::kBool;
    work->has_mask = true;
  }
  if (visibility.sinks) {
    inputs.push_back(
        mx::contiguous(mx::astype(*visibility.sinks, mx::float32, stream), false, stream));
    work->has_sinks = true;
  }

  mx::array out = queries;
  const std::vector<mx::array> changes = take_changes();
  extend_chain([&](const mx::array& latest) {
    inputs.front() = latest;
    if (last_append_ && last_append_->stream == stream) {
      inputs.front() = last_append_->inputs.front();
      inputs.insert(inputs.end(), last_append_->inputs.begin() + 1, last_append_->inputs.end());
      work->append = last_append_->work;
    }
    inputs.insert(inputs.end(), changes.begin(), changes.end());
    auto outputs =
        mx::array::make_arrays({latest.shape(), out_shape}, {mx::uint8, queries.dtype()},
                               std::make_shared<AttendOp>(stream, std::move(work)), inputs);
    out = outputs[1];
    return outputs[0];
  });
  return out;
}

}  // namespace kvpool::detail
