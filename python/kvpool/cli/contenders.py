"""The caches that ``kvpool compare`` compares."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .options import CacheFormat

if TYPE_CHECKING:
    from mlx.nn import Module

FORMATS = tuple(format.value for format in CacheFormat)
WITHOUT_CODEBOOKS = tuple(name for name in FORMATS if not name.startswith("vecinfer"))
REFERENCE = "raw"
STOCK = "mlx_lm"
_STOCK_QUANTISED = ((8, 64), (4, 64), (4, 32), (2, 32))


@dataclass(frozen=True)
class Contender:
    """A kind of cache: its name in the table, whose it is, and what makes one for every layer."""

    name: str
    paged: bool
    make: Callable[[], list[Any]]


@dataclass(frozen=True)
class PagedOptions:
    window: int
    sink: int
    group_size: int = 32
    hadamard: bool = True
    codebooks: Mapping[str, Any] = field(default_factory=dict)


def paged_contender(model: Module, spec: str, block_size: int, options: PagedOptions) -> Contender:
    """The paged cache that ``spec`` names: a format or ``KEYS:VALUES``, then options, each after a dash.

    Options: ``g32``, ``g64`` (channels to a scale), ``plain`` (no Hadamard transform), ``wN`` (newest tokens that stay
    raw), ``sN`` (first tokens that do). What is not said is as in ``options``.

    Raises:
        ValueError: it says something else.
    """
    keys, values = formats_of(spec)
    chosen = vars(options) | dict(_option(spec, word) for word in spec.split("-")[1:])

    def make() -> list[Any]:
        from kvpool import BlockPoolAllocator, PoolConfig
        from kvpool.mlx_lm import make_prompt_cache

        pool = BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=2, grow_on_exhaustion=True))
        return make_prompt_cache(model, pool, (keys, values), **chosen)

    return Contender(spec, True, make)


def formats_of(spec: str) -> tuple[str, str]:
    """The formats of keys and values that ``spec`` names. Raises ValueError if one is none."""
    keys, _, values = spec.split("-")[0].partition(":")
    for name in (keys, values or keys):
        if name not in FORMATS:
            raise ValueError(f"{spec!r}: {name!r} is no format; allowed: {', '.join(FORMATS)}")
    return keys, values or keys


def _option(spec: str, word: str) -> tuple[str, Any]:
    if word in ("g32", "g64"):
        return "group_size", int(word[1:])
    if word == "plain":
        return "hadamard", False
    if match := re.fullmatch(r"([ws])(\d{1,9})", word):
        return {"w": "window", "s": "sink"}[match[1]], int(match[2])
    raise ValueError(f"{spec!r}: {word!r} is no option; allowed: g32, g64, plain, wN, sN")


def stock_contenders(model: Module, head_dim: int) -> list[Contender]:
    """mlx_lm's own cache, and its quantised one at each width that fits ``head_dim``."""
    from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

    def quantised(bits: int, group_size: int) -> list[Any]:
        caches = make_prompt_cache(model)
        return [QuantizedKVCache(group_size, bits) if type(cache) is KVCache else cache for cache in caches]

    contenders = [Contender(STOCK, False, lambda: make_prompt_cache(model))]
    for bits, group_size in _STOCK_QUANTISED:
        if head_dim % group_size == 0:
            name = f"{STOCK} {bits} bits g{group_size}"
            contenders.append(Contender(name, False, lambda bits=bits, g=group_size: quantised(bits, g)))
    return contenders
