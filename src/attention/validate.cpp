#include <stdexcept>

#include "attention/attention.h"
#include "util/concat.h"

namespace kvpool::attention {
namespace {

template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) throw std::invalid_argument(detail::concat("attention: ", parts...));
}

void validate_sequence(const Arguments& arguments, std::size_t index) {
  const Mask& mask = arguments.mask;
  std::int64_t next = 0;
  const BlockRef* last = nullptr;
  for (const BlockRef& block : arguments.sequences[index].blocks) {
    require(block.keys != nullptr && block.values != nullptr, "sequence ", index,
            " has a block without memory");
    require(block.n_tokens >= 1 && block.n_tokens <= block.block_size, "sequence ", index,
            " has a block with ", block.n_tokens, " tokens of ", block.block_size);
    require(last == nullptr || block.position >= next, "sequence ", index,
            " has a block at position ", block.position, " after one that ends at ", next);
    next = block.position + block.n_tokens;
    if (last == nullptr || last->block_size != block.block_size ||
        last->key_format != block.key_format || last->value_format != block.value_format) {
      using enum codec::Role;
      for (int head = 0; head < arguments.n_kv_heads; ++head) {
        codec::validate({block.key_format, kKeys, block.block_size, arguments.head_dim, head});
        codec::validate({block.value_format, kValues, block.block_size, arguments.value_dim, head});
      }
    }
    last = &block;
    if (mask.kind != Mask::Kind::kNone) {
      require(block.position >= mask.first_position && next - mask.first_position <= mask.n_keys,
              "the mask covers positions ", mask.first_position, " to ",
              mask.first_position + mask.n_keys, ", sequence ", index, " has a block from ",
              block.position, " to ", next);
    }
  }
}

}  // namespace

Strides contiguous(int n_heads, int n_queries, int dim) noexcept {
  const std::int64_t head = std::int64_t{n_queries} * dim;
  return {n_heads * head, head, dim};
}

void validate(const Arguments& arguments) {
  require(arguments.n_kv_heads >= 1, "n_kv_heads must be at least 1, got ", arguments.n_kv_heads);
  require(arguments.n_heads >= 1 && arguments.n_heads % arguments.n_kv_heads == 0,
          "n_heads must be a multiple of n_kv_heads (", arguments.n_kv_heads, "), got ",
          arguments.n_heads);
  require(arguments.n_queries >= 0, "n_queries must not be negative, got ", arguments.n_queries);
  require(arguments.window >= 0, "window must not be negative, got ", arguments.window);
  require(arguments.soft_cap >= 0.0F, "soft_cap must not be negative, got ", arguments.soft_cap);
  require(arguments.n_queries == 0 || arguments.sequences.empty() ||
              (arguments.queries != nullptr && arguments.out != nullptr),
          "queries and out must not be null");
  require(arguments.mask.kind == Mask::Kind::kNone || arguments.mask.data != nullptr,
          "the mask has no data");
  for (std::size_t i = 0; i < arguments.sequences.size(); ++i) validate_sequence(arguments, i);
}

}  // namespace kvpool::attention
