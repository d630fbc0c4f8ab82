"""What a cache costs in quality: the same text through several caches, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx.core import array
    from mlx.nn import Module

    from .contenders import Contender


@dataclass
class Tally:
    """Sums over the tokens that were predicted, and the memory of a full window.

    Attributes:
        tokens: tokens predicted.
        nll: of their negative log-likelihoods.
        kl: of the divergences of the reference's distributions from this cache's, in nats.
        agree: tokens whose likeliest candidate is the reference's.
        bytes_held: what MLX held for the cache after the window that held most.
    """

    tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    agree: int = 0
    bytes_held: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.tokens)


def windows_of(tokens: Sequence[int], n_windows: int, context: int) -> list[list[int]]:
    """``n_windows`` pieces of ``context`` tokens, spread evenly over the text, none overlapping.

    Raises:
        ValueError: the text is too short.
    """
    if len(tokens) < n_windows * context:
        raise ValueError(
            f"the text has {len(tokens)} tokens; {n_windows} windows of {context} need {n_windows * context}"
        )
    stride = len(tokens) // n_windows
    return [list(tokens[start : start + context]) for start in range(0, n_windows * stride, stride)]


def measure_window(
    model: Module,
    window: Sequence[int],
    contenders: Sequence[Contender],
    tallies: dict[str, Tally],
    step: int,
    after_step: Callable[[], None],
) -> dict[str, list[Any]]:
    """Feeds a window to every contender, ``step`` tokens at a time, all in lockstep; adds to their tallies.

    The first contender is the reference. Predictions count over the second half of the window, from its first token
    on. ``after_step`` is called for each contender and step.

    Returns: the caches, as full as the window is long.
    """
    import mlx.core as mx

    half = len(window) // 2
    mx.clear_cache()  # A larger buffer that was left there would be handed out, and counted, for a smaller one.
    caches = {contender.name: contender.make() for contender in contenders}
    held = dict.fromkeys(caches, 0)
    for start in range(0, len(window), step):
        chunk = mx.array(window[start : start + step])[None]
        first, last = max(half - 1 - start, 0), min(chunk.shape[1], len(window) - 1 - start)
        targets = mx.array(window[start + first + 1 : start + last + 1])
        mx.eval(chunk, targets)
        grown = dict.fromkeys(caches, 0)
        reference, at_start = None, _active_memory()
        for name, layers in caches.items():
            before = _active_memory()
            log_probs = _feed(model, chunk, layers, first, last)
            if log_probs is not None:
                reference = log_probs if reference is None else reference
                _add(tallies[name], log_probs, reference, targets)
            del log_probs
            grown[name] = _active_memory() - before
            after_step()
        reference = None  # its distributions count for no cache
        grown[contenders[0].name] += _active_memory() - at_start - sum(grown.values())
        for name, n_bytes in grown.items():
            held[name] += n_bytes
    for name, n_bytes in held.items():
        tallies[name].bytes_held = max(tallies[name].bytes_held, n_bytes)
    return caches


def _feed(model: Module, chunk: array, layers: list[Any], first: int, last: int) -> array | None:
    """Runs a step. Returns the log-probabilities after its tokens ``first`` to ``last``, evaluated, if any."""
    import mlx.core as mx

    logits = model(chunk, cache=layers)
    if first >= last:
        mx.eval([cache.state for cache in layers])
        return None
    logits = logits[0, first:last].astype(mx.float32)
    log_probs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(log_probs, [cache.state for cache in layers])
    return log_probs


def _add(tally: Tally, log_probs: array, reference: array, targets: array) -> None:
    import mlx.core as mx

    likelihoods = mx.take_along_axis(log_probs, targets[:, None], axis=-1)
    kl = mx.sum(mx.exp(reference) * (reference - log_probs))
    agree = mx.sum(mx.argmax(log_probs, axis=-1) == mx.argmax(reference, axis=-1))
    tally.tokens += targets.size
    tally.nll -= mx.sum(likelihoods).item()
    tally.kl += kl.item()
    tally.agree += agree.item()


def _active_memory() -> int:
    import mlx.core as mx

    mx.synchronize()
    return mx.get_active_memory()
