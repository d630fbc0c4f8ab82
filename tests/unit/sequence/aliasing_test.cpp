// Random lives of many caches over one storage, evaluated late and in any order on two streams,
// beside a model in which nothing is shared. Whatever sees another's rows differs.

#include <gtest/gtest.h>
#include <mlx/ops.h>
#include <mlx/stream.h>
#include <mlx/transforms.h>
#include <rapidcheck.h>

#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <ostream>

#include "dense_model.h"
#include "kvpool/errors.h"
#include "unit/cache/codebooks.h"

namespace mx = mlx::core;

namespace kvpool {

static void showValue(const PagedKVCacheConfig& config, std::ostream& out) {
  out << config.key_format << '/' << config.value_format << ", window " << config.window
      << ", sink " << config.sink << ", sliding " << config.sliding_window;
}

namespace testing {
namespace {

enum class Call {
  kNew,
  kAppend,
  kAttend,
  kFetch,
  kTrim,
  kFork,
  kKeepRows,
  kTakeRows,
  kRelease,
  kFreeAll,
  kDestroy,
  kStream,
  kEvaluate,
};

struct Operation {
  Call call;
  std::array<int, 4> picks;
};

std::ostream& operator<<(std::ostream& out, const Operation& op) {
  constexpr std::array kNames{"new",     "append",    "attend",    "fetch",   "trim",
                              "fork",    "keep_rows", "take_rows", "release", "free_all",
                              "destroy", "stream",    "evaluate"};
  out << kNames[static_cast<std::size_t>(op.call)] << '(';
  for (const int pick : op.picks) out << pick << ' ';
  return out << ')';
}

rc::Gen<Operation> any_operation() {
  const auto call = rc::gen::weightedElement<Call>({{3, Call::kNew},
                                                    {12, Call::kAppend},
                                                    {10, Call::kAttend},
                                                    {6, Call::kFetch},
                                                    {5, Call::kTrim},
                                                    {5, Call::kFork},
                                                    {2, Call::kKeepRows},
                                                    {2, Call::kTakeRows},
                                                    {1, Call::kRelease},
                                                    {1, Call::kFreeAll},
                                                    {3, Call::kDestroy},
                                                    {5, Call::kStream},
                                                    {5, Call::kEvaluate}});
  return rc::gen::construct<Operation>(
      call, rc::gen::container<std::array<int, 4>>(rc::gen::inRange(0, 1000)));
}

std::vector<std::pair<std::string, std::string>> formats() {
  return {{"raw", "raw"},    {"int4", "int8"},     {"kivi2", "raw"},     {"raw", "kivi4"},
          {"int2", "kivi2"}, {"vecinfer2", "raw"}, {"int4", "vecinfer1"}};
}

rc::Gen<PagedKVCacheConfig> any_config() {
  return rc::gen::map(
      rc::gen::tuple(rc::gen::elementOf(formats()), rc::gen::element(0, 3, 8),
                     rc::gen::element(0, 1, 5), rc::gen::element(0, 0, 0, 1, 6, 9)),
      [](const auto& parts) {
        PagedKVCacheConfig config;
        std::tie(config.key_format, config.value_format) = std::get<0>(parts);
        static const auto kOfKeys = make_codebooks("vecinfer2", 2, kKvHeads, kRoleDims[0]);
        static const auto kOfValues = make_codebooks("vecinfer1", 2, kKvHeads, kRoleDims[1]);
        if (config.key_format == "vecinfer2") config.codebooks = kOfKeys;
        if (config.value_format == "vecinfer1") config.codebooks = kOfValues;
        config.layer = config.codebooks != nullptr ? 1 : 0;
        config.window = std::get<1>(parts);
        config.sink = std::get<2>(parts);
        config.sliding_window = std::get<3>(parts);
        return config;
      });
}

/// An array that has not been evaluated, and what it must be.
struct Pending {
  mx::array got;
  std::vector<float> expected;
  float tolerance;
};

class World {
 public:
  World(PagedKVCacheConfig config, std::int64_t n_blocks, bool grows)
      : config_(std::move(config)),
        grows_(grows),
        pool_(std::make_shared<BlockPoolAllocator>(PoolConfig{
            .block_size = kBlockSize, .n_blocks = n_blocks, .grow_on_exhaustion = grows})),
        storage_(std::make_shared<PagedStorage>(pool_)),
        streams_{mx::default_stream(mx::default_device()), second_stream()} {}
  ~World() { mx::set_default_stream(streams_[0]); }

  void apply(const Operation& op) {
    const auto [a, b, c, d] = op.picks;
    if (op.call == Call::kNew || lives_.empty()) return add(1 + a % 3);
    Life& life = lives_[static_cast<std::size_t>(a) % lives_.size()];
    switch (op.call) {
      case Call::kAppend:
        append(life, b, c, d);
        break;
      case Call::kAttend:
        if (append(life, b, c, d)) attend(life);
        break;
      case Call::kFetch:
        fetch(life);
        break;
      case Call::kTrim:
        trim(life, b % 12);
        break;
      case Call::kFork:
        fork(life, b);
        break;
      case Call::kKeepRows:
        keep_rows(life, b);
        break;
      case Call::kTakeRows:
        take_rows(life, b);
        break;
      case Call::kRelease:
        life.cache->release();
        for (DenseRow& row : life.rows) row.clear();
        break;
      case Call::kFreeAll: {
        if (life.rows.empty()) break;
        const std::size_t row = static_cast<std::size_t>(b) % life.rows.size();
        pool_->free_all(life.cache->owners()[row]);
        life.rows[row].clear();
        break;
      }
      case Call::kDestroy:
        lives_.erase(lives_.begin() + (&life - lives_.data()));
        break;
      case Call::kStream:
        mx::set_default_stream(streams_[static_cast<std::size_t>(b) % streams_.size()]);
        break;
      case Call::kEvaluate:
        evaluate(b, c % 2 == 0);
        break;
      case Call::kNew:
        break;
    }
    check_lengths();
  }

  void finish() {
    while (!pending_.empty()) evaluate(static_cast<int>(pending_.size() / 2), false);
    lives_.clear();
    mx::array last = PagedKVCache(storage_, config_, {}).pending();
    last.eval();
    for (const mx::Stream& stream : streams_) mx::synchronize(stream);
    RC_ASSERT(pool_->stats().blocks_in_use() == 0);
    RC_ASSERT(storage_->resident_bytes() == std::size_t{0});
  }

 private:
  struct Life {
    std::unique_ptr<PagedKVCache> cache;
    std::vector<DenseRow> rows;
    std::int64_t n_columns = 0;
    bool appended = false;
  };

  static mx::Stream second_stream() {
    static const mx::Stream stream = mx::new_stream(mx::default_device());
    return stream;
  }

  void add(int n_rows) {
    std::vector<Owner> owners;
    Life life;
    for (int i = 0; i < n_rows; ++i) {
      owners.push_back(next_owner_++);
      life.rows.emplace_back(config_);
    }
    life.cache = std::make_unique<PagedKVCache>(storage_, config_, owners);
    lives_.push_back(std::move(life));
  }

  /// Lazy, so that the append has something to wait for.
  static mx::array lazily(const std::vector<float>& numbers, const mx::Shape& shape) {
    return mx::multiply(mx::array(numbers.begin(), shape), mx::array(1.0F));
  }

  bool append(Life& life, int n_columns, int first_pick, int count_pick) {
    const auto n_rows = static_cast<mx::ShapeElem>(life.rows.size());
    const int S = n_columns % 9;
    Rows rows[2];
    std::vector<mx::array> arrays;
    for (const int role : {0, 1}) {
      rows[role] = new_rows(config_, role, n_rows, S);
      arrays.push_back(lazily(rows[role].numbers, {n_rows, kKvHeads, S, kRoleDims[role]}));
    }
    std::vector<std::int64_t> first(life.rows.size());
    std::vector<std::int64_t> count(life.rows.size(), S);
    const bool ragged = first_pick % 3 == 0;
    for (std::size_t i = 0; ragged && i < first.size(); ++i) {
      first[i] = (first_pick + static_cast<int>(i)) % (S + 1);
      count[i] = (count_pick + static_cast<int>(i)) % (S + 1 - static_cast<int>(first[i]));
    }
    try {
      if (ragged) {
        life.cache->append(arrays[0], arrays[1], first, count);
      } else {
        life.cache->append(arrays[0], arrays[1]);
      }
    } catch (const BlockPoolExhaustedError&) {
      RC_ASSERT(!grows_);
      return false;
    }
    for (std::size_t i = 0; i < first.size(); ++i) {
      life.rows[i].append(rows, static_cast<std::int64_t>(i), first[i], count[i]);
    }
    life.n_columns = S;
    life.appended = true;
    return true;
  }

  void attend(Life& life) {
    const auto n_rows = static_cast<mx::ShapeElem>(life.rows.size());
    const auto S = static_cast<mx::ShapeElem>(life.n_columns);
    const std::vector<float> queries =
        unique_numbers(static_cast<std::size_t>(n_rows * kQueryHeads * S * kRoleDims[0]));
    const float scale = 0.25F;
    AttentionMask mask;
    mask.causal = true;
    pending_.push_back(
        {life.cache->attend(lazily(queries, {n_rows, kQueryHeads, S, kRoleDims[0]}), scale, mask),
         expected_attention(life.rows, queries, S, 0.25, config_.sliding_window),
         config_.codebooks != nullptr ? 1e-3F : 1e-4F});
  }

  void fetch(Life& life) {
    if (!life.appended) return;
    const auto [keys, values] = life.cache->fetch();
    pending_.push_back({keys, expected_fetch(life.rows, 0, config_.sliding_window), 0});
    pending_.push_back({values, expected_fetch(life.rows, 1, config_.sliding_window), 0});
  }

  void trim(Life& life, std::int64_t n) {
    std::int64_t longest = 0;
    bool slid = false;
    for (const DenseRow& row : life.rows) {
      longest = std::max(longest, row.length());
      slid |= row.slid();
    }
    RC_ASSERT(life.cache->is_trimmable() == !slid);
    RC_ASSERT(life.cache->trim(n - 2) == (slid ? 0 : std::clamp<std::int64_t>(n - 2, 0, longest)));
    if (slid || n < 2) return;
    for (DenseRow& row : life.rows) row.shorten(std::max<std::int64_t>(0, row.length() - n + 2));
  }

  void fork(Life& life, int pick) {
    if (life.rows.empty()) return;
    const auto n = static_cast<std::int64_t>(life.rows.size());
    const std::vector<std::int64_t> indices{pick % n, (pick / 7) % n};
    Life other;
    other.cache = std::make_unique<PagedKVCache>(storage_, config_, std::span<const Owner>{});
    other.cache->fork_rows(*life.cache, indices, std::array{next_owner_, next_owner_ + 1});
    next_owner_ += 2;
    for (const std::int64_t index : indices) {
      other.rows.push_back(life.rows[static_cast<std::size_t>(index)]);
      other.rows.back().set_next_query(other.rows.back().length());
    }
    other.appended = life.appended;
    lives_.push_back(std::move(other));
  }

  void keep_rows(Life& life, int pick) {
    const std::size_t n = life.rows.size();
    if (n < 2) return;
    std::vector<std::int64_t> kept;
    std::vector<DenseRow> rows;
    for (std::size_t i = 0; i + 1 < n; ++i) {  // all but one, in another order
      const std::size_t index = (static_cast<std::size_t>(pick) + n - i) % n;
      kept.push_back(static_cast<std::int64_t>(index));
      rows.push_back(life.rows[index]);
    }
    life.cache->keep_rows(kept);
    life.rows = std::move(rows);
  }

  void take_rows(Life& life, int pick) {
    Life& other = lives_[static_cast<std::size_t>(pick) % lives_.size()];
    if (&other == &life || life.rows.size() + other.rows.size() > 5) return;
    life.cache->take_rows(*other.cache);
    for (DenseRow& row : other.rows) row.set_next_query(row.length());
    life.rows.insert(life.rows.end(), other.rows.begin(), other.rows.end());
    life.appended |= other.appended;
    lives_.erase(lives_.begin() + (&other - lives_.data()));
  }

  void check_lengths() {
    for (const Life& life : lives_) {
      std::vector<std::int64_t> lengths;
      for (const DenseRow& row : life.rows) lengths.push_back(row.length());
      RC_ASSERT(life.cache->lengths() == lengths);
    }
  }

  void evaluate(int pick, bool only_start) {
    if (pending_.empty()) return;
    const auto at = pending_.begin() +
                    static_cast<std::ptrdiff_t>(static_cast<std::size_t>(pick) % pending_.size());
    if (only_start) return mx::async_eval(at->got);
    Pending check = std::move(*at);
    pending_.erase(at);
    mx::array numbers = mx::contiguous(check.got);
    mx::eval(numbers);
    RC_ASSERT(numbers.size() == check.expected.size());
    const auto* got = numbers.data<float>();
    for (std::size_t i = 0; i < check.expected.size(); ++i) {
      RC_ASSERT(std::abs(got[i] - check.expected[i]) <= check.tolerance);
    }
  }

  const PagedKVCacheConfig config_;
  const bool grows_;
  const std::shared_ptr<BlockPoolAllocator> pool_;
  const std::shared_ptr<PagedStorage> storage_;
  const std::array<mx::Stream, 2> streams_;
  std::vector<Life> lives_;
  std::vector<Pending> pending_;
  Owner next_owner_ = 1;
};

void run(const PagedKVCacheConfig& config, std::int64_t n_blocks, bool grows) {
  constexpr int kMostOperations = 200;
  const auto operations = *rc::gen::resize(
      kMostOperations, rc::gen::container<std::vector<Operation>>(any_operation()));
  World world(config, n_blocks, grows);
  for (const Operation& operation : operations) world.apply(operation);
  world.finish();
}

TEST(PagedAliasing, ManyCachesOfAGrowingPool) {
  EXPECT_TRUE(rc::check("", [] { run(*any_config(), 2, true); }));
}

TEST(PagedAliasing, ManyCachesOfASmallPool) {
  EXPECT_TRUE(rc::check("", [] { run(*any_config(), 24, false); }));
}

}  // namespace
}  // namespace testing
}  // namespace kvpool
