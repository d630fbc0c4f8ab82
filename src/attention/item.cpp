#include "attention/item.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "attention/elements.h"
#include "attention/mask.h"
#include "attention/scratch.h"
#include "codec/space.h"

namespace kvpool::attention {
namespace {

using codec::Role;
using kernels::Layout;
using kernels::PartShape;

constexpr float kNoScore = -std::numeric_limits<float>::infinity();

/// Tokens and blocks that the kernels take in one call, at most; tokens of which runs are decoded.
constexpr int kRunTokens = 1024;
constexpr int kDecodedTokens = 512;
constexpr std::size_t kRunBlocks = 64;
/// Those of a first run, if the item before has fetched its keys, and if nothing has; each run
/// after it may have twice as many as the one before, which fetches its keys.
constexpr int kFetchedTokens = 512;
constexpr int kFirstRunTokens = 128;
/// With more rows it pays to decode a run once, as fp32, for all of them.
constexpr int kDirectRows = 16;

/// Queries as they meet the keys of a space; offsets are null or belong to their scores.
struct SpaceQueries {
  codec::Space space;
  float* queries = nullptr;
  float* offsets = nullptr;
};

/// Sums of the values of a space; weights are null or sums of the weights.
struct SpaceSums {
  codec::Space space;
  float* sums = nullptr;
  float* weights = nullptr;
};

/// Memory for what an item has of each space it meets, in the order of meeting.
class SpaceScratch {
 public:
  float* get(std::size_t space, std::size_t n) {
    if (space >= scratch_.size()) scratch_.resize(space + 1);
    return scratch_[space].get<float>(n);
  }

 private:
  std::vector<Scratch> scratch_;
};

struct Buffers {
  Scratch queries, prepared, scores, decoded;
  SpaceScratch turned_queries, sums;
  std::vector<SpaceQueries> space_queries;
  std::vector<SpaceSums> space_sums;
};

/// Consecutive blocks with the same formats and size, of a run's tokens at most unless it is one.
struct Run {
  std::span<const BlockRef> blocks;
  int n_tokens = 0;
  /// One head's parts of them.
  std::array<const std::byte*, kRunBlocks> keys;
  std::array<const std::byte*, kRunBlocks> values;
  std::array<std::int32_t, kRunBlocks> part_tokens;
  std::size_t key_bytes = 0;
  std::size_t value_bytes = 0;
  codec::Space key_space;
  codec::Space value_space;
};

bool alike(const BlockRef& a, const BlockRef& b) {
  return a.key_format == b.key_format && a.value_format == b.value_format &&
         a.block_size == b.block_size;
}

/// Works through an item's runs with the state of online softmax (Milakov and Gimelshein 2018).
class Walk {
 public:
  Walk(const Arguments& arguments, const kernels::KernelTable& kernels, const Item& item,
       Buffers& buffers)
      : arguments_(arguments),
        kernels_(kernels),
        item_(item),
        buffers_(buffers),
        n_rows_(n_rows(arguments, item)),
        dim_(static_cast<std::size_t>(arguments.head_dim)),
        value_dim_(static_cast<std::size_t>(arguments.value_dim)),
        run_tokens_(n_rows_ <= kDirectRows ? kRunTokens : kDecodedTokens),
        space_queries_(buffers.space_queries),
        space_sums_(buffers.space_sums) {
    space_queries_.clear();
    space_sums_.clear();
  }

  void attend() {
    load_queries();
    for (int row = 0; row < n_rows_; ++row) {
      *partial(row).largest = kNoScore;
      *partial(row).sum = 0.0F;
    }
    std::array<Run, 2> runs;
    std::span<const BlockRef> left = take_run(item_, blocks_of(item_), first_tokens(), runs[0]);
    bool ends = runs[0].blocks.empty();
    for (std::size_t i = 0; !ends; i = 1 - i) {
      Run& next = runs[1 - i];
      ends = left.empty();
      if (ends) {
        take_first_of_next_item(next);
      } else {
        left = take_run(item_, left, std::min(2 * runs[i].n_tokens, run_tokens_), next);
      }
      attend_run(runs[i], next);
    }
    store_sums();
  }

 private:
  std::span<const BlockRef> blocks_of(const Item& item) const {
    return arguments_.sequences[item.sequence].blocks.subspan(item.first_block,
                                                              item.last_block - item.first_block);
  }

  int first_tokens() const {
    if (n_rows_ > kDirectRows) return run_tokens_;
    return item_.is_fetched ? kFetchedTokens : kFirstRunTokens;
  }

  PartialRow partial(int row) const { return partial_row(arguments_, item_, row); }

  QueryRow query_row(int row) const {
    const int group = group_of(arguments_);
    return {item_.sequence, item_.kv_head * group + row / item_.n_queries,
            item_.first_query + row % item_.n_queries};
  }

  void load_queries() {
    queries_ = buffers_.queries.get<float>(static_cast<std::size_t>(n_rows_) * dim_);
    for (int row = 0; row < n_rows_; ++row) {
      const QueryRow at = query_row(row);
      const Strides& strides = arguments_.query_strides;
      float* const query = queries_ + static_cast<std::size_t>(row) * dim_;
      load_elements(arguments_.dtype, arguments_.queries,
                    static_cast<std::int64_t>(at.sequence) * strides.batch +
                        at.head * strides.head + at.query * strides.query,
                    dim_, query);
      kernels_.scale(query, dim_, arguments_.scale);
    }
  }

  const SpaceQueries& queries_in(const codec::Space& space) {
    for (const SpaceQueries& known : space_queries_) {
      if (known.space == space) return known;
    }
    SpaceQueries& added = space_queries_.emplace_back(SpaceQueries{space, queries_});
    if (space.is_plain()) return added;
    const auto rows = static_cast<std::size_t>(n_rows_);
    added.queries = buffers_.turned_queries.get(space_queries_.size() - 1, rows * (dim_ + 1));
    if (space.has_mean()) added.offsets = added.queries + rows * dim_;
    std::copy_n(queries_, rows * dim_, added.queries);
    space.enter_queries(added.queries, n_rows_, arguments_.head_dim, added.offsets);
    return added;
  }

  SpaceSums& sums_in(const codec::Space& space) {
    for (SpaceSums& known : space_sums_) {
      if (known.space == space) return known;
    }
    SpaceSums& added = space_sums_.emplace_back(SpaceSums{space});
    const std::size_t n = static_cast<std::size_t>(n_rows_) * (value_dim_ + 1);
    added.sums = buffers_.sums.get(space_sums_.size() - 1, n);
    std::fill_n(added.sums, n, 0.0F);
    if (space.has_mean())
      added.weights = added.sums + static_cast<std::size_t>(n_rows_) * value_dim_;
    return added;
  }

  /// Fills `run` from the front of an item's `blocks`, to so many tokens at most; an empty one if
  /// there are none.
  /// @return the blocks after it.
  std::span<const BlockRef> take_run(const Item& item, std::span<const BlockRef> blocks,
                                     int most_tokens, Run& run) const {
    run.blocks = {};
    if (blocks.empty()) return blocks;
    const BlockRef& first = blocks[0];
    run.key_bytes = part_bytes(first, Role::kKeys);
    run.value_bytes = part_bytes(first, Role::kValues);
    run.key_space = codec::Space(first.key_format, item.kv_head);
    run.value_space = codec::Space(first.value_format, item.kv_head);
    const std::size_t key_offset = static_cast<std::size_t>(item.kv_head) * run.key_bytes;
    const std::size_t value_offset = static_cast<std::size_t>(item.kv_head) * run.value_bytes;
    const std::size_t most = std::min(blocks.size(), kRunBlocks);
    int n_tokens = 0;
    std::size_t n = 0;
    do {
      const BlockRef& block = blocks[n];
      run.keys[n] = block.keys + key_offset;
      run.values[n] = block.values + value_offset;
      run.part_tokens[n] = block.n_tokens;
      n_tokens += block.n_tokens;
      ++n;
    } while (n < most && n_tokens + blocks[n].n_tokens <= most_tokens && alike(blocks[n], first));
    run.blocks = blocks.first(n);
    run.n_tokens = n_tokens;
    return blocks.subspan(n);
  }

  void take_first_of_next_item(Run& run) const {
    run.blocks = {};
    if (item_.next != nullptr) {
      take_run(*item_.next, blocks_of(*item_.next), kFetchedTokens, run);
    }
  }

  void attend_run(const Run& run, const Run& next) {
    const BlockRef& first = run.blocks[0];
    const std::size_t n = run.blocks.size();
    stride_ = (static_cast<std::size_t>(run.n_tokens) + kernels::kColumnSlack + 15) / 16 * 16;
    scores_ = buffers_.scores.get<float>(static_cast<std::size_t>(n_rows_) * stride_ +
                                         kernels::kColumnSlack);
    if (n_rows_ <= kDirectRows) {
      score(kernels::layout_of(first.key_format, Role::kKeys), shape_of(first, Role::kKeys),
            run.key_space,
            {run.keys.data(), run.part_tokens.data(), n, run.values.data(), n, run.value_bytes});
      weigh(run);
      accumulate(kernels::layout_of(first.value_format, Role::kValues),
                 shape_of(first, Role::kValues), run.value_space,
                 {run.values.data(), run.part_tokens.data(), n, next.keys.data(),
                  next.blocks.size(), next.key_bytes});
    } else {
      decode_and_score(run);
      weigh(run);
      decode_and_accumulate(run);
    }
  }

  void score(Layout layout, const PartShape& shape, const codec::Space& space,
             const kernels::PartRun& run) {
    const kernels::KeyKernels& kernels = kernels_.of_keys(layout);
    PartShape any_size = shape;
    any_size.block_size = 0;
    const Prepared wanted{layout, any_size, space};
    if (prepared_for_ != wanted) {
      prepared_ = buffers_.prepared.get<std::byte>(kernels.prepared_bytes(shape, n_rows_));
      kernels.prepare(shape, queries_in(space).queries, n_rows_, prepared_);
      prepared_for_ = wanted;
    }
    kernels.scores(shape, run, prepared_, n_rows_, scores_, stride_);
  }

  void accumulate(Layout layout, const PartShape& shape, const codec::Space& space,
                  const kernels::PartRun& run) {
    kernels_.of_values(layout).accumulate(shape, run, scores_, stride_, n_rows_,
                                          sums_in(space).sums);
  }

  /// Decodes one role of a run to fp32 rows, which are one part of as many tokens.
  const std::byte* decode(const Run& run, Role role) {
    const bool keys = role == Role::kKeys;
    const BlockRef& first = run.blocks[0];
    const Layout layout = kernels::layout_of(keys ? first.key_format : first.value_format, role);
    const auto read = keys ? kernels_.of_keys(layout).decode : kernels_.of_values(layout).decode;
    const PartShape shape = shape_of(first, role);
    const std::size_t dim = keys ? dim_ : value_dim_;
    float* rows = buffers_.decoded.get<float>(static_cast<std::size_t>(run.n_tokens) * dim);
    const auto* const part = reinterpret_cast<const std::byte*>(rows);
    for (std::size_t i = 0; i < run.blocks.size(); ++i) {
      read(shape, keys ? run.keys[i] : run.values[i], 0, run.part_tokens[i], rows);
      rows += static_cast<std::size_t>(run.part_tokens[i]) * dim;
    }
    return part;
  }

  /// The decoded rows are still in their space.
  void decode_and_score(const Run& run) {
    const std::byte* const part = decode(run, Role::kKeys);
    score(Layout::kFp32, {run.n_tokens, arguments_.head_dim, 0}, run.key_space,
          {&part, &run.n_tokens, 1});
  }

  void decode_and_accumulate(const Run& run) {
    const std::byte* const part = decode(run, Role::kValues);
    accumulate(Layout::kFp32, {run.n_tokens, arguments_.value_dim, 0}, run.value_space,
               {&part, &run.n_tokens, 1});
  }

  PartShape shape_of(const BlockRef& block, Role role) const {
    const bool keys = role == Role::kKeys;
    return kernels::shape_of({keys ? block.key_format : block.value_format, role, block.block_size,
                              keys ? arguments_.head_dim : arguments_.value_dim, item_.kv_head});
  }

  std::size_t part_bytes(const BlockRef& block, Role role) const {
    const bool keys = role == Role::kKeys;
    return codec::part_bytes({keys ? block.key_format : block.value_format, role, block.block_size,
                              keys ? arguments_.head_dim : arguments_.value_dim});
  }

  /// Turns a run's scores into weights under the largest score so far.
  void weigh(const Run& run) {
    const auto n = static_cast<std::size_t>(run.n_tokens);
    const float* const offsets = queries_in(run.key_space).offsets;
    float* const weights = sums_in(run.value_space).weights;
    for (int row = 0; row < n_rows_; ++row) {
      float* const scores = scores_ + static_cast<std::size_t>(row) * stride_;
      // Common to the run's scores, which lack it.
      float offset = offsets == nullptr ? 0.0F : offsets[row];
      if (arguments_.soft_cap > 0.0F) {
        for (std::size_t i = 0; i < n; ++i) scores[i] += offset;
        offset = 0.0F;
        kernels_.soft_cap(scores, n, arguments_.soft_cap);
      }
      if (!sees_all(run, row)) {
        float* at = scores;
        for (const BlockRef& block : run.blocks) {
          mask_scores(arguments_, query_row(row), block, at);
          at += block.n_tokens;
        }
      }
      const PartialRow state = partial(row);
      float largest = std::max(*state.largest, kernels_.max(scores, n) + offset);
      if (largest == kNoScore && std::any_of(scores, scores + n, [](float s) { return s != s; })) {
        largest = 0.0F;  // There are scores, if none that is a number: the sum becomes NaN.
      }
      if (largest == kNoScore) {
        std::fill_n(scores, n, 0.0F);
        continue;
      }
      if (largest > *state.largest) rescale(row, std::exp(*state.largest - largest));
      const float sum = kernels_.exp_sum(scores, n, largest - offset);
      *state.sum += sum;
      if (weights != nullptr) weights[row] += sum;
      *state.largest = largest;
    }
  }

  bool sees_all(const Run& run, int row) const {
    if (arguments_.mask.kind != Mask::Kind::kNone) return false;
    const std::int64_t position =
        arguments_.sequences[item_.sequence].query_position + query_row(row).query;
    const Visible keys = visible(arguments_, position);
    const BlockRef& last = run.blocks.back();
    return keys.first <= run.blocks.front().position && last.position + last.n_tokens <= keys.end;
  }

  void rescale(int row, float factor) {
    const std::size_t offset = static_cast<std::size_t>(row) * value_dim_;
    *partial(row).sum *= factor;
    for (const SpaceSums& of : space_sums_) {
      kernels_.scale(of.sums + offset, value_dim_, factor);
      if (of.weights != nullptr) of.weights[row] *= factor;
    }
  }

  void store_sums() {
    for (const SpaceSums& of : space_sums_) {
      of.space.leave_sums(of.sums, n_rows_, arguments_.value_dim, of.weights);
    }
    for (int row = 0; row < n_rows_; ++row) {
      float* const values = partial(row).values;
      std::fill_n(values, value_dim_, 0.0F);
      for (const SpaceSums& of : space_sums_) {
        const float* const sums = of.sums + static_cast<std::size_t>(row) * value_dim_;
        for (std::size_t d = 0; d < value_dim_; ++d) values[d] += sums[d];
      }
    }
  }

  /// What prepared_ is made for.
  struct Prepared {
    Layout layout;
    PartShape shape;
    codec::Space space;
    bool operator==(const Prepared&) const = default;
  };

  const Arguments& arguments_;
  const kernels::KernelTable& kernels_;
  const Item& item_;
  Buffers& buffers_;
  int n_rows_;
  std::size_t dim_;
  std::size_t value_dim_;
  int run_tokens_;
  std::vector<SpaceQueries>& space_queries_;
  std::vector<SpaceSums>& space_sums_;

  float* queries_ = nullptr;
  /// Of the present run: the rows' scores, and then weights, `stride_` apart.
  float* scores_ = nullptr;
  std::size_t stride_ = 0;
  std::byte* prepared_ = nullptr;
  std::optional<Prepared> prepared_for_;
};

}  // namespace

std::size_t partial_row_size(const Arguments& arguments) noexcept {
  return 2 + static_cast<std::size_t>(arguments.value_dim);
}

PartialRow partial_row(const Arguments& arguments, const Item& item, int row) noexcept {
  float* const start = item.partial + static_cast<std::size_t>(row) * partial_row_size(arguments);
  return {start, start + 1, start + 2};
}

void attend_item(const Arguments& arguments, const kernels::KernelTable& kernels,
                 const Item& item) {
  thread_local Buffers buffers;
  Walk(arguments, kernels, item, buffers).attend();
}

}  // namespace kvpool::attention
