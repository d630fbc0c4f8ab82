// Random sequences of every call, beside a model of the contract.

#include "model.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <array>
#include <limits>
#include <ostream>

namespace kvpool {

static void showValue(const PoolConfig& config, std::ostream& out) {
  out << "block_size " << config.block_size << ", n_blocks " << config.n_blocks << ", separate_kv "
      << config.separate_kv << ", grow_on_exhaustion " << config.grow_on_exhaustion
      << ", max_blocks " << config.max_blocks.value_or(-1);
}

namespace {

using testing::Model;
using testing::Outcome;

enum class Call {
  kAllocate,
  kAllocateKv,
  kShare,
  kFree,
  kRelease,
  kFreeAll,
  kRegister,
  kReleaseOwner,
  kNewOwner,
  kShrink,
  kMarkOne,
  kMarkSeveral,
};

/// One call; the numbers mean what the state at that moment makes of them.
struct Operation {
  Call call;
  int owner;
  int stream;
  int amount;
  std::array<int, 4> picks;
};

std::ostream& operator<<(std::ostream& out, const Operation& op) {
  constexpr std::array kNames{"allocate",  "allocate_kv", "share",    "free",
                              "release",   "free_all",    "register", "release_owner",
                              "new_owner", "shrink",      "mark_one", "mark_several"};
  out << kNames[static_cast<std::size_t>(op.call)] << "(owner " << op.owner << ", stream "
      << op.stream << ", amount " << op.amount << ", picks";
  for (const int pick : op.picks) out << ' ' << pick;
  return out << ')';
}

rc::Gen<Operation> any_operation() {
  const auto call = rc::gen::weightedElement<Call>({{12, Call::kAllocate},
                                                    {6, Call::kAllocateKv},
                                                    {6, Call::kShare},
                                                    {8, Call::kFree},
                                                    {4, Call::kRelease},
                                                    {3, Call::kFreeAll},
                                                    {2, Call::kRegister},
                                                    {2, Call::kReleaseOwner},
                                                    {1, Call::kNewOwner},
                                                    {1, Call::kShrink},
                                                    {5, Call::kMarkOne},
                                                    {3, Call::kMarkSeveral}});
  return rc::gen::construct<Operation>(
      call, rc::gen::inRange(0, 6), rc::gen::inRange(0, 12), rc::gen::inRange(0, 64),
      rc::gen::container<std::array<int, 4>>(rc::gen::inRange(0, 100)));
}

rc::Gen<PoolConfig> any_config() {
  return rc::gen::map(
      rc::gen::tuple(rc::gen::inRange<std::int64_t>(1, 6), rc::gen::inRange<std::int64_t>(1, 25),
                     rc::gen::arbitrary<bool>(), rc::gen::arbitrary<bool>(),
                     rc::gen::maybe(rc::gen::inRange<std::int64_t>(0, 16))),
      [](const auto& parts) {
        const auto& [block_size, n_blocks, separate, grow, extra] = parts;
        PoolConfig config{block_size, n_blocks, separate, grow, std::nullopt};
        if (extra) config.max_blocks = n_blocks + *extra;
        return config;
      });
}

/// RC_ASSERT builds its message even when it holds, which takes most of a long run.
void require(bool holds, const char* what) {
  if (!holds) RC_FAIL(what);
}

/// The pool and its model side by side.
class Pair {
 public:
  explicit Pair(const PoolConfig& config) : config_(config), pool_(config), model_(config) {
    outsiders_ = other_.allocate(Stream::kKey, 1, 0);
    outsiders_.push_back(Block(0));
  }

  void run(const Operation& op) {
    switch (op.call) {
      case Call::kAllocate:
        return allocate({{stream(op), n_tokens(op)}}, op);
      case Call::kAllocateKv:
        return allocate({{Stream::kKey, n_tokens(op)}, {Stream::kValue, n_tokens(op)}}, op);
      case Call::kShare:
        return share(op);
      case Call::kFree:
        return free(op);
      case Call::kRelease:
        return release(op);
      case Call::kFreeAll:
        pool_.free_all(owner(op));
        return model_.free_all(owner(op));
      case Call::kRegister:
        return register_owner(owner(op));
      case Call::kReleaseOwner:
        pool_.release_owner(owner(op));
        model_.registered.erase(owner(op));
        return;
      case Call::kNewOwner:
        return new_owner(op);
      case Call::kShrink:
        return shrink(op);
      case Call::kMarkOne:
        return mark_one(op);
      case Call::kMarkSeveral:
        return mark_several(op);
    }
  }

  void check() const {
    const AllocationStats stats = pool_.stats();
    require(stats == model_.counted(), "stats()");
    require(stats.blocks_in_use() == model_.in_use(), "blocks in use");
    require(stats.n_blocks == config_.n_blocks + stats.n_grown - stats.n_retired,
            "the sum of blocks");
    std::int64_t n_free = 0;
    for (const auto& [stream, list] : model_.free_lists) {
      require(pool_.n_free(stream) == list.size(), "n_free()");
      n_free += pool_.n_free(stream);
    }
    require(n_free + stats.blocks_in_use() == stats.n_blocks, "free + in use = blocks");
    require(pool_.history() == model_.history, "history()");
    check_owners(stats);
    check_handles();
  }

 private:
  /// Freed handles that are still looked at, beside all live ones.
  static constexpr std::size_t kRemembered = 48;

  Owner owner(const Operation& op) const {
    constexpr std::array<Owner, 4> kOwners{1, 2, std::numeric_limits<Owner>::max(),
                                           std::numeric_limits<Owner>::min()};
    const auto i = static_cast<std::size_t>(op.owner);
    return i < kOwners.size() ? kOwners[i] : new_owners_[i - kOwners.size()];
  }

  static Stream stream(const Operation& op) {
    return op.stream == 0 ? Stream::kKeyValue : op.stream % 2 == 0 ? Stream::kKey : Stream::kValue;
  }

  std::int64_t n_tokens(const Operation& op) const {
    switch (op.amount) {
      case 60:
        return 0;
      case 61:
        return -1;
      case 62:
        return std::numeric_limits<std::int64_t>::max();
      case 63:
        return std::numeric_limits<std::int64_t>::min();
      default:
        return 1 + op.amount % (5 * config_.block_size);
    }
  }

  struct Picked {
    std::vector<Block> blocks;
    std::vector<std::size_t> numbers;
    bool outsider = false;
    bool stale = false;
    bool freed = false;
  };

  /// Live ones, now and then a freed one or one of another pool; duplicates as they come.
  Picked pick(const Operation& op, std::size_t n) const {
    Picked picked;
    for (std::size_t i = 0; i < n; ++i) {
      const auto p = static_cast<std::size_t>(op.picks[i]);
      const auto& from = p % 8 == 7 || live_.empty() ? freed_ : live_;
      if (p == 99 || from.empty()) {
        picked.outsider = true;
        picked.blocks.push_back(outsiders_[i % 2]);
        continue;
      }
      const std::size_t number = from[p % from.size()];
      picked.stale |= model_.stale(number);
      picked.freed |= !model_.handles[number].live;
      picked.numbers.push_back(number);
      picked.blocks.push_back(blocks_.at(number));
    }
    return picked;
  }

  static std::size_t n_picks(const Operation& op) {
    return static_cast<std::size_t>(op.amount) % 5;
  }

  template <typename Action>
  static Outcome outcome_of(Action&& action) {
    try {
      action();
      return Outcome::kDone;
    } catch (const OwnerAlreadyActiveError&) {
      return Outcome::kOwnerActive;
    } catch (const std::invalid_argument&) {
      return Outcome::kInvalid;
    } catch (const BlockPoolExhaustedError&) {
      return Outcome::kExhausted;
    }
  }

  static Outcome valid_if(bool valid) { return valid ? Outcome::kDone : Outcome::kInvalid; }

  void adopt(const Block& block) {
    const std::size_t number = model_.handles.size() - 1;
    RC_ASSERT(generations_.insert(block.generation()).second);
    const auto [life, is_new] = lives_.emplace(model_.handles[number].life, block.life());
    RC_ASSERT(life->second == block.life());
    if (is_new) RC_ASSERT(known_lives_.insert(block.life()).second);
    blocks_.emplace(number, block);
    live_.push_back(number);
  }

  void allocate(const std::vector<Model::Part>& parts, const Operation& op) {
    const std::string format = op.picks[0] % 2 == 0 ? "fp16" : "int4";
    std::vector<std::vector<Block>> got;
    const Outcome outcome = outcome_of([&] {
      if (parts.size() == 1) {
        got.push_back(pool_.allocate(parts[0].stream, parts[0].n_tokens, owner(op), format));
      } else {
        auto both = pool_.allocate_kv(parts[0].n_tokens, owner(op), format);
        got = {std::move(both.first), std::move(both.second)};
      }
    });
    RC_ASSERT(outcome == model_.can_allocate(parts));
    if (outcome != Outcome::kDone) return;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      std::int64_t n_left = parts[i].n_tokens;
      RC_ASSERT(static_cast<std::int64_t>(got[i].size()) == model_.n_blocks_for(n_left));
      for (const Block& block : got[i]) {
        const auto expected = model_.next_block(parts[i].stream);
        const bool is_new = ids_.insert(block.block_id()).second;
        RC_ASSERT(is_new == !expected.has_value());
        RC_ASSERT(block.block_id() == expected.value_or(block.block_id()));
        const std::int64_t n_used = std::min(n_left, config_.block_size);
        n_left -= n_used;
        model_.hand_out(parts[i].stream, block.block_id(), n_used, owner(op), format);
        adopt(block);
      }
    }
    model_.end_allocate();
  }

  void share(const Operation& op) {
    const Picked picked = pick(op, n_picks(op));
    std::vector<Block> got;
    const Outcome outcome = outcome_of([&] { got = pool_.share(picked.blocks, owner(op)); });
    RC_ASSERT(outcome == valid_if(!picked.outsider && !picked.freed));
    if (outcome != Outcome::kDone) return;
    RC_ASSERT(got.size() == picked.blocks.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      RC_ASSERT(got[i].block_id() == picked.blocks[i].block_id());
      model_.hold(got[i].block_id(), owner(op));
      adopt(got[i]);
    }
  }

  void free(const Operation& op) {
    const Picked picked = pick(op, n_picks(op));
    const Outcome outcome = outcome_of([&] { pool_.free(picked.blocks); });
    RC_ASSERT(outcome == valid_if(!picked.outsider && !picked.stale));
    if (outcome == Outcome::kDone) model_.let_go(picked.numbers);
  }

  void release(const Operation& op) {
    const Picked picked = pick(op, n_picks(op));
    pool_.release(picked.blocks);
    model_.let_go(picked.numbers);
  }

  void register_owner(Owner id) {
    const Outcome outcome = outcome_of([&] { pool_.register_owner(id); });
    RC_ASSERT(outcome == (model_.active(id) ? Outcome::kOwnerActive : Outcome::kDone));
    if (outcome == Outcome::kDone) model_.registered.insert(id);
  }

  void new_owner(const Operation& op) {
    const Owner id = pool_.new_owner();
    RC_ASSERT(!model_.active(id));
    RC_ASSERT(given_.insert(id).second);
    new_owners_[static_cast<std::size_t>(op.owner) % 2] = id;
  }

  void shrink(const Operation& op) {
    const std::int64_t target = op.amount - 1;
    std::int64_t n_retired = 0;
    const Outcome outcome = outcome_of([&] { n_retired = pool_.shrink(stream(op), target); });
    RC_ASSERT(outcome == valid_if(target >= 0 && model_.resolve(stream(op))));
    if (outcome == Outcome::kDone) RC_ASSERT(n_retired == model_.shrink(stream(op), target));
  }

  void mark_one(const Operation& op) {
    const Picked picked = pick(op, 1);
    const std::int64_t n_used = op.amount % (config_.block_size + 3) - 1;
    const Outcome outcome = outcome_of([&] { pool_.mark_used(picked.blocks[0], n_used); });
    RC_ASSERT(outcome == valid_if(n_used >= 0 && n_used <= config_.block_size && !picked.outsider &&
                                  !picked.stale));
    if (outcome == Outcome::kDone) mark(picked.numbers[0], n_used);
  }

  void mark_several(const Operation& op) {
    const Picked picked = pick(op, n_picks(op));
    const auto n_slots = static_cast<std::int64_t>(picked.blocks.size()) * config_.block_size;
    std::int64_t n_left = op.picks[3] % (n_slots + 3) - 1;
    const bool fits = n_left >= 0 && n_left <= n_slots;
    const Outcome outcome = outcome_of([&] { pool_.mark_used(picked.blocks, n_left); });
    RC_ASSERT(outcome == valid_if(fits && !picked.outsider && !picked.stale));
    if (outcome != Outcome::kDone) return;
    for (const std::size_t number : picked.numbers) {
      const std::int64_t n_used = std::min(n_left, config_.block_size);
      n_left -= n_used;
      mark(number, n_used);
    }
  }

  void mark(std::size_t number, std::int64_t n_used) {
    const Model::Handle& handle = model_.handles[number];
    if (handle.live) model_.blocks.at(handle.block).n_used = n_used;
  }

  void check_owners(const AllocationStats& stats) const {
    std::set<Owner> owners;
    for (int i = 0; i < 6; ++i) owners.insert(owner({Call::kFreeAll, i, 0, 0, {}}));
    for (const auto& [id, own] : model_.owned) owners.insert(id);
    std::set<BlockId> held;
    for (const Owner id : owners) {
      const auto listed = pool_.blocks_for(id);
      const auto own = model_.owned.find(id);
      require(listed.size() == (own == model_.owned.end() ? 0 : own->second.size()),
              "the length of blocks_for()");
      for (std::size_t j = 0; j < listed.size(); ++j) {
        require(listed[j].generation() == blocks_.at(own->second[j]).generation(),
                "the order of blocks_for()");
        held.insert(listed[j].block_id());
      }
    }
    require(static_cast<std::int64_t>(held.size()) == stats.blocks_in_use(),
            "blocks held by several owners count once");
  }

  void check_handle(std::size_t number) const {
    const Model::Handle& expected = model_.handles[number];
    const Block& block = blocks_.at(number);
    require(block.block_id() == expected.block, "block_id()");
    require(block.format() == expected.format, "format()");
    require(block.live() == expected.live, "live()");
    require(block.owner() == (expected.live ? std::optional(expected.owner) : std::nullopt),
            "owner()");
    const Model::Block* now = expected.live ? &model_.blocks.at(expected.block) : nullptr;
    require(block.n_used() == (now ? now->n_used : 0), "n_used()");
    require(pool_.ref_count(block) == (now ? static_cast<std::int64_t>(now->holders.size()) : 0),
            "ref_count()");
    require(pool_.is_held(block) == model_.held(number), "is_held()");
    if (now) require(block.stream() == now->stream, "stream()");
  }

  void check_handles() const {
    for (const std::size_t number : live_) check_handle(number);
    for (const std::size_t number : freed_) check_handle(number);
  }

 public:
  /// Sorts the handles anew into live and freed, and forgets the oldest of the freed.
  void settle() {
    std::vector<std::size_t> still_live;
    for (const std::size_t number : live_) {
      (model_.handles[number].live ? still_live : freed_).push_back(number);
    }
    live_ = std::move(still_live);
    while (freed_.size() > kRemembered) {
      blocks_.erase(freed_.front());
      freed_.erase(freed_.begin());
    }
  }

 private:
  PoolConfig config_;
  BlockPoolAllocator pool_;
  BlockPoolAllocator other_;
  Model model_;
  std::vector<Block> outsiders_;
  std::map<std::size_t, Block> blocks_;
  std::vector<std::size_t> live_;
  std::vector<std::size_t> freed_;
  std::array<Owner, 2> new_owners_{3, 4};
  std::set<Owner> given_;
  std::set<std::uint64_t> generations_;
  std::map<int, std::uint64_t> lives_;
  std::set<std::uint64_t> known_lives_;
  std::set<BlockId> ids_;
};

TEST(Model, ThePoolDoesWhatItsContractSays) {
  constexpr int kLongest = 3000;
  std::int64_t n_operations = 0;
  ASSERT_TRUE(rc::check("the pool and its model agree after every operation", [&] {
    const PoolConfig config = *any_config();
    const auto operations =
        *rc::gen::resize(kLongest, rc::gen::container<std::vector<Operation>>(any_operation()));
    Pair pair(config);
    for (const Operation& operation : operations) {
      pair.run(operation);
      pair.settle();
      pair.check();
      ++n_operations;
    }
  }));
  EXPECT_GE(n_operations, 100'000);
}

}  // namespace
}  // namespace kvpool
