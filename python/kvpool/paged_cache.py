"""The paged caches under mlx_lm's cache protocol: one request's, and a batch of requests'."""

from __future__ import annotations

import weakref
from typing import Any

import mlx.core as mx

from . import _route
from ._core import BlockPoolAllocator, PagedKVCacheConfig, PagedKVCacheCore, PagedStorage, PoolConfig
from .paged_state import PagedState, remember_codebooks, restore, saved_config


class CausalMask(str):
    """What the next tokens' queries see, by position: for a routed layer, whose blocks know theirs.

    It reads "causal" only where that says it all. Elsewhere (a window, rows of different length) a layer that is
    not routed has to ask for the array; MLX refuses the text.
    """

    window: int

    def __new__(cls, starts: list[int], lengths: list[int], N: int, window: int, sliding: int) -> CausalMask:
        """
        Args:
            starts: position of the first query, a row.
            lengths: tokens that the row has by then.
            N: queries.
            window: tokens that a query sees, itself among them; 0: all before it.
            sliding: tokens that a query can see of those that are kept, likewise.
        """
        plain = not window and all(start + N == length == lengths[0] for start, length in zip(starts, lengths))
        mask = super().__new__(cls, "causal" if plain else "causal, by position")
        mask.window, mask._sliding = window, sliding
        mask._starts, mask._lengths, mask._n = starts, lengths, N
        return mask

    def array(self) -> Any:
        """The same for what ``update_and_fetch`` returns: bool, (B, 1, N, tokens)."""
        kept = [max(0, start - self._sliding + 1) if self._sliding else 0 for start in self._starts]
        width = max(length - first for length, first in zip(self._lengths, kept))

        def column(values: list[int]) -> Any:
            return mx.array(values, mx.int32)[:, None, None, None]

        query = column(self._starts) + mx.arange(self._n)[:, None]
        key = column(self._lengths) - width + mx.arange(width)
        mask = (key <= query) & (key >= column(kept))
        return mask & (key > query - self.window) if self.window else mask


_INTEGER_FORMATS = {8: "int8", 4: "int4", 2: "int2"}


def packed(config: PagedKVCacheConfig, group_size: int, bits: int) -> PagedKVCacheConfig:
    """``config`` with integer codes of ``bits`` in place of raw blocks; itself if it has them.

    Raises ValueError if there is no such format, or ``config`` has another one already.
    """
    if bits not in _INTEGER_FORMATS:
        raise ValueError(f"to_quantized: bits must be 8, 4 or 2, got {bits}")
    format, present = _INTEGER_FORMATS[bits], (config.key_format, config.value_format)
    if present == (format, format):
        return config
    if present != ("raw", "raw"):
        raise ValueError(f"to_quantized: the cache stores {' and '.join(present)} already, asked for {format}")
    if config.sliding_window:
        raise ValueError(f"to_quantized: a cache with a sliding window must be made with format={format!r}")
    return PagedKVCacheConfig(
        format,
        format,
        group_size=group_size,
        hadamard=config.hadamard,
        window=config.window,
        sink=config.sink,
        check_finite=config.check_finite,
    )


class _Paged(PagedKVCacheCore):
    """What the two share: attention over the blocks, and the arrays that stand for them elsewhere."""

    _fetched: tuple[weakref.ref, weakref.ref] | None = None

    def keys_and_values(self) -> tuple[Any, Any]:
        """All tokens, as ``update_and_fetch`` returns them."""
        keys, values = self._fetch()
        self._fetched = weakref.ref(keys), weakref.ref(values)
        return keys, values

    def attends(self, keys: Any, values: Any, mask: Any) -> bool:
        """Whether attend() gives what attention over these arrays would.

        They must be what the last ``update_and_fetch`` returned, unchanged, and a mask array must have a column for
        every token.
        """
        if self._fetched is None or keys is not self._fetched[0]() or values is not self._fetched[1]():
            return False
        return not isinstance(mask, mx.array) or (not self.config.sliding_window and len(set(self._lengths())) == 1)

    def _window(self, window_size: int | None) -> int:
        return min((window for window in (window_size, self.config.sliding_window) if window), default=0)

    def attend(self, queries: Any, scale: float, mask: Any = None, sinks: Any = None, soft_cap: float = 0.0) -> Any:
        """Attention over all tokens where they lie, as mlx_lm's ``scaled_dot_product_attention``.

        Args:
            queries: (B, n_heads, S, head_dim), of the tokens appended last.
            scale: factor of the scores.
            mask: None, "causal", or a bool or additive array that broadcasts to (B, n_heads, S, tokens).
            sinks: one logit a head that takes part in the softmax and has no value, or None.
            soft_cap: if not 0, scores become ``soft_cap * tanh(score / soft_cap)``.

        Returns (B, n_heads, S, value head_dim) of the queries' type. Raises ValueError naming what does
        not fit.
        """
        if isinstance(mask, str):
            if mask != "causal" and not isinstance(mask, CausalMask):
                raise ValueError(f"attend: mask must be None, 'causal' or an array, got {mask!r}")
            return self._attend(queries, scale, True, None, sinks, getattr(mask, "window", 0), soft_cap)
        return self._attend(queries, scale, False, mask, sinks, 0, soft_cap)

    @property
    def meta_state(self) -> str:
        return ""


class PagedKVCache(_Paged):
    """One attention layer's keys and values in blocks of a pool, attended where they lie.

    A drop-in for mlx_lm's KVCache. With ``kvpool.mlx_lm.install()`` models attend over the blocks; without
    it ``update_and_fetch`` gathers them into plain arrays, which works everywhere, slower.

    ``copy.deepcopy`` is a fork: it shares every block by reference, and copies the open one when a side
    appends. Not thread-safe: caches of one storage are used by one thread at a time.
    """

    def __init__(self, storage: PagedStorage, config: PagedKVCacheConfig | None = None, owner: int | None = None):
        owner = storage.pool.new_owner() if owner is None else owner
        config = config or PagedKVCacheConfig()
        super().__init__(storage, config, [owner])
        remember_codebooks(config)

    @property
    def offset(self) -> int:
        """Tokens held, those that slid out of a window included."""
        return self._lengths()[0] if self.n_rows else 0

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Appends (B, n_kv_heads, S, head_dim) and returns all tokens; arrays that nobody evaluates cost nothing.

        Raises BlockPoolExhaustedError or ValueError, and changes nothing.
        """
        self._fetched = None
        if keys.ndim == 4:
            self._start_with(keys.shape[0])
        self._append(keys, values)
        return self.keys_and_values()

    def _start_with(self, n_rows: int) -> None:
        """Makes an empty cache one of so many rows."""
        if self.n_rows != n_rows and self.size() == 0:
            self._fork_rows(self, [0] * n_rows, [self.owners[0]] * n_rows)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        offset, window, sliding = self.offset, self._window(window_size), self.config.sliding_window
        if N == 1 and (not window or window == sliding or offset < window):
            return None
        mask = CausalMask([offset], [offset + N], N, window if offset + N > window else 0, sliding)
        return mask if _route.is_installed() and not return_array else mask.array()[0, 0]

    def empty(self) -> bool:
        return self.size() == 0

    def trim(self, n: int) -> int:
        """Forgets up to ``n`` of the last tokens, exactly; returns how many, 0 for a negative ``n``."""
        self._fetched = None
        return self._trim(n)

    def release(self) -> None:
        """Frees all blocks."""
        self._fetched = None
        self._release()

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> PagedKVCache:
        """What mlx_lm's ``kv_bits`` asks for: a cache of the same tokens with integer blocks, behind the same window.

        A cache that has such blocks already is returned as it is. Raises ValueError naming what is not allowed,
        BlockPoolExhaustedError.
        """
        config = packed(self.config, group_size, bits)
        if config == self.config:
            return self
        cache = PagedKVCache(self.storage, config, self.owners[0])
        if not self.empty():
            cache.update_and_fetch(*self.keys_and_values())
        return cache

    @property
    def state(self) -> PagedState:
        """Evaluated, it makes the cache's pending work run and copies nothing; saved, it is all packed bytes."""
        return PagedState(self)

    @state.setter
    def state(self, state: Any) -> None:
        """Restores what was saved, in place of what the cache holds."""
        restore(self, state)
        self._fetched = None

    @classmethod
    def from_state(cls, state: Any) -> PagedKVCache:
        """A cache with the saved state and a growing pool of its own."""
        config, block_size, _ = saved_config(state)
        cache = cls._on(_growing_storage(block_size), config)
        cache.state = state
        return cache

    @classmethod
    def _on(cls, storage: PagedStorage, config: PagedKVCacheConfig) -> PagedKVCache:
        return cls(storage, config)

    def __deepcopy__(self, memo: dict) -> PagedKVCache:
        fork = type(self).__new__(type(self))
        owners = _forked_owners(memo, self.storage, self.owners)
        PagedKVCacheCore.__init__(fork, self.storage, self.config, [])
        fork._fork_rows(self, list(range(self.n_rows)), owners)
        memo[id(self)] = fork
        return fork

    @classmethod
    def merge(cls, caches: list[PagedKVCache]) -> BatchPagedKVCache:
        """A batch with a row for each of ``caches``, by reference."""
        return BatchPagedKVCache._joined(caches)

    def __repr__(self) -> str:
        return f"PagedKVCache(offset={self.offset}, nbytes={self.nbytes})"


class BatchPagedKVCache(_Paged):
    """Rows of different length, nothing padded: mlx_lm's BatchKVCache on blocks.

    Shorter rows stand to the right in the arrays of ``update_and_fetch``, and make_mask() hides what is before them.
    """

    _left: list[int]
    _remaining: list[int] | None = None

    @classmethod
    def _joined(cls, caches: list[PagedKVCache]) -> BatchPagedKVCache:
        batch = cls.__new__(cls)
        PagedKVCacheCore.__init__(batch, caches[0].storage, caches[0].config, [])
        batch._left = [0] * len(caches)
        for cache in caches:
            row = PagedKVCacheCore(cache.storage, cache.config, [])
            row._fork_rows(cache, [0], cache.owners)
            batch._take_rows(row)
        return batch

    @property
    def offset(self) -> Any:
        """Position of each row's next token: (B,) int32, a new array each time."""
        return mx.array([n - left for n, left in zip(self._lengths(), self._left)], mx.int32)

    @property
    def left_padding(self) -> Any:
        """By how much each row is shorter than the longest: (B,) int32. Nothing is stored for it."""
        lengths = self._lengths()
        return mx.array([max(lengths) - n for n in lengths], mx.int32)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        self._fetched = None
        S = keys.shape[2]
        if self._remaining is None and not any(self._left):
            self._append(keys, values)
        else:
            first, count = self._columns(S)
            self._append(keys, values, first, count)
            self._left = [left - f for left, f in zip(self._left, first)]
            if self._remaining is not None:
                self._remaining = [r - c for r, c in zip(self._remaining, count)]
        return self.keys_and_values()

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        """Says which columns of the next tokens are padding: they are not stored."""
        if left_padding is not None:
            self._left = [left + int(p) for left, p in zip(self._left, left_padding)]
        if right_padding is not None and max(right_padding) > 0:
            self._remaining = [int(n) for n in lengths]

    def finalize(self) -> None:
        self._remaining = None

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        first, count = self._columns(N)
        lengths = self._lengths()
        mask = CausalMask(
            [n - f for n, f in zip(lengths, first)],
            [n + c for n, c in zip(lengths, count)],
            N,
            self._window(window_size),
            self.config.sliding_window,
        )
        return mask if _route.is_installed() and not return_array else mask.array()

    def _columns(self, S: int) -> tuple[list[int], list[int]]:
        """Of the next S columns the first that each row takes, and how many it takes from there."""
        first = [min(left, S) for left in self._left]
        count = [S - f for f in first]
        if self._remaining is not None:
            count = [min(c, r) for c, r in zip(count, self._remaining)]
        return first, count

    def filter(self, batch_indices: Any) -> None:
        """Keeps the rows of these indices; frees the others."""
        indices = [int(i) for i in (batch_indices.tolist() if hasattr(batch_indices, "tolist") else batch_indices)]
        self._fetched = None
        self._keep_rows(indices)
        self._left = [self._left[i] for i in indices]
        if self._remaining is not None:
            self._remaining = [self._remaining[i] for i in indices]

    def extend(self, other: BatchPagedKVCache) -> None:
        """Moves the rows of ``other`` behind this batch's own."""
        self._fetched = other._fetched = None
        self._take_rows(other)
        self._left += other._left
        other._left = []

    def extract(self, idx: int) -> PagedKVCache:
        """The row ``idx`` as a cache of its own, by reference."""
        cache = PagedKVCache.__new__(PagedKVCache)
        PagedKVCacheCore.__init__(cache, self.storage, self.config, [])
        cache._fork_rows(self, [idx], [self.owners[idx]])
        return cache

    def empty(self) -> bool:
        return self.size() == 0

    def trim(self, n: int) -> int:
        self._fetched = None
        return self._trim(n)

    @property
    def state(self) -> PagedState:
        """As that of PagedKVCache, for all rows. Saving raises ValueError amid a padded prompt."""
        return PagedState(self)

    @state.setter
    def state(self, state: Any) -> None:
        """Restores what was saved, in place of what the batch holds."""
        restore(self, state)
        self._fetched = self._remaining = None
        self._left = [0] * self.n_rows

    @classmethod
    def from_state(cls, state: Any) -> BatchPagedKVCache:
        """A batch with the saved rows and a growing pool of its own."""
        config, block_size, n_rows = saved_config(state)
        storage = _growing_storage(block_size)
        batch = cls.__new__(cls)
        PagedKVCacheCore.__init__(batch, storage, config, [storage.pool.new_owner() for _ in range(n_rows)])
        batch._left = [0] * n_rows
        restore(batch, state)
        return batch

    def _save_row(self, row: int) -> tuple | None:
        if any(self._left) or self._remaining is not None:
            raise ValueError("BatchPagedKVCache: it can be saved once the padded prompt has been appended")
        return super()._save_row(row)

    def __deepcopy__(self, memo: dict) -> BatchPagedKVCache:
        fork = BatchPagedKVCache.__new__(BatchPagedKVCache)
        PagedKVCacheCore.__init__(fork, self.storage, self.config, [])
        fork._fork_rows(self, list(range(self.n_rows)), _forked_owners(memo, self.storage, self.owners))
        fork._left = list(self._left)
        fork._remaining = None if self._remaining is None else list(self._remaining)
        memo[id(self)] = fork
        return fork

    def __repr__(self) -> str:
        return f"BatchPagedKVCache(lengths={self._lengths()}, nbytes={self.nbytes})"


def _growing_storage(block_size: int) -> PagedStorage:
    return PagedStorage(BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=2, grow_on_exhaustion=True)))


def _forked_owners(memo: dict, storage: PagedStorage, owners: list[int]) -> list[int]:
    """New owners for a fork; what is copied together and had one owner gets one."""
    known = memo.setdefault((_Paged, "owners"), {})
    forked = []
    for owner in owners:
        request = (id(storage), owner)
        if request not in known:
            known[request] = (storage.pool.new_owner(), storage)  # the storage, so that its id stays its own
        forked.append(known[request][0])
    return forked
