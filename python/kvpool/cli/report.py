"""What a run of ``kvpool generate`` did, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Optional

from rich.console import Console
from rich.table import Table

from .caches import PagedFormat
from .memory import show_bytes

STOCK_STEP = 256


@dataclass(frozen=True)
class Speed:
    tokens: int
    tokens_per_second: float


@dataclass(frozen=True)
class PoolFigures:
    """A pool after a run. Blocks count K and V together; ``fragmentation`` is a fraction."""

    block_size: int
    n_blocks: int
    blocks_held: int
    blocks_peak: int
    allocated: int
    reused: int
    grown: int
    fragmentation: float


@dataclass(frozen=True)
class Report:
    """All figures of one run. ``bytes_*`` are of the KV cache, over all layers.

    ``bytes_per_token`` is what is held, over the tokens held; ``_raw`` and ``_fp16`` are what the elements of a token
    take in the model's own type and in fp16. ``format`` is None unless the cache is paged.
    """

    model: str
    dtype: str
    cache: str
    format: Optional[PagedFormat]
    finish_reason: str
    prompt: Speed
    answer: Speed
    tokens_held: int
    bytes_held: int
    bytes_peak: int
    bytes_stock: int
    bytes_per_token: float
    bytes_per_token_raw: int
    bytes_per_token_fp16: int
    pool: Optional[PoolFigures]

    def to_json(self, text: str) -> dict[str, Any]:
        return {"text": text, **asdict(self)}

    def print(self, console: Console) -> None:
        """A table of two columns. The pool's rows are left out for the stock cache."""
        table = Table(show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_row("prompt", f"{self.prompt.tokens} tokens, {self.prompt.tokens_per_second:.1f} tokens/s")
        table.add_row(
            "answer", f"{self.answer.tokens} tokens, {self.answer.tokens_per_second:.1f} tokens/s, {self.finish_reason}"
        )
        pool = self.pool
        if pool:
            table.add_row(
                "blocks held, peak",
                f"{pool.blocks_held}, {pool.blocks_peak} of {pool.n_blocks} ({pool.block_size} tokens each)",
            )
        table.add_row(
            "cache held, peak",
            f"{show_bytes(self.bytes_held)}, {show_bytes(self.bytes_peak)} ({self.cache}, {self.dtype})",
        )
        if self.format:
            table.add_row("K, V", _formats(self.format))
        if self.bytes_per_token:
            of_fp16 = f"{self.bytes_per_token / self.bytes_per_token_fp16:.0%} of fp16"
            of_raw = f"{self.bytes_per_token / self.bytes_per_token_raw:.0%} of {self.dtype}"
            table.add_row(
                "bytes a token held", f"{self.bytes_per_token:,.0f} ({of_fp16}, {of_raw}; {self.tokens_held} tokens)"
            )
        table.add_row("stock cache would hold", show_bytes(self.bytes_stock))
        if pool:
            table.add_row("blocks allocated, reused, grown", f"{pool.allocated}, {pool.reused}, {pool.grown}")
            table.add_row("fragmentation", f"{pool.fragmentation:.1%}")
        console.print(table)


def _formats(format: PagedFormat) -> str:
    if format.keys == format.values == "raw":
        return "raw, raw"
    return f"{format.keys}, {format.values} (raw: first {format.sink} and newest {format.window} tokens)"


def stock_capacity(n_prompt: int, n_cached: int, chunk: int) -> int:
    """Tokens for which mlx_lm's own cache has room after ``n_cached``, the ``n_prompt`` of the prompt in chunks."""
    capacity = length = 0
    prefill = max(n_prompt - 1, 0)
    while length < n_cached:
        added = min(chunk, prefill - length) if length < prefill else 1
        if length + added > capacity:
            capacity = length + -(-added // STOCK_STEP) * STOCK_STEP
        length += added
    return capacity
