#include "sequence/sequence.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "backend/native.h"
#include "util/concat.h"
#include "util/sole_holder.h"

namespace kvpool::detail {

namespace {

constexpr int kRoles[] = {0, 1};

/// Whether a fork holds the bytes too, or a gather that has not run.
bool is_shared(const TokenBlock& block) noexcept {
  return !is_sole_holder(block.bytes[0]) || !is_sole_holder(block.bytes[1]);
}

/// Makes `n` push_backs unable to fail, at a cost that is constant for each over time.
template <typename T>
void make_room(std::vector<T>& list, std::size_t n) {
  if (list.capacity() - list.size() < n) list.reserve(std::max(list.size() + n, 2 * list.size()));
}

/// A block that was freed elsewhere and is somebody else's by now is passed over.
void mark_used(BlockPoolAllocator& pool, const Block& hold, std::int64_t n_tokens) noexcept {
  try {
    pool.mark_used(hold, n_tokens);
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace

Sequence::Sequence(std::shared_ptr<BlockPoolAllocator> pool, std::shared_ptr<BlockMemory> memory,
                   Owner owner)
    : pool_(std::move(pool)), memory_(std::move(memory)), owner_(owner) {}

Sequence::~Sequence() { clear(); }

void Sequence::clear() noexcept {
  for (const int role : kRoles) {
    pool_->release(holds_[role]);
    holds_[role].clear();
  }
  blocks_ = std::make_shared<BlockList>();
  rewritten(0);
  length_ = 0;
  n_settled_ = 0;
}

void Sequence::rewritten(std::size_t first) noexcept {
  view_.reset();
  first_rewritten_ = std::min(first_rewritten_, first);
}

/// The list for changes: a copy if a fork or a snapshot has the present one. Their hold on the bytes
/// then shows in the bytes' own counts.
BlockList& Sequence::own_blocks() {
  if (!is_sole_holder(blocks_)) blocks_ = std::make_shared<BlockList>(*blocks_);
  return *blocks_;
}

std::shared_ptr<const AttendView> Sequence::view(const LayerFormat& format) {
  const BlockList& blocks = *blocks_;
  if (view_ == nullptr) view_ = std::make_shared<AttendView>();
  const std::size_t n_seen = view_->blocks.size();
  const bool grew =
      n_seen < blocks.size() ||
      (n_seen > 0 && view_->blocks.back().n_tokens != blocks[n_seen - 1].n_tokens);
  if (!grew) return view_;
  if (!is_sole_holder(view_)) view_ = std::make_shared<AttendView>(*view_);
  if (n_seen > 0) view_->blocks.back().n_tokens = blocks[n_seen - 1].n_tokens;
  for (std::size_t i = n_seen; i < blocks.size(); ++i) {
    const TokenBlock& block = blocks[i];
    view_->blocks.push_back({native(block.bytes[0]).address(), native(block.bytes[1]).address(),
                             block.position, block.n_tokens, format.raw[0].block_size,
                             block.format[0], block.format[1]});
    for (const auto& bytes : block.bytes) keep(view_->buffers, bytes);
  }
  return view_;
}

/// The first block that the next query can see.
std::size_t Sequence::first_needed(const LayerFormat& format) const noexcept {
  if (format.sliding == 0) return 0;
  std::size_t block = 0;
  while (block < blocks_->size() && (*blocks_)[block].end() <= length_ - format.sliding + 1) {
    ++block;
  }
  return block;
}

bool Sequence::is_open(const TokenBlock& block, const LayerFormat& format) const noexcept {
  return block.n_tokens < format.raw[0].block_size && block.format[0] == format.raw[0].format &&
         block.format[1] == format.raw[1].format;
}

Sequence::Plan Sequence::plan_append(const LayerFormat& format, std::int64_t batch,
                                     std::int64_t first_row, std::int64_t n_tokens,
                                     AppendTasks& tasks) {
  Plan plan(*this);
  BlockList& blocks = own_blocks();
  const std::int32_t block_size = format.raw[0].block_size;
  plan.n_dropped_ = n_tokens > 0 ? first_needed(format) : 0;

  const bool open = !blocks.empty() && plan.n_dropped_ < blocks.size() && n_tokens > 0 &&
                    is_open(blocks.back(), format);
  plan.into_open_ = open ? static_cast<std::int32_t>(std::min<std::int64_t>(
                               n_tokens, block_size - blocks.back().n_tokens))
                         : 0;
  const bool copies = open && is_shared(blocks.back());
  const std::int64_t n_new = (n_tokens - plan.into_open_ + block_size - 1) / block_size;

  if (const std::int64_t n_blocks = n_new + (copies ? 1 : 0); n_blocks > 0) {
    auto taken = pool_->allocate_kv(n_blocks * block_size, owner_,
                                    codec::name(format.sealed[0].format.code));
    plan.taken_[0] = std::move(taken.first);
    plan.taken_[1] = std::move(taken.second);
  }

  plan.n_settled_ = std::max(n_settled_, plan.n_dropped_);
  if (format.seals(0) || format.seals(1)) {
    for (; plan.n_settled_ < blocks.size(); ++plan.n_settled_) {
      const TokenBlock& block = blocks[plan.n_settled_];
      if (block.end() > length_ - format.window || is_open(block, format)) break;
      if (block.position < format.sink || block.n_tokens < block_size) continue;
      for (const int role : kRoles) {
        if (!format.seals(role) || !(block.format[role] == format.raw[role].format)) continue;
        auto bytes = block.bytes[role]->sealed();
        if (bytes == nullptr) {
          bytes = memory_->take(format.block_bytes(format.sealed[role]));
          block.bytes[role]->set_sealed(bytes);
          tasks.seals.push_back({block.bytes[role], bytes, role});
        }
        plan.sealed_.push_back(
            {plan.n_settled_, role, std::move(bytes), format.sealed[role].format});
      }
    }
  }

  std::shared_ptr<BlockBytes> target[2];
  if (open) {
    for (const int role : kRoles) {
      target[role] = blocks.back().bytes[role];
      if (!copies) continue;
      const std::size_t bytes = format.block_bytes(format.raw[role]);
      plan.own_copy_[role] = memory_->take(bytes);
      tasks.copies.push_back({target[role], plan.own_copy_[role], bytes});
      target[role] = plan.own_copy_[role];
    }
    tasks.writes.push_back({{target[0], target[1]}, batch, first_row, blocks.back().n_tokens,
                            plan.into_open_});
  }
  std::int64_t done = plan.into_open_;
  plan.added_.reserve(static_cast<std::size_t>(n_new));
  for (std::int64_t i = 0; i < n_new; ++i) {
    TokenBlock block;
    block.position = length_ + done;
    block.n_tokens = static_cast<std::int32_t>(std::min<std::int64_t>(block_size, n_tokens - done));
    Stay stay = Stay::kLong;
    if (block.position >= format.sink) {
      stay = block.end() <= length_ + n_tokens - format.window ? Stay::kShort : Stay::kMedium;
    }
    for (const int role : kRoles) {
      block.bytes[role] = memory_->take(format.block_bytes(format.raw[role]),
                                        format.seals(role) ? stay : Stay::kLong);
      block.format[role] = format.raw[role].format;
    }
    tasks.writes.push_back(
        {{block.bytes[0], block.bytes[1]}, batch, first_row + done, 0, block.n_tokens});
    done += block.n_tokens;
    plan.added_.push_back(std::move(block));
  }

  make_room(blocks, plan.added_.size());
  for (const int role : kRoles) make_room(holds_[role], plan.added_.size());
  return plan;
}

Sequence::Plan::~Plan() {
  for (const int role : kRoles) {
    if (!taken_[role].empty()) sequence_->pool_->release(taken_[role]);
  }
}

void Sequence::Plan::commit() noexcept {
  Sequence& s = *sequence_;
  BlockList& blocks = *s.blocks_;
  if (n_dropped_ > 0) {
    s.rewritten(0);
  } else if (!sealed_.empty()) {
    s.rewritten(sealed_.front().block);
  } else if (own_copy_[0] != nullptr) {
    s.rewritten(blocks.size() - 1);
  }
  for (Sealed& sealed : sealed_) {
    blocks[sealed.block].bytes[sealed.role] = std::move(sealed.bytes);
    blocks[sealed.block].format[sealed.role] = sealed.format;
  }
  std::size_t n_copied = 0;
  if (own_copy_[0] != nullptr) {
    for (const int role : kRoles) {
      blocks.back().bytes[role] = std::move(own_copy_[role]);
      s.pool_->release({&s.holds_[role].back(), 1});
      s.holds_[role].back() = taken_[role].front();
    }
    n_copied = 1;
  }
  if (into_open_ > 0) {
    blocks.back().n_tokens += into_open_;
    s.length_ += into_open_;
    for (const int role : kRoles) {
      blocks.back().bytes[role]->set_sealed(nullptr);
      mark_used(*s.pool_, s.holds_[role].back(), blocks.back().n_tokens);
    }
  }
  for (std::size_t i = 0; i < added_.size(); ++i) {
    s.length_ += added_[i].n_tokens;
    for (const int role : kRoles) {
      const Block& hold = taken_[role][n_copied + i];
      if (added_[i].n_tokens < s.pool_->config().block_size) {
        mark_used(*s.pool_, hold, added_[i].n_tokens);
      }
      s.holds_[role].push_back(hold);
    }
    blocks.push_back(std::move(added_[i]));
  }
  taken_[0].clear();
  taken_[1].clear();

  s.n_settled_ = n_settled_ - n_dropped_;
  if (n_dropped_ == 0) return;
  const auto n = static_cast<std::ptrdiff_t>(n_dropped_);
  for (const int role : kRoles) {
    s.pool_->release(std::span(s.holds_[role]).first(n_dropped_));
    s.holds_[role].erase(s.holds_[role].begin(), s.holds_[role].begin() + n);
  }
  blocks.erase(blocks.begin(), blocks.begin() + n);
}

void Sequence::shorten(std::int64_t length) {
  BlockList& blocks = own_blocks();
  while (!blocks.empty() && blocks.back().position >= length) {
    for (const int role : kRoles) {
      pool_->release({&holds_[role].back(), 1});
      holds_[role].pop_back();
    }
    blocks.pop_back();
  }
  if (!blocks.empty() && blocks.back().end() > length) {
    blocks.back().n_tokens = static_cast<std::int32_t>(length - blocks.back().position);
    for (const int role : kRoles) {
      if (pool_->ref_count(holds_[role].back()) == 1) {
        mark_used(*pool_, holds_[role].back(), blocks.back().n_tokens);
      }
    }
  }
  rewritten(blocks.empty() ? 0 : blocks.size() - 1);
  length_ = length;
  n_settled_ = std::min(n_settled_, blocks.size());
}

void Sequence::fork_from(const Sequence& other) {
  std::vector<Block> shared[2];
  const std::shared_ptr<BlockList> blocks = other.blocks_;
  shared[0] = pool_->share(other.holds_[0], owner_);
  try {
    shared[1] = pool_->share(other.holds_[1], owner_);
  } catch (...) {
    pool_->release(shared[0]);
    throw;
  }
  clear();
  blocks_ = blocks;
  for (const int role : kRoles) holds_[role] = std::move(shared[role]);
  length_ = other.length_;
  n_settled_ = other.n_settled_;
}

void Sequence::restore(const LayerFormat& format, BlockList described) {
  const auto blocks = std::make_shared<BlockList>(std::move(described));
  std::vector<Block> taken[2];
  if (!blocks->empty()) {
    auto [keys, values] = pool_->allocate_kv(
        static_cast<std::int64_t>(blocks->size()) * format.raw[0].block_size, owner_,
        codec::name(format.sealed[0].format.code));
    taken[0] = std::move(keys);
    taken[1] = std::move(values);
  }
  try {
    for (TokenBlock& block : *blocks) {
      for (const int role : kRoles) {
        block.bytes[role] =
            memory_->take(format.block_bytes(format.part(role, block.format[role])));
      }
    }
  } catch (...) {
    for (const int role : kRoles) pool_->release(taken[role]);
    throw;
  }
  clear();
  blocks_ = blocks;
  for (const int role : kRoles) holds_[role] = std::move(taken[role]);
  for (std::size_t i = 0; i < blocks_->size(); ++i) {
    for (const int role : kRoles) mark_used(*pool_, holds_[role][i], (*blocks_)[i].n_tokens);
  }
  length_ = blocks_->empty() ? 0 : blocks_->back().end();
}

BlockList described_blocks(const LayerFormat& format, std::span<const SavedBlock> saved) {
  constexpr std::int64_t kMaxLength = std::numeric_limits<std::int32_t>::max();
  const std::int64_t block_size = format.raw[0].block_size;
  BlockList blocks;
  std::int64_t next = saved.empty() ? 0 : saved.front().position;
  if (next < 0 || next > kMaxLength) {
    throw std::invalid_argument(concat("PagedKVCache: the first saved block must be at 0 to ",
                                       kMaxLength, ", got ", next));
  }
  for (const SavedBlock& block : saved) {
    if (block.position != next || block.n_tokens < 1 || block.n_tokens > block_size) {
      throw std::invalid_argument(concat(
          "PagedKVCache: saved blocks must follow each other with 1 to ", block_size,
          " tokens each; got ", block.n_tokens, " at ", block.position, " where ", next,
          " comes next"));
    }
    TokenBlock& described = blocks.emplace_back();
    described.position = block.position;
    described.n_tokens = static_cast<std::int32_t>(block.n_tokens);
    for (const int role : kRoles) {
      if (block.sealed[role] && !format.seals(role)) {
        throw std::invalid_argument(concat("PagedKVCache: a saved block of ",
                                           role == 0 ? "keys" : "values", " at ", block.position,
                                           " is encoded, this cache's are all raw"));
      }
      described.format[role] = (block.sealed[role] ? format.sealed : format.raw)[role].format;
    }
    next = described.end();
    if (next > kMaxLength) {
      throw std::invalid_argument(
          concat("PagedKVCache: saved blocks must end at ", kMaxLength, " at most, got ", next));
    }
  }
  const std::int64_t most_gone =
      format.sliding > 0 ? std::max<std::int64_t>(0, next - format.sliding + 1) : 0;
  if (!blocks.empty() && blocks.front().position > most_gone) {
    throw std::invalid_argument(concat("PagedKVCache: the first saved block must be at 0 to ",
                                       most_gone, ", got ", blocks.front().position));
  }
  return blocks;
}

}  // namespace kvpool::detail
