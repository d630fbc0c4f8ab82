#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "attention/attention.h"
#include "attention/elements.h"
#include "unit/kernels/testing.h"

namespace kvpool::testing {

struct Sizes {
  int n_heads = 2;
  int n_kv_heads = 1;
  int head_dim = 64;
  int value_dim = 64;
};

/// Blocks that own their memory, and the rows that they decode to.
class TestSequence {
 public:
  explicit TestSequence(const Sizes& sizes) : sizes_(sizes) {}

  /// Adds tokens in blocks of one format; the last may be part full.
  void append(int n_tokens, int block_size, codec::Format keys, codec::Format values,
              unsigned seed) {
    keys = complete(keys, codec::Role::kKeys, sizes_.head_dim);
    values = complete(values, codec::Role::kValues, sizes_.value_dim);
    while (n_tokens > 0) {
      const int n = std::min(n_tokens, block_size);
      attention::BlockRef ref{};
      ref.position = end_;
      ref.n_tokens = n;
      ref.block_size = block_size;
      ref.key_format = keys;
      ref.value_format = values;
      ref.keys =
          add_block({keys, codec::Role::kKeys, block_size, sizes_.head_dim}, n, seed++, key_rows_);
      ref.values = add_block({values, codec::Role::kValues, block_size, sizes_.value_dim}, n,
                             seed++, value_rows_);
      refs_.push_back(ref);
      for (int t = 0; t < n; ++t) positions_.push_back(end_ + t);
      end_ += n;
      n_tokens -= n;
    }
  }

  /// The next block starts this many positions later.
  void skip(std::int64_t n) { end_ += n; }

  std::int64_t end() const { return end_; }
  const std::vector<std::int64_t>& positions() const { return positions_; }
  attention::SequenceRef ref(int n_queries) const {
    return {refs_, std::max<std::int64_t>(0, end_ - n_queries)};
  }
  float key(std::size_t token, int kv_head, int d) const {
    return key_rows_[(token * as_size(sizes_.n_kv_heads) + as_size(kv_head)) *
                         as_size(sizes_.head_dim) +
                     as_size(d)];
  }
  float value(std::size_t token, int kv_head, int d) const {
    return value_rows_[(token * as_size(sizes_.n_kv_heads) + as_size(kv_head)) *
                           as_size(sizes_.value_dim) +
                       as_size(d)];
  }

 private:
  static std::size_t as_size(int n) { return static_cast<std::size_t>(n); }

  const std::byte* add_block(codec::PartGeometry geometry, int n_tokens, unsigned seed,
                             std::vector<float>& decoded_rows) {
    const std::size_t part_bytes = codec::part_bytes(geometry);
    const std::size_t dim = as_size(geometry.head_dim);
    // Bytes that are NaN in every raw format: rows that do not count must not be read.
    auto block = std::make_unique<std::vector<std::byte>>(part_bytes * as_size(sizes_.n_kv_heads),
                                                          std::byte{0xFF});
    const std::size_t start = decoded_rows.size();
    decoded_rows.resize(start + as_size(n_tokens) * as_size(sizes_.n_kv_heads) * dim);
    for (int head = 0; head < sizes_.n_kv_heads; ++head) {
      geometry.kv_head = head;
      std::byte* const part = block->data() + as_size(head) * part_bytes;
      const unsigned head_seed = seed * 131 + unsigned(head);
      if (geometry.format.is_vector()) {
        std::ranges::copy(random_codes(geometry, head_seed), part);
      } else {
        const int n_rows = geometry.format.is_raw() ? n_tokens : geometry.block_size;
        const auto rows = random_rows(n_rows, geometry.head_dim, head_seed);
        codec::encode(geometry, rows.data(), n_rows, part);
      }
      std::vector<float> back(as_size(n_tokens) * dim);
      codec::decode(geometry, part, 0, n_tokens, back.data());
      for (std::size_t t = 0; t < as_size(n_tokens); ++t) {
        std::copy_n(
            back.begin() + std::ptrdiff_t(t * dim), dim,
            decoded_rows.begin() +
                std::ptrdiff_t(start + (t * as_size(sizes_.n_kv_heads) + as_size(head)) * dim));
      }
    }
    blocks_.push_back(std::move(block));
    return blocks_.back()->data();
  }

  Sizes sizes_;
  std::int64_t end_ = 0;
  std::vector<std::unique_ptr<std::vector<std::byte>>> blocks_;
  std::vector<attention::BlockRef> refs_;
  std::vector<std::int64_t> positions_;
  std::vector<float> key_rows_;
  std::vector<float> value_rows_;
};

/// What a mask array says of (batch, head, query, position): nothing if not seen, else a bias.
using MaskFunction = std::function<std::optional<float>(std::size_t, int, int, std::int64_t)>;

struct Problem {
  Sizes sizes;
  int n_queries = 1;
  attention::DType dtype = attention::DType::kFp32;
  float scale = 0.125F;
  bool causal = false;
  std::int64_t window = 0;
  float soft_cap = 0.0F;
  std::vector<float> sinks{};
  attention::Mask mask{};
  MaskFunction mask_function{};
  std::vector<std::unique_ptr<TestSequence>> sequences{};
  int n_threads = 2;

  TestSequence& add_sequence() {
    sequences.push_back(std::make_unique<TestSequence>(sizes));
    return *sequences.back();
  }
};

/// One query of one head over the decoded rows, in double.
inline std::vector<double> reference_row(const Problem& problem, std::size_t s, int head, int query,
                                         const float* q) {
  const TestSequence& sequence = *problem.sequences[s];
  const int kv_head = head / (problem.sizes.n_heads / problem.sizes.n_kv_heads);
  const std::int64_t position = sequence.ref(problem.n_queries).query_position + query;
  std::vector<double> result(static_cast<std::size_t>(problem.sizes.value_dim));
  std::vector<std::pair<std::size_t, double>> scores;
  double largest = -INFINITY;
  for (std::size_t t = 0; t < sequence.positions().size(); ++t) {
    const std::int64_t at = sequence.positions()[t];
    if (problem.causal && at > position) continue;
    if (problem.window > 0 && at <= position - problem.window) continue;
    double score = 0.0;
    for (int d = 0; d < problem.sizes.head_dim; ++d) {
      score += double{q[d]} * sequence.key(t, kv_head, d);
    }
    score *= problem.scale;
    if (problem.soft_cap > 0.0F) {
      score = problem.soft_cap * std::tanh(score / problem.soft_cap);
    }
    if (problem.mask_function) {
      const auto bias = problem.mask_function(s, head, query, at);
      if (!bias) continue;
      score += *bias;
    }
    scores.emplace_back(t, score);
    largest = std::max(largest, score);
  }
  if (scores.empty() || largest == -INFINITY) return result;
  double sum = 0.0;
  if (!problem.sinks.empty()) {
    const double sink = problem.sinks[static_cast<std::size_t>(head)];
    largest = std::max(largest, sink);
    sum = std::exp(sink - largest);
  }
  for (const auto& [t, score] : scores) {
    const double weight = std::exp(score - largest);
    sum += weight;
    for (int d = 0; d < problem.sizes.value_dim; ++d) {
      result[static_cast<std::size_t>(d)] += weight * sequence.value(t, kv_head, d);
    }
  }
  for (double& value : result) value /= sum;
  return result;
}

/// Of each sequence, query and head, as a projection leaves them.
inline std::vector<float> random_queries(const Problem& problem) {
  const auto n_batch = static_cast<int>(problem.sequences.size());
  return random_rows(n_batch * problem.n_queries * problem.sizes.n_heads, problem.sizes.head_dim,
                     99);
}

/// Attention of the problem at a level, with queries and output not contiguous. `queries` become
/// what they are in the problem's dtype.
inline std::vector<float> attend(const Problem& problem, const std::string& level,
                                 std::vector<float>& queries) {
  const auto n_batch = problem.sequences.size();
  const auto n_heads = static_cast<std::size_t>(problem.sizes.n_heads);
  const auto n_queries = static_cast<std::size_t>(problem.n_queries);
  const auto dim = static_cast<std::size_t>(problem.sizes.head_dim);
  const auto value_dim = static_cast<std::size_t>(problem.sizes.value_dim);
  const std::size_t element = problem.dtype == attention::DType::kFp32 ? 4 : 2;

  std::vector<std::byte> stored(queries.size() * element);
  attention::store_elements(problem.dtype, queries.data(), queries.size(), stored.data(), 0);
  attention::load_elements(problem.dtype, stored.data(), 0, queries.size(), queries.data());
  std::vector<std::byte> out(n_batch * n_queries * n_heads * value_dim * element, std::byte{0xFF});

  std::vector<attention::SequenceRef> refs;
  for (const auto& sequence : problem.sequences) {
    refs.push_back(sequence->ref(problem.n_queries));
  }
  attention::Arguments arguments;
  arguments.n_heads = problem.sizes.n_heads;
  arguments.n_kv_heads = problem.sizes.n_kv_heads;
  arguments.head_dim = problem.sizes.head_dim;
  arguments.value_dim = problem.sizes.value_dim;
  arguments.n_queries = problem.n_queries;
  arguments.scale = problem.scale;
  arguments.dtype = problem.dtype;
  arguments.queries = stored.data();
  arguments.out = out.data();
  const auto strides = [&](std::size_t width) {
    return attention::Strides{static_cast<std::int64_t>(n_queries * n_heads * width),
                              static_cast<std::int64_t>(width),
                              static_cast<std::int64_t>(n_heads * width)};
  };
  arguments.query_strides = strides(dim);
  arguments.out_strides = strides(value_dim);
  arguments.sequences = refs;
  arguments.causal = problem.causal;
  arguments.window = problem.window;
  arguments.mask = problem.mask;
  arguments.sinks = problem.sinks.empty() ? nullptr : problem.sinks.data();
  arguments.soft_cap = problem.soft_cap;
  attention::validate(arguments);
  static attention::ThreadPool two(2);
  static attention::ThreadPool one(1);
  attention::attend(arguments, problem.n_threads == 1 ? one : two, kernels::table_named(level));

  std::vector<float> got(n_batch * n_queries * n_heads * value_dim);
  attention::load_elements(problem.dtype, out.data(), 0, got.size(), got.data());
  return got;
}

/// Compares the problem at a level with the reference.
inline void expect_right(const Problem& problem, const std::string& level, double tolerance) {
  const auto n_batch = problem.sequences.size();
  const auto n_heads = static_cast<std::size_t>(problem.sizes.n_heads);
  const auto n_queries = static_cast<std::size_t>(problem.n_queries);
  const auto dim = static_cast<std::size_t>(problem.sizes.head_dim);
  const auto value_dim = static_cast<std::size_t>(problem.sizes.value_dim);
  std::vector<float> queries = random_queries(problem);
  std::vector<float> got;
  ASSERT_NO_THROW(got = attend(problem, level, queries));
  // The output is rounded once.
  const double relative = problem.dtype == attention::DType::kFp32   ? 0.0
                          : problem.dtype == attention::DType::kFp16 ? 0x1p-11
                                                                     : 0x1p-8;
  for (std::size_t s = 0; s < n_batch; ++s) {
    for (std::size_t i = 0; i < n_queries; ++i) {
      for (std::size_t h = 0; h < n_heads; ++h) {
        const std::size_t row = (s * n_queries + i) * n_heads + h;
        const auto expected = reference_row(problem, s, static_cast<int>(h), static_cast<int>(i),
                                            queries.data() + row * dim);
        for (std::size_t d = 0; d < value_dim; ++d) {
          ASSERT_NEAR(got[row * value_dim + d], expected[d],
                      tolerance + relative * std::fabs(expected[d]))
              << "sequence " << s << " query " << i << " head " << h << " channel " << d;
        }
      }
    }
  }
}

}  // namespace kvpool::testing
