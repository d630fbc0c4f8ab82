#include "kvpool/block_pool.h"

#include "pool/pool_state.h"

namespace kvpool {

BlockPoolAllocator::BlockPoolAllocator(PoolConfig config)
    : config_(config), state_(std::make_unique<detail::PoolState>(config)) {}

BlockPoolAllocator::~BlockPoolAllocator() = default;

void BlockPoolAllocator::register_owner(Owner owner) { state_->register_owner(owner); }

void BlockPoolAllocator::release_owner(Owner owner) { state_->release_owner(owner); }

Owner BlockPoolAllocator::new_owner() { return state_->new_owner(); }

std::vector<Block> BlockPoolAllocator::allocate(Stream stream, std::int64_t n_tokens, Owner owner,
                                                std::string_view format) {
  return state_->allocate(stream, n_tokens, owner, format);
}

std::pair<std::vector<Block>, std::vector<Block>> BlockPoolAllocator::allocate_kv(
    std::int64_t n_tokens, Owner owner, std::string_view format) {
  return state_->allocate_kv(n_tokens, owner, format);
}

std::vector<Block> BlockPoolAllocator::share(std::span<const Block> blocks, Owner owner) {
  return state_->share(blocks, owner);
}

void BlockPoolAllocator::free(std::span<const Block> blocks) { state_->free(blocks); }

void BlockPoolAllocator::release(std::span<const Block> blocks) noexcept {
  state_->release(blocks);
}

void BlockPoolAllocator::free_all(Owner owner) { state_->free_all(owner); }

std::vector<Block> BlockPoolAllocator::blocks_for(Owner owner) const {
  return state_->blocks_for(owner);
}

std::int64_t BlockPoolAllocator::ref_count(const Block& block) const {
  return state_->ref_count(block);
}

bool BlockPoolAllocator::is_held(const Block& block) const { return state_->is_held(block); }

std::int64_t BlockPoolAllocator::n_free(Stream stream) const { return state_->n_free(stream); }

std::int64_t BlockPoolAllocator::shrink(Stream stream, std::int64_t target_free) {
  return state_->shrink(stream, target_free);
}

void BlockPoolAllocator::mark_used(const Block& block, std::int64_t n_used) {
  state_->mark_used({&block, 1}, n_used, "n_used");
}

void BlockPoolAllocator::mark_used(std::span<const Block> blocks, std::int64_t n_tokens) {
  state_->mark_used(blocks, n_tokens, "n_tokens");
}

AllocationStats BlockPoolAllocator::stats() const { return state_->stats(); }

std::vector<AllocationStats> BlockPoolAllocator::history() const { return state_->history(); }

}  // namespace kvpool
