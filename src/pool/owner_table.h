#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "kvpool/block.h"

namespace kvpool::detail {

/// An active owner: what it holds, in the order in which it got it.
struct OwnerEntry {
  Owner owner = 0;
  std::size_t hash = 0;
  std::int64_t n_holds = 0;
  BlockHold* first = nullptr;
  BlockHold* last = nullptr;
  OwnerEntry* next_spare = nullptr;
  bool registered = false;
};

/// Owner id → entry, with addresses that stay. Open addressing with linear probing and backward
/// shift on erase, so that owners that come and go leave nothing behind; entries are recycled, so
/// that a request's life allocates nothing once the table is warm.
class OwnerTable {
 public:
  OwnerTable() : slots_(kMinSlots, nullptr) {}

  OwnerEntry* find(Owner owner) const noexcept {
    for (std::size_t i = hash(owner) & mask();; i = next(i)) {
      OwnerEntry* entry = slots_[i];
      if (entry == nullptr || entry->owner == owner) return entry;
    }
  }

  /// Makes the following insert() unable to fail.
  void reserve_one() {
    if (spare_ == nullptr) spare_ = &entries_.emplace_back();
    if ((size_ + 1) * 2 > slots_.size()) rehash(slots_.size() * 2);
  }

  /// `owner` must be absent.
  OwnerEntry& insert(Owner owner) noexcept {
    OwnerEntry* entry = spare_;
    spare_ = entry->next_spare;
    *entry = OwnerEntry{.owner = owner, .hash = hash(owner)};
    place(entry);
    ++size_;
    return *entry;
  }

  void erase(OwnerEntry& entry) noexcept {
    std::size_t hole = entry.hash & mask();
    while (slots_[hole] != &entry) hole = next(hole);
    for (std::size_t i = next(hole); slots_[i] != nullptr; i = next(i)) {
      const std::size_t distance = (i - slots_[i]->hash) & mask();
      if (distance >= ((i - hole) & mask())) {
        slots_[hole] = slots_[i];
        hole = i;
      }
    }
    slots_[hole] = nullptr;
    --size_;
    entry.next_spare = spare_;
    spare_ = &entry;
  }

 private:
  static constexpr std::size_t kMinSlots = 16;

  std::size_t mask() const noexcept { return slots_.size() - 1; }
  std::size_t next(std::size_t i) const noexcept { return (i + 1) & mask(); }

  /// Finaliser of SplitMix64 (Steele, Lea, Flood 2014): neighbouring ids must not cluster.
  static std::size_t hash(Owner owner) noexcept {
    auto x = static_cast<std::uint64_t>(owner);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return static_cast<std::size_t>(x ^ (x >> 31));
  }

  void place(OwnerEntry* entry) noexcept {
    std::size_t i = entry->hash & mask();
    while (slots_[i] != nullptr) i = next(i);
    slots_[i] = entry;
  }

  void rehash(std::size_t n_slots) {
    std::vector<OwnerEntry*> old(n_slots, nullptr);
    old.swap(slots_);
    for (OwnerEntry* entry : old) {
      if (entry != nullptr) place(entry);
    }
  }

  std::vector<OwnerEntry*> slots_;
  std::size_t size_ = 0;
  std::deque<OwnerEntry> entries_;
  OwnerEntry* spare_ = nullptr;
};

}  // namespace kvpool::detail
