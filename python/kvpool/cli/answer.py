"""One generation: caches, the stream of text, and the figures at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .progress import PrefillProgress
from .report import PoolFigures, Report, Speed, stock_capacity

if TYPE_CHECKING:
    from mlx.nn import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from kvpool import BlockPoolAllocator

    from ..models import ModelInfo
    from .caches import RunCaches

PREFILL_CHUNK = 512


@dataclass
class Answer:
    """What has been generated so far: all of it, or as far as an interrupt let it come."""

    prompt: list[int]
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt_tps: float = 0.0
    tps: float = 0.0
    finish_reason: str = "interrupted"

    def run(
        self,
        model: Module,
        tokenizer: TokenizerWrapper,
        caches: RunCaches,
        *,
        max_tokens: int,
        sampling: dict[str, float],
        write: Callable[[str], None],
    ) -> None:
        """Generates, handing each piece of text to ``write``. Ctrl-C ends it, with the reason ``"interrupted"``."""
        from mlx_lm import stream_generate
        from mlx_lm.sample_utils import make_sampler

        progress = PrefillProgress()

        def after_chunk(done: int, total: int) -> None:
            caches.observe()
            progress(done, total)

        try:
            for response in stream_generate(
                model,
                tokenizer,
                self.prompt,
                max_tokens=max_tokens,
                sampler=make_sampler(**sampling),
                prompt_cache=caches.layers,
                prefill_step_size=PREFILL_CHUNK,
                prompt_progress_callback=after_chunk,
            ):
                caches.observe()
                self.text += response.text
                self.tokens.append(response.token)
                self.prompt_tps, self.tps = response.prompt_tps, response.generation_tps
                write(response.text)
                if response.finish_reason:
                    self.finish_reason = response.finish_reason
        except KeyboardInterrupt:
            pass
        finally:
            progress.close()


def report_on(answer: Answer, model: Module, shape: ModelInfo, caches: RunCaches) -> Report:
    """The figures of a run, while its caches still hold their blocks."""
    dtype, n_tokens = activation_dtype(model), caches.n_tokens
    caches.observe()
    stock = stock_capacity(len(answer.prompt), n_tokens, PREFILL_CHUNK) * shape.elements_per_token * dtype.size
    return Report(
        model=shape.path,
        dtype=str(dtype).removeprefix("mlx.core."),
        cache=caches.kind.value,
        format=caches.format,
        finish_reason=answer.finish_reason,
        prompt=Speed(len(answer.prompt), answer.prompt_tps),
        answer=Speed(len(answer.tokens), answer.tps),
        tokens_held=n_tokens,
        bytes_held=caches.bytes_held,
        bytes_peak=caches.bytes_peak,
        bytes_stock=stock,
        bytes_per_token=caches.bytes_held / n_tokens if n_tokens else 0.0,
        bytes_per_token_raw=shape.elements_per_token * dtype.size,
        bytes_per_token_fp16=shape.elements_per_token * 2,
        pool=_pool_figures(caches.pool) if caches.pool is not None else None,
    )


def _pool_figures(pool: BlockPoolAllocator) -> PoolFigures:
    stats = pool.stats
    return PoolFigures(
        block_size=pool.config.block_size,
        n_blocks=stats.n_blocks,
        blocks_held=stats.blocks_in_use(),
        blocks_peak=stats.peak_blocks_in_use,
        allocated=stats.n_allocations,
        reused=stats.n_reused,
        grown=stats.n_grown,
        fragmentation=stats.fragmentation(),
    )


def activation_dtype(model: Module) -> Any:
    """The type in which the model computes: that of its first floating-point parameter."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    return next(
        values.dtype for _, values in tree_flatten(model.parameters()) if mx.issubdtype(values.dtype, mx.floating)
    )
