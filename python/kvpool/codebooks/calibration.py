"""What codebooks are learnt from: the queries, keys and values of a model as it reads a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, create_attention_mask

from .._core import VecInferCalibrator
from .._layers import attention_layers, stock_caches
from ..mlx_lm import install


# Every so many windows are read once more, for gradients: what layers count needs fewer tokens than codebooks.
_WINDOWS_PER_GRADIENT = 4
# Of a window, at most: gradients keep the scores of all layers, whose memory grows by the square of the tokens.
_TOKENS_PER_GRADIENT = 1024


class _Recorder(KVCache):
    """A layer's cache that attends as mlx_lm does, as if ``offset`` tokens had come before that nothing sees, and keeps
    what it was asked last. ``nudge`` is added to the output."""

    asked: tuple[Any, Any, Any, float] | None = None
    nudge: Any = None

    def __init__(self, offset: int) -> None:
        super().__init__()
        self.offset = offset

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        self.offset += keys.shape[2]
        return keys, values

    def make_mask(self, n_tokens: int, **options: Any) -> Any:
        return create_attention_mask(n_tokens, offset=0, **options)

    def attends(self, keys: Any, values: Any, mask: Any) -> bool:
        self._seen = keys, values
        return True

    def attend(self, queries: Any, scale: float, mask: Any = None, sinks: Any = None) -> Any:
        self.asked = queries, *self._seen, scale
        output = mx.fast.scaled_dot_product_attention(queries, *self._seen, scale=scale, mask=mask, sinks=sinks)
        return output if self.nudge is None else output + self.nudge.astype(output.dtype)


def offsets_of(windows: Sequence[Sequence[int]], context: int) -> list[int]:
    """Where each piece begins: closer together at first, since every text has those positions, and the last so that it
    ends where the context does."""
    steps = max(1, len(windows) - 1)
    return [max(0, context - len(window)) * number**3 // steps**3 for number, window in enumerate(windows)]


def pieces_without_gaps(window: int, context: int) -> int:
    """How many pieces of ``window`` tokens offsets_of() spreads so that the next begins within a piece or 1/32 of the
    context: a channel that turns once in the context turns by a fifth of a radian there."""
    return 1 + math.ceil(3 * max(0, context - window) / max(window, context // 32))


def observe(
    model: Any,
    windows: Sequence[Sequence[int]],
    on_window: Callable[[], None] = lambda: None,
    *,
    context: int = 0,
    **options: Any,
) -> VecInferCalibrator:
    """A calibrator that has seen what ``model`` makes of pieces of text; train() makes codebooks of any format.

    Args:
        model: a loaded mlx_lm model.
        windows: tokens; each piece is read from an empty cache.
        on_window: called after each piece.
        context: tokens of the longest text that is to be coded well. Pieces are read as if they began further on in it,
            at offsets_of() them: keys are coded as rotary embeddings turned them (RoPE, Su et al. 2021), and slow
            channels turn so little in one piece that codebooks would know nothing of later positions. 0: all begin
            at 0.
        options: as VecInferCalibrator takes them: max_tokens, sink, window, seed.

    Raises:
        ValueError: no layer of the model is plain attention, its layers differ in shape or hide their queries, or an
            option is not allowed.
    """
    layers = attention_layers(model)
    if not layers:
        raise ValueError("no layer of the model keeps keys and values of plain attention")
    calibrator = VecInferCalibrator(len(layers), **options)
    with install():
        for number, (window, offset) in enumerate(zip(windows, offsets_of(windows, context))):
            caches = _recorders(model, layers, offset)
            model(mx.array(window)[None], cache=caches)
            asked = [caches[layer].asked for layer in layers]
            if None in asked:
                raise ValueError("the model does not attend by mlx_lm's scaled_dot_product_attention")
            mx.eval([arrays[:3] for arrays in asked])
            for layer, arrays in enumerate(asked):
                calibrator.observe(layer, *arrays)
            if number % _WINDOWS_PER_GRADIENT == 0:
                key = mx.random.key((options.get("seed", 0) + number) % 2**64)
                read = window[:_TOKENS_PER_GRADIENT]
                shapes = [(*queries.shape[:2], len(read), queries.shape[3]) for queries, *_ in asked]
                for layer, gradient in enumerate(_gradients(model, layers, read, offset, shapes, key)):
                    calibrator.observe_gradients(layer, gradient)
            on_window()
    return calibrator


def _recorders(model: Any, layers: Sequence[int], offset: int) -> list[Any]:
    caches = stock_caches(model)
    for layer in layers:
        caches[layer] = _Recorder(offset)
    return caches


def _gradients(
    model: Any,
    layers: Sequence[int],
    window: Sequence[int],
    offset: int,
    shapes: Sequence[tuple[int, ...]],
    key: mx.array,
) -> list[mx.array]:
    """Of the log-likelihood of tokens that the model draws itself, one after each of ``window``, by what attention puts
    out in each layer: their squares are how much its errors move the model's predictions (Fisher information)."""

    def log_likelihood(nudges: list[mx.array]) -> mx.array:
        caches = _recorders(model, layers, offset)
        for layer, nudge in zip(layers, nudges):
            caches[layer].nudge = nudge
        logits = model(mx.array(window)[None], cache=caches).astype(mx.float32)
        drawn = mx.stop_gradient(mx.random.categorical(logits, key=key))
        likelihoods = mx.take_along_axis(logits, drawn[..., None], axis=-1)[..., 0] - mx.logsumexp(logits, axis=-1)
        return mx.sum(likelihoods)

    return mx.grad(log_likelihood)([mx.zeros(shape) for shape in shapes])
