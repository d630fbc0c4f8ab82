#pragma once

#include <mlx/array.h>

#include <cstdint>

namespace kvpool {

/// The keys and values of one head of one request, appended and attended one vector at a time.
/// Not thread-safe.
class KVCache {
 public:
  virtual ~KVCache() = default;

  /// @param k  (d,)
  virtual void append_key(const mlx::core::array& k) = 0;
  /// @param v  (d,)
  virtual void append_value(const mlx::core::array& v) = 0;
  /// Attention of one query over all tokens, with scores divided by sqrt(d).
  /// @param q  (d,)
  /// @return (d,)
  virtual mlx::core::array attend(const mlx::core::array& q) = 0;
  /// Bytes that the stored tokens take.
  virtual std::int64_t memory_bytes() const = 0;
  /// Forgets all tokens.
  virtual void reset() = 0;
  /// Tokens that have a key and a value.
  virtual std::int64_t size() const = 0;

  /// Takes back the last key, which must have no value yet.
  /// @return false if this cache cannot; then nothing has changed.
  virtual bool drop_last_key() { return false; }
  /// append_key() and append_value(). If the value fails the key is taken back, where the cache can.
  virtual void append(const mlx::core::array& k, const mlx::core::array& v);
};

}  // namespace kvpool
