"""The speed of decode, over several caches in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx.nn import Module


def time_decode(
    model: Module,
    caches: dict[str, list[Any]],
    *,
    n_tokens: int = 8,
    rounds: int = 5,
    after_run: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds a token of mlx_lm's own loop over each of ``caches``, which keep their length.

    Every round runs them all, one after the other, ``n_tokens`` each; every other round backwards, so that none
    always follows the same one. A round's figure is the median of its tokens.
    """
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    for round_ in range(rounds):
        for name in list(caches)[:: -1 if round_ % 2 else 1]:
            seconds[name].append(_run(model, caches[name], n_tokens))
            after_run()
    return seconds


def _run(model: Module, caches: list[Any], n_tokens: int) -> float:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    before = caches[0].offset
    ticks = []
    for token, _ in generate_step(mx.array([1]), model, max_tokens=n_tokens + 1, prompt_cache=caches):
        ticks.append(time.perf_counter())
    mx.synchronize()
    for cache in caches:
        cache.trim(cache.offset - before)
    return median(later - earlier for earlier, later in zip(ticks, ticks[1:]))
