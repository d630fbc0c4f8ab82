"""How large a pool a request needs, and the pool that it gets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional, Protocol

import typer

from kvpool import BlockPoolAllocator, PoolConfig

DEFAULT_STEP = 256
MAX_BLOCKS = 1 << 24


@dataclass(frozen=True)
class PoolOptions:
    """The options that size the pool; None where the user left them out."""

    block_size: Optional[int]
    step: Optional[int]
    n_blocks: Optional[int]
    grow: Optional[bool]
    max_blocks: Optional[int]


class Demand(Protocol):
    """What one request asks of a pool."""

    block_size: int
    n_layers: int

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks, of K and V together, that hold ``n_tokens`` in every layer."""

    def tokens_in(self, n_blocks: int) -> int:
        """The most tokens that ``n_blocks`` hold in every layer."""


@dataclass(frozen=True)
class PooledDemand:
    """``n_layers`` caches, each with K and V, that grow by ``step`` tokens."""

    n_layers: int
    block_size: int
    step: int

    def blocks_for(self, n_tokens: int) -> int:
        capacity = -(-n_tokens // self.step) * self.step
        return 2 * self.n_layers * -(-capacity // self.block_size)

    def tokens_in(self, n_blocks: int) -> int:
        capacity = n_blocks // (2 * self.n_layers) * self.block_size
        return capacity // self.step * self.step


@dataclass(frozen=True)
class PagedDemand:
    """Paged caches, whose K and V grow by the block.

    ``reach`` has, for each layer, the most tokens that it ever holds; 0 where it holds all.
    """

    block_size: int
    reach: Sequence[int]

    @property
    def n_layers(self) -> int:
        return len(self.reach)

    def blocks_for(self, n_tokens: int) -> int:
        return 2 * sum(self._blocks(n_tokens, reach) for reach in self.reach)

    def tokens_in(self, n_blocks: int) -> int:
        lengths = range(0, (n_blocks + 1) * self.block_size, self.block_size)
        return lengths[bisect_right(lengths, n_blocks, key=self.blocks_for) - 1]

    def _blocks(self, n_tokens: int, reach: int) -> int:
        needed = -(-n_tokens // self.block_size)
        return min(needed, -(-reach // self.block_size) + 1) if reach else needed


def make_pool(options: PoolOptions, demand: Demand, n_prompt: int, n_answer: int) -> BlockPoolAllocator:
    """The pool for one request of ``n_prompt`` tokens and up to ``n_answer`` more.

    Without ``n_blocks`` it starts with what the prompt needs and grows; with ``grow`` false it takes what prompt and
    answer need. With ``n_blocks`` it stays so unless ``grow`` is true.

    Raises:
        typer.BadParameter: the pool can never hold prompt and answer; says which size would do.
    """
    needed = demand.blocks_for(n_prompt + n_answer)
    n_blocks, max_blocks = options.n_blocks, options.max_blocks
    grows = n_blocks is None if options.grow is None else options.grow
    start = n_blocks or (demand.blocks_for(n_prompt) if grows else needed)
    if max_blocks is not None and not grows:
        raise typer.BadParameter("only a pool that grows has a cap; add --grow.", param_hint="'--max-blocks'")
    if n_blocks is not None and max_blocks is not None and n_blocks > max_blocks:
        raise typer.BadParameter(
            f"{n_blocks} is more than the {max_blocks} of --max-blocks.", param_hint="'--n-blocks'"
        )
    limit = max_blocks if grows else start
    if limit is not None and limit < needed:
        option = "--max-blocks" if grows else "--n-blocks"
        raise typer.BadParameter(
            f"{limit} blocks of {demand.block_size} hold {demand.tokens_in(limit)} tokens in {demand.n_layers} layers; "
            f"the prompt's {n_prompt} and up to {n_answer} answer tokens need {option} {needed}.",
            param_hint=f"'{option}'",
        )
    if start > MAX_BLOCKS:
        raise typer.BadParameter(
            f"a pool of {start} blocks is too large; at most {MAX_BLOCKS} are allowed. Take larger blocks.",
            param_hint="'--block-size'",
        )
    return BlockPoolAllocator(
        PoolConfig(block_size=demand.block_size, n_blocks=start, grow_on_exhaustion=grows, max_blocks=max_blocks)
    )
