#include "kvpool/paged_kv_cache.h"

#include <mlx/ops.h>

#include <algorithm>
#include <stdexcept>

#include "backend/backend.h"
#include "codec/vector_quantizer.h"
#include "kvpool/vecinfer_codebooks.h"
#include "sequence/image_layout.h"
#include "sequence/sequence.h"
#include "storage/cpu_op.h"
#include "util/concat.h"
#include "util/shape_text.h"

namespace mx = mlx::core;

namespace kvpool {

namespace {

std::string message(const auto&... parts) { return detail::concat("PagedKVCache: ", parts...); }

/// A traced array has no value, now or later, and would hold up all that comes after it.
void require_not_traced(const mx::array& array) {
  if (!array.is_tracer()) return;
  throw std::invalid_argument(
      message("a cache cannot be used inside mx.compile, mx.grad, mx.vmap and the like"));
}

codec::Code raw_code(mx::Dtype dtype) {
  switch (dtype) {
    case mx::float32: return codec::Code::kFp32;
    case mx::float16: return codec::Code::kFp16;
    case mx::bfloat16: return codec::Code::kBf16;
    default:
      throw std::invalid_argument(message("keys and values must be float32, float16 or bfloat16"));
  }
}

bool is_vecinfer(const std::string& tag) { return tag.starts_with("vecinfer"); }

codec::Format format_of(const PagedKVCacheConfig& config, const std::string& tag, codec::Role role,
                        codec::Code raw) {
  if (tag == "raw") return {raw};
  codec::Format format{codec::code_of(tag), static_cast<std::uint8_t>(config.group_size)};
  if (format.is_raw()) {
    throw std::invalid_argument(
        message("format must be raw (the model's own type), int8, int4, int2, kivi4, kivi2 or "
                "vecinfer1 to vecinfer4, got '",
                tag, "'"));
  }
  const bool by_channel = format.code > codec::Code::kInt2 && role == codec::Role::kKeys;
  format.hadamard = config.hadamard && !by_channel && !format.is_vector();
  return format;
}

/// The blocks of an image, without bytes.
detail::BlockList described_blocks(const detail::LayerFormat& format, const PagedRowImage& image) {
  const std::int64_t block_size = format.raw[0].block_size;
  if (image.block_size != block_size) {
    throw std::invalid_argument(message("the image has blocks of ", image.block_size,
                                        " tokens, the pool of ", block_size));
  }
  if (image.blocks.size() % 4 != 0) {
    throw std::invalid_argument(message("blocks must be four numbers each"));
  }
  std::vector<detail::SavedBlock> saved;
  for (std::size_t i = 0; i < image.blocks.size(); i += 4) {
    saved.push_back({image.blocks[i], image.blocks[i + 1],
                     {image.blocks[i + 2] != 0, image.blocks[i + 3] != 0}});
  }
  detail::BlockList blocks = detail::described_blocks(format, saved);
  for (int role = 0; role < 2; ++role) {
    const mx::array& bytes = role == 0 ? image.keys : image.values;
    const std::size_t needed = detail::image_bytes(format, blocks, role);
    if (bytes.dtype() != mx::uint8 || bytes.ndim() != 1 || bytes.size() != needed) {
      throw std::invalid_argument(message(role == 0 ? "keys" : "values",
                                          " of the image must be a uint8 vector of ", needed,
                                          " bytes, got shape ", detail::shape_text(bytes.shape()),
                                          " of elements of ", bytes.itemsize(), " bytes"));
    }
  }
  return blocks;
}

void require_codebooks(const PagedKVCacheConfig& config, const std::string& tag) {
  if (config.codebooks == nullptr) {
    throw std::invalid_argument(message(
        tag, " needs codebooks made for the model; `kvpool calibrate` makes them"));
  }
  if (config.codebooks->format() != tag) {
    throw std::invalid_argument(
        message(tag, " needs codebooks of that format, got ", config.codebooks->format()));
  }
  if (config.layer < 0 || config.layer >= config.codebooks->n_layers()) {
    throw std::invalid_argument(message("layer must be 0 to ", config.codebooks->n_layers() - 1,
                                        " with these codebooks, got ", config.layer));
  }
}

}  // namespace

PagedKVCache::PagedKVCache(std::shared_ptr<PagedStorage> storage, PagedKVCacheConfig config,
                           std::span<const Owner> owners)
    : storage_(std::move(storage)), config_(std::move(config)) {
  if (storage_ == nullptr) throw std::invalid_argument(message("storage must not be null"));
  memory_ = storage_->backend()->memory_for_cache();
  format_of(config_, config_.key_format, codec::Role::kKeys, codec::Code::kFp16);
  format_of(config_, config_.value_format, codec::Role::kValues, codec::Code::kFp16);
  for (const std::string* tag : {&config_.key_format, &config_.value_format}) {
    if (is_vecinfer(*tag)) require_codebooks(config_, *tag);
  }
  if (config_.group_size != 32 && config_.group_size != 64) {
    throw std::invalid_argument(message("group_size must be 32 or 64, got ", config_.group_size));
  }
  for (const auto& [name, value] : {std::pair{"window", config_.window},
                                    std::pair{"sink", config_.sink},
                                    std::pair{"sliding_window", config_.sliding_window}}) {
    if (value < 0) throw std::invalid_argument(message(name, " must be >= 0, got ", value));
  }
  for (const Owner owner : owners) {
    rows_.push_back(std::make_unique<detail::Sequence>(storage_->pool(), memory_, owner));
  }
}

PagedKVCache::~PagedKVCache() = default;

std::unique_ptr<detail::LayerFormat> PagedKVCache::make_format(std::int64_t n_kv_heads,
                                                               std::int64_t key_dim,
                                                               std::int64_t value_dim,
                                                               mx::Dtype dtype) const {
  auto format = std::make_unique<detail::LayerFormat>();
  const codec::Code raw = raw_code(dtype);
  const auto block_size =
      static_cast<int>(std::min<std::int64_t>(storage_->pool()->config().block_size, 1 << 20));
  const std::int64_t dims[] = {key_dim, value_dim};
  const std::string* tags[] = {&config_.key_format, &config_.value_format};
  for (int role = 0; role < 2; ++role) {
    const auto kind = role == 0 ? codec::Role::kKeys : codec::Role::kValues;
    const auto head_dim = static_cast<int>(std::min<std::int64_t>(dims[role], 1 << 20));
    format->raw[role] = {{raw}, kind, block_size, head_dim};
    format->sealed[role] = {format_of(config_, *tags[role], kind, raw), kind, block_size, head_dim};
    if (is_vecinfer(*tags[role])) {
      const VecInferCodebooks& books = *config_.codebooks;
      if (books.n_kv_heads() != n_kv_heads || books.head_dim() != dims[role]) {
        throw std::invalid_argument(message("the codebooks are for ", books.n_kv_heads(),
                                            " KV heads of ", books.head_dim(), " channels, got ",
                                            n_kv_heads, " of ", dims[role]));
      }
      const VecInferLayer& layer = books.layer(config_.layer);
      format->quantizers[role] = role == 0 ? layer.keys : layer.values;
      codec::Format& sealed = format->sealed[role].format;
      sealed.quantizer = format->quantizers[role].get();
      // A layer may have another code than the format's own.
      const codec::VectorCode code = sealed.quantizer->codebooks[0]->code();
      if (code != codec::vector_code(sealed.code, kind)) sealed.code = codec::code_of(code);
    }
    codec::validate(format->raw[role]);
    codec::validate(format->sealed[role]);
  }
  if (n_kv_heads < 1 || n_kv_heads > 1 << 20) {
    throw std::invalid_argument(message("n_kv_heads must be 1 to ", 1 << 20, ", got ", n_kv_heads));
  }
  format->n_kv_heads = static_cast<int>(n_kv_heads);
  format->window = config_.window;
  format->sink = config_.sink;
  format->sliding = config_.sliding_window;
  return format;
}

void PagedKVCache::require_row(std::int64_t row) const {
  if (row >= 0 && row < n_rows()) return;
  throw std::invalid_argument(message("row must be 0 to ", n_rows() - 1, ", got ", row));
}

void PagedKVCache::require_encodable(const detail::LayerFormat& format, int role,
                                     const mx::array& rows, std::span<const std::int64_t> first,
                                     std::span<const std::int64_t> count) const {
  const codec::PartGeometry& sealed = format.sealed[role];
  if (sealed.format.is_raw()) return;
  const mx::Stream stream = detail::cpu_stream();
  mx::array plain = mx::contiguous(mx::astype(rows, mx::float32, stream), false, stream);
  plain.eval();
  const std::int64_t n_columns = plain.shape(2);
  const float* next = plain.data<float>();
  for (std::int64_t row = 0; row < n_rows(); ++row) {
    const auto i = static_cast<std::size_t>(row);
    const std::int64_t from = first.empty() ? 0 : first[i];
    const std::int64_t to = first.empty() ? n_columns : from + count[i];
    for (std::int64_t head = 0; head < format.n_kv_heads; ++head) {
      for (std::int64_t column = 0; column < n_columns; ++column, next += sealed.head_dim) {
        if (column < from || column >= to || codec::encodable(sealed, next)) continue;
        throw std::invalid_argument(message(
            role == 0 ? "keys" : "values", " of row ", row, ", column ", column, ", head ", head,
            " must be finite and within fp16: ", codec::name(sealed.format.code),
            " cannot store them"));
      }
    }
  }
}

void PagedKVCache::append(const mx::array& keys, const mx::array& values,
                          std::span<const std::int64_t> first,
                          std::span<const std::int64_t> count) {
  if (keys.ndim() != 4 || values.ndim() != 4 || keys.shape(0) != n_rows() ||
      values.shape(0) != keys.shape(0) || values.shape(1) != keys.shape(1) ||
      values.shape(2) != keys.shape(2)) {
    throw std::invalid_argument(message(
        "keys and values must be (", n_rows(),
        ", n_kv_heads, S, head_dim) with equal heads and S, got ",
        detail::shape_text(keys.shape()), " and ", detail::shape_text(values.shape())));
  }
  require_not_traced(keys);
  require_not_traced(values);
  const std::int64_t n_columns = keys.shape(2);
  if (first.size() != count.size() || (!first.empty() && first.size() != rows_.size())) {
    throw std::invalid_argument(message("first and count must name a number for each row"));
  }
  for (std::size_t i = 0; i < first.size(); ++i) {
    if (first[i] < 0 || count[i] < 0 || first[i] > n_columns || count[i] > n_columns - first[i]) {
      throw std::invalid_argument(message(count[i], " columns from ", first[i],
                                          " on are not within the ", n_columns, " given"));
    }
  }
  std::unique_ptr<detail::LayerFormat> first_format;
  if (format_ == nullptr) {
    first_format = make_format(keys.shape(1), keys.shape(3), values.shape(3), keys.dtype());
  } else if (keys.shape(1) != format_->n_kv_heads || keys.shape(3) != format_->raw[0].head_dim ||
             values.shape(3) != format_->raw[1].head_dim) {
    throw std::invalid_argument(message(
        "the cache holds ", format_->n_kv_heads, " heads with head dims ",
        format_->raw[0].head_dim, " and ", format_->raw[1].head_dim, ", got ",
        detail::shape_text(keys.shape()), " and ", detail::shape_text(values.shape())));
  }

  const detail::LayerFormat& format = format_ != nullptr ? *format_ : *first_format;
  const mx::Dtype dtype = dtype_.value_or(keys.dtype());
  if (config_.check_finite) {
    require_encodable(format, 0, mx::astype(keys, dtype), first, count);
    require_encodable(format, 1, mx::astype(values, dtype), first, count);
  }
  detail::AppendTasks tasks;
  std::vector<detail::Sequence::Plan> plans;
  plans.reserve(rows_.size());
  std::vector<std::int64_t> positions(rows_.size());
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (!rows_[i]->held()) rows_[i]->clear();
    const std::int64_t from = first.empty() ? 0 : first[i];
    const std::int64_t n = first.empty() ? n_columns : count[i];
    positions[i] = rows_[i]->length() - from;
    plans.push_back(rows_[i]->plan_append(format, static_cast<std::int64_t>(i), from, n, tasks));
  }
  storage_->backend()->append(format, tasks, mx::astype(keys, dtype), mx::astype(values, dtype));
  if (first_format != nullptr) format_ = std::move(first_format);
  dtype_ = dtype;
  for (detail::Sequence::Plan& plan : plans) plan.commit();
  first_positions_ = std::move(positions);
}

PagedKVCache::KeysAndValues PagedKVCache::fetch() const {
  if (format_ == nullptr) throw std::invalid_argument(message("there is no token yet"));
  std::vector<detail::RowBlocks> rows;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const detail::Sequence& row = *rows_[i];
    if (!row.held()) {
      rows.push_back({std::make_shared<detail::BlockList>(), 0, 0});
      continue;
    }
    const std::int64_t next = std::min(first_positions_[i], row.length());
    const std::int64_t first =
        config_.sliding_window > 0 ? std::max<std::int64_t>(0, next - config_.sliding_window + 1)
                                   : 0;
    rows.push_back({row.snapshot(), first, row.length()});
  }
  return storage_->backend()->gather(*format_, std::move(rows), *dtype_);
}

mx::array PagedKVCache::attend(const mx::array& queries, float scale, const AttentionMask& mask,
                               const std::optional<mx::array>& sinks, std::int64_t window,
                               float soft_cap) {
  if (format_ == nullptr) throw std::invalid_argument(message("there is no token to attend to"));
  require_not_traced(queries);
  std::vector<detail::AttendRow> rows;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    rows.push_back({rows_[i].get(), first_positions_[i]});
  }
  const std::int64_t reach = window > 0 ? window : config_.sliding_window;
  const detail::Visibility visibility{mask.causal || reach > 0, reach, mask.array, sinks, soft_cap};
  detail::check_attend(*format_, rows, queries, visibility);
  return storage_->backend()->attend(*format_, rows, queries, scale, visibility);
}

std::vector<std::int64_t> PagedKVCache::lengths() const {
  std::vector<std::int64_t> lengths;
  for (const auto& row : rows_) lengths.push_back(row->held() ? row->length() : 0);
  return lengths;
}

std::int64_t PagedKVCache::size() const noexcept {
  std::int64_t longest = 0;
  for (const auto& row : rows_) longest = std::max(longest, row->held() ? row->length() : 0);
  return longest;
}

bool PagedKVCache::is_trimmable() const noexcept {
  return std::none_of(rows_.begin(), rows_.end(), [](const auto& row) { return row->slid(); });
}

std::int64_t PagedKVCache::trim(std::int64_t n) {
  const std::int64_t n_trimmed = std::clamp<std::int64_t>(n, 0, size());
  if (n_trimmed == 0 || !is_trimmable()) return 0;
  for (const auto& row : rows_) {
    if (!row->held()) row->clear();
    row->shorten(std::max<std::int64_t>(0, row->length() - n_trimmed));
  }
  return n_trimmed;
}

void PagedKVCache::release() noexcept {
  for (const auto& row : rows_) row->clear();
}

void PagedKVCache::adopt_format(const PagedKVCache& other) {
  if (other.storage_ != storage_ || !(other.config_ == config_)) {
    throw std::invalid_argument(
        message("rows move only between caches of one storage and configuration"));
  }
  if (other.format_ == nullptr) return;
  if (format_ == nullptr) {
    format_ = std::make_unique<detail::LayerFormat>(*other.format_);
    dtype_ = other.dtype_;
    return;
  }
  if (dtype_ != other.dtype_ || format_->n_kv_heads != other.format_->n_kv_heads ||
      format_->raw[0].head_dim != other.format_->raw[0].head_dim ||
      format_->raw[1].head_dim != other.format_->raw[1].head_dim) {
    throw std::invalid_argument(message("rows of another type or shape cannot join"));
  }
}

void PagedKVCache::fork_rows(const PagedKVCache& other, std::span<const std::int64_t> indices,
                             std::span<const Owner> owners) {
  if (indices.size() != owners.size()) {
    throw std::invalid_argument(message("indices and owners must be as many"));
  }
  for (const std::int64_t index : indices) other.require_row(index);
  adopt_format(other);
  std::vector<std::unique_ptr<detail::Sequence>> rows;
  std::vector<std::int64_t> positions;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const auto index = static_cast<std::size_t>(indices[i]);
    rows.push_back(std::make_unique<detail::Sequence>(storage_->pool(), memory_, owners[i]));
    if (other.rows_[index]->held()) rows.back()->fork_from(*other.rows_[index]);
    positions.push_back(rows.back()->length());
  }
  rows_ = std::move(rows);
  first_positions_ = std::move(positions);
}

void PagedKVCache::take_rows(PagedKVCache& other) {
  if (&other == this) throw std::invalid_argument(message("a cache cannot take its own rows"));
  adopt_format(other);
  for (auto& row : other.rows_) {
    first_positions_.resize(rows_.size());
    first_positions_.push_back(row->length());
    rows_.push_back(std::move(row));
  }
  other.rows_.clear();
  other.first_positions_.clear();
}

void PagedKVCache::keep_rows(std::span<const std::int64_t> indices) {
  std::vector<bool> kept(rows_.size());
  for (const std::int64_t index : indices) {
    if (index < 0 || index >= n_rows() || kept[static_cast<std::size_t>(index)]) {
      throw std::invalid_argument(
          message("rows must be different ones of 0 to ", n_rows() - 1, ", got ", index));
    }
    kept[static_cast<std::size_t>(index)] = true;
  }
  std::vector<std::unique_ptr<detail::Sequence>> rows;
  std::vector<std::int64_t> positions;
  first_positions_.resize(rows_.size());
  for (const std::int64_t index : indices) {
    rows.push_back(std::move(rows_[static_cast<std::size_t>(index)]));
    positions.push_back(first_positions_[static_cast<std::size_t>(index)]);
  }
  rows_ = std::move(rows);
  first_positions_ = std::move(positions);
}

std::optional<PagedRowImage> PagedKVCache::save_row(std::int64_t row) const {
  require_row(row);
  const detail::Sequence& sequence = *rows_[static_cast<std::size_t>(row)];
  if (format_ == nullptr || sequence.blocks().empty()) return std::nullopt;
  std::vector<std::int64_t> blocks;
  for (const detail::TokenBlock& block : sequence.blocks()) {
    blocks.push_back(block.position);
    blocks.push_back(block.n_tokens);
    for (int role = 0; role < 2; ++role) {
      blocks.push_back(block.format[role] == format_->raw[role].format ? 0 : 1);
    }
  }
  auto [keys, values] = storage_->backend()->read_image(
      *format_, {sequence.blocks().begin(), sequence.blocks().end()});
  return PagedRowImage{format_->raw[0].block_size, format_->n_kv_heads, format_->raw[0].head_dim,
                       format_->raw[1].head_dim,   *dtype_,             std::move(blocks),
                       std::move(keys),            std::move(values),   codebook_identity()};
}

std::uint64_t PagedKVCache::codebook_identity() const noexcept {
  return config_.codebooks != nullptr ? config_.codebooks->identity() : 0;
}

void PagedKVCache::load_rows(std::span<const std::optional<PagedRowImage>> images,
                             std::span<const Owner> owners) {
  if (images.size() != owners.size()) {
    throw std::invalid_argument(message("images and owners must be as many"));
  }
  std::unique_ptr<detail::LayerFormat> format;
  const PagedRowImage* first = nullptr;
  std::vector<detail::BlockList> described(images.size());
  for (std::size_t i = 0; i < images.size(); ++i) {
    if (!images[i]) continue;
    const PagedRowImage& image = *images[i];
    if (image.codebooks != codebook_identity()) {
      throw std::invalid_argument(
          message("the image is coded with other codebooks than the cache has"));
    }
    if (first == nullptr) {
      first = &image;
      format = make_format(image.n_kv_heads, image.key_dim, image.value_dim, image.dtype);
    }
    if (image.dtype != first->dtype || image.n_kv_heads != first->n_kv_heads ||
        image.key_dim != first->key_dim || image.value_dim != first->value_dim) {
      throw std::invalid_argument(message("the images are of different types or shapes"));
    }
    described[i] = described_blocks(*format, image);
  }

  std::vector<std::unique_ptr<detail::Sequence>> rows;
  std::vector<std::int64_t> positions;
  for (std::size_t i = 0; i < images.size(); ++i) {
    rows.push_back(std::make_unique<detail::Sequence>(storage_->pool(), memory_, owners[i]));
    if (images[i]) rows.back()->restore(*format, std::move(described[i]));
    positions.push_back(rows.back()->length());
  }
  for (std::size_t i = 0; i < images.size(); ++i) {
    if (!images[i]) continue;
    storage_->backend()->write_image(*format, rows[i]->blocks(), images[i]->keys,
                                     images[i]->values);
  }
  rows_ = std::move(rows);
  first_positions_ = std::move(positions);
  format_ = std::move(format);
  dtype_ = first == nullptr ? std::nullopt : std::optional(first->dtype);
}

std::size_t PagedKVCache::nbytes() const noexcept {
  std::size_t bytes = 0;
  for (const auto& row : rows_) {
    if (!row->held()) continue;
    for (const detail::TokenBlock& block : row->blocks()) {
      for (int role = 0; role < 2; ++role) {
        bytes += format_->block_bytes(format_->part(role, block.format[role]));
      }
    }
  }
  return bytes;
}

mx::array PagedKVCache::pending() const { return storage_->backend()->pending(); }

std::vector<Owner> PagedKVCache::owners() const {
  std::vector<Owner> owners;
  for (const auto& row : rows_) owners.push_back(row->owner());
  return owners;
}

}  // namespace kvpool
