// What moves tokens in and out of blocks.

#include "backend/ops/blocks.h"

#include <mlx/ops.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "backend/ops/ops_backend.h"
#include "backend/ops/parts.h"

namespace mx = mlx::core;

namespace kvpool::detail {

mx::Dtype dtype_of(const codec::Format& raw) {
  switch (raw.code) {
    case codec::Code::kFp32:
      return mx::float32;
    case codec::Code::kFp16:
      return mx::float16;
    default:
      return mx::bfloat16;
  }
}

namespace {

mx::ShapeElem as_extent(std::int64_t n) { return static_cast<mx::ShapeElem>(n); }
mx::ShapeElem as_extent(std::size_t n) { return static_cast<mx::ShapeElem>(n); }

/// Whole rows of a raw block in 32-bit words.
mx::ShapeElem row_words(const codec::PartGeometry& raw) {
  return as_extent(codec::part_bytes(raw)) / raw.block_size / 4;
}

/// Consecutive blocks of one shelf and format, all full but the last.
struct Run {
  const Shelf* shelf;
  codec::Format format;
  std::int64_t position;
  std::int64_t n_tokens;
  std::vector<std::uint32_t> places;
};

std::vector<Run> runs_of(std::span<const TokenBlock> blocks, int role, int block_size) {
  std::vector<Run> runs;
  for (const TokenBlock& block : blocks) {
    const ShelfBytes& bytes = on_shelf(block.bytes[role]);
    if (runs.empty() || runs.back().shelf != &bytes.shelf() ||
        !(runs.back().format == block.format[role]) || runs.back().n_tokens % block_size != 0) {
      runs.push_back({&bytes.shelf(), block.format[role], block.position, 0, {}});
    }
    runs.back().places.push_back(bytes.place());
    runs.back().n_tokens += block.n_tokens;
  }
  return runs;
}

/// (n_kv_heads, tokens, dim), with those that the last block has room for.
mx::array read(const OpsFormat& format, int role, const Run& run, mx::Dtype dtype, bool turned) {
  codec::PartGeometry part = format.layer.part(role, run.format);
  const int n_heads = format.layer.n_kv_heads;
  const mx::ShapeElem n = as_extent(run.places.size());
  if (part.format.is_raw()) {
    std::vector<std::uint32_t> parts;
    parts.reserve(run.places.size() * static_cast<std::size_t>(n_heads));
    for (int head = 0; head < n_heads; ++head) {
      for (const std::uint32_t place : run.places) {
        parts.push_back(place * static_cast<std::uint32_t>(n_heads) +
                        static_cast<std::uint32_t>(head));
      }
    }
    const mx::array by_head =
        mx::reshape(*run.shelf->version(), {-1, part.block_size * row_words(part)});
    const mx::array words =
        mx::take(by_head, mx::array(parts.begin(), {n_heads, n}, mx::uint32), 0);
    const mx::array rows = mx::view(words, dtype_of(part.format));
    const mx::array typed =
        mx::astype(mx::reshape(rows, {n_heads, n * part.block_size, part.head_dim}), dtype);
    return turned ? hadamard(typed) : typed;
  }
  const bool turn = part.format.hadamard != turned;
  part.format.hadamard = false;
  const mx::array blocks = mx::reshape(run.shelf->read(run.places), {n, n_heads, -1});
  const mx::array stored =
      decode_parts(part, format.vectors[role].get(), mx::swapaxes(blocks, 0, 1));
  const mx::array rows = turn ? hadamard(stored) : stored;
  return mx::astype(mx::reshape(rows, {n_heads, n * part.block_size, part.head_dim}), dtype);
}

void copy(const CopyTask& task) {
  const std::uint32_t from[] = {on_shelf(task.from).place()};
  const std::uint32_t to[] = {on_shelf(task.to).place()};
  on_shelf(task.to).shelf().write(to, on_shelf(task.from).shelf().read(from));
}

/// Full blocks of consecutive tokens of one batch row.
struct FullBlocks {
  Shelf* shelf;
  std::int64_t batch, first_row;
  std::vector<std::uint32_t> places;
};

/// `rows` are (B, n_kv_heads, S, dim).
void write_full(const codec::PartGeometry& raw, const FullBlocks& blocks, const mx::array& rows) {
  const mx::ShapeElem n = as_extent(blocks.places.size());
  const mx::array own = cut(cut(rows, 0, blocks.batch, blocks.batch + 1), 2, blocks.first_row,
                            blocks.first_row + std::int64_t{n} * raw.block_size);
  const mx::array by_head = mx::reshape(own, {rows.shape(1), n, raw.block_size * raw.head_dim});
  const mx::array by_block = mx::reshape(mx::swapaxes(by_head, 0, 1), {n, -1});
  blocks.shelf->write(blocks.places, mx::view(by_block, mx::uint8));
}

void write_some(const codec::PartGeometry& raw, const WriteTask& task, int role,
                const mx::array& rows) {
  const ShelfBytes& to = on_shelf(task.to[role]);
  const mx::array own = cut(cut(rows, 0, task.batch, task.batch + 1), 2, task.first_row,
                            task.first_row + task.n_tokens);
  const mx::array words = mx::view(mx::contiguous(own), mx::uint32);
  const mx::array version = *to.shelf().version();
  const mx::array slots =
      mx::reshape(version, {version.shape(0), rows.shape(1), raw.block_size, row_words(raw)});
  const auto place = as_extent(std::size_t{to.place()});
  const mx::Shape start{place, 0, task.slot, 0};
  const mx::Shape stop{place + 1, rows.shape(1), task.slot + task.n_tokens, row_words(raw)};
  to.shelf().replace(mx::reshape(mx::slice_update(slots, words, start, stop), version.shape()));
}

void write(const codec::PartGeometry& raw, std::span<const WriteTask> tasks, int role,
           const mx::array& rows) {
  FullBlocks full{};
  const auto flush = [&] {
    if (!full.places.empty()) write_full(raw, full, rows);
    full.places.clear();
  };
  for (const WriteTask& task : tasks) {
    const ShelfBytes& to = on_shelf(task.to[role]);
    if (task.n_tokens < raw.block_size) {
      write_some(raw, task, role, rows);
      continue;
    }
    const std::int64_t next =
        full.first_row + static_cast<std::int64_t>(full.places.size()) * raw.block_size;
    if (&to.shelf() != full.shelf || task.batch != full.batch || task.first_row != next) {
      flush();
      full = {&to.shelf(), task.batch, task.first_row, {}};
    }
    full.places.push_back(to.place());
  }
  flush();
}

void seal(const OpsFormat& format, std::span<const SealTask> tasks) {
  struct Places {
    std::vector<std::uint32_t> from, to;
  };
  std::map<std::tuple<const Shelf*, Shelf*, int>, Places> groups;
  for (const SealTask& task : tasks) {
    const ShelfBytes& from = on_shelf(task.from);
    const ShelfBytes& to = on_shelf(task.to);
    Places& places = groups[{&from.shelf(), &to.shelf(), task.role}];
    places.from.push_back(from.place());
    places.to.push_back(to.place());
  }
  for (const auto& [key, places] : groups) {
    const auto& [from, to, role] = key;
    const codec::PartGeometry& raw = format.layer.raw[role];
    const auto n = as_extent(places.to.size());
    const mx::array blocks = mx::view(from->read(places.from), dtype_of(raw.format));
    const mx::array rows = mx::reshape(mx::astype(blocks, mx::float32),
                                       {n, format.layer.n_kv_heads, raw.block_size, raw.head_dim});
    const mx::array parts = encode_parts(format.layer.sealed[role], format.vectors[role].get(),
                                         mx::swapaxes(rows, 0, 1));
    to->write(places.to, mx::reshape(mx::swapaxes(parts, 0, 1), {n, -1}));
  }
}

}  // namespace

mx::array cut(const mx::array& a, int axis, std::int64_t from, std::int64_t to) {
  if (from == 0 && to == a.shape(axis)) return a;
  mx::Shape start(a.ndim(), 0);
  mx::Shape stop = a.shape();
  start[static_cast<std::size_t>(axis)] = as_extent(from);
  stop[static_cast<std::size_t>(axis)] = as_extent(to);
  return mx::slice(a, std::move(start), std::move(stop));
}

mx::array tokens_of(const OpsFormat& format, int role, std::span<const TokenBlock> blocks,
                    std::int64_t from, std::int64_t to, mx::Dtype dtype, bool turned) {
  const auto first = std::partition_point(blocks.begin(), blocks.end(),
                                          [&](const TokenBlock& b) { return b.end() <= from; });
  const auto last = std::partition_point(first, blocks.end(),
                                         [&](const TokenBlock& b) { return b.position < to; });
  std::vector<mx::array> pieces;
  for (const Run& run : runs_of({first, last}, role, format.layer.raw[role].block_size)) {
    const std::int64_t skip = std::max<std::int64_t>(0, from - run.position);
    const std::int64_t end = std::min(run.n_tokens, to - run.position);
    pieces.push_back(cut(read(format, role, run, dtype, turned), 1, skip, end));
  }
  if (pieces.empty()) {
    return mx::zeros({format.layer.n_kv_heads, 0, format.layer.raw[role].head_dim}, dtype);
  }
  return pieces.size() == 1 ? pieces.front() : mx::concatenate(pieces, 1);
}

bool any_turned(std::span<const TokenBlock> blocks, int role) noexcept {
  return std::any_of(blocks.begin(), blocks.end(),
                     [role](const TokenBlock& block) { return block.format[role].hadamard; });
}

void OpsBackend::append(const LayerFormat& format, const AppendTasks& tasks, const mx::array& keys,
                        const mx::array& values) {
  for (const WriteTask& task : tasks.writes) {
    for (const auto& bytes : task.to) on_shelf(bytes).shelf().pack();
  }
  for (const CopyTask& task : tasks.copies) on_shelf(task.to).shelf().fit();
  for (const SealTask& task : tasks.seals) on_shelf(task.to).shelf().fit();
  for (const WriteTask& task : tasks.writes) {
    for (const auto& bytes : task.to) on_shelf(bytes).shelf().fit();
  }
  for (const CopyTask& task : tasks.copies) copy(task);
  write(format.raw[0], tasks.writes, 0, keys);
  write(format.raw[1], tasks.writes, 1, values);
  // After the writes, which are then not held up by who still reads the version before them.
  seal(with_vectors(format), tasks.seals);
}

OpsBackend::KeysAndValues OpsBackend::gather(const LayerFormat& format, std::vector<RowBlocks> rows,
                                             mx::Dtype dtype) {
  const OpsFormat coded = with_vectors(format);
  std::int64_t longest = 0;
  for (const RowBlocks& row : rows) longest = std::max(longest, row.length - row.first);
  const auto stacked = [&](int role) {
    if (rows.empty()) {
      return mx::zeros({0, format.n_kv_heads, 0, format.raw[role].head_dim}, dtype);
    }
    std::vector<mx::array> padded;
    for (const RowBlocks& row : rows) {
      const mx::array tokens = tokens_of(coded, role, *row.blocks, row.first, row.length, dtype);
      const int missing = as_extent(longest) - tokens.shape(1);
      padded.push_back(mx::expand_dims(
          missing == 0 ? tokens : mx::pad(tokens, {{0, 0}, {missing, 0}, {0, 0}}), 0));
    }
    return padded.size() == 1 ? padded.front() : mx::concatenate(padded, 0);
  };
  return {stacked(0), stacked(1)};
}

}  // namespace kvpool::detail
