#pragma once

#include <cstdint>

namespace kvpool::detail {

/// How long a place will be held. Those that go together lie together, so that whole segments become
/// free. kMedium: as long as a raw window; kShort: until the next tokens come.
enum class Stay : std::uint8_t { kLong, kMedium, kShort };

}  // namespace kvpool::detail
