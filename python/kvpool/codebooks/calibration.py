"""What codebooks are learnt from: the queries, keys and values of a model as it reads a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .._core import VecInferCalibrator
from .._layers import attention_layers, stock_caches
from ..mlx_lm import install


# Every so many windows are read once more, for gradients: what layers count needs fewer tokens than codebooks.
_WINDOWS_PER_GRADIENT = 4


class _Recorder(KVCache):
    """A layer's cache that attends as mlx_lm does, and keeps what it was asked last. ``nudge`` is added to the output."""

    asked: tuple[Any, Any, Any, float] | None = None
    nudge: Any = None

    def attends(self, keys: Any, values: Any, mask: Any) -> bool:
        self._seen = keys, values
        return True

    def attend(self, queries: Any, scale: float, mask: Any = None, sinks: Any = None) -> Any:
        self.asked = queries, *self._seen, scale
        output = mx.fast.scaled_dot_product_attention(queries, *self._seen, scale=scale, mask=mask, sinks=sinks)
        return output if self.nudge is None else output + self.nudge.astype(output.dtype)


def observe(
    model: Any, windows: Sequence[Sequence[int]], on_window: Callable[[], None] = lambda: None, **options: Any
) -> VecInferCalibrator:
    """A calibrator that has seen what ``model`` makes of pieces of text; train() makes codebooks of any format.

    Args:
        model: a loaded mlx_lm model.
        windows: tokens; each piece is read from an empty cache.
        on_window: called after each piece.
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
        for number, window in enumerate(windows):
            caches = _recorders(model, layers)
            model(mx.array(window)[None], cache=caches)
            asked = [caches[layer].asked for layer in layers]
            if None in asked:
                raise ValueError("the model does not attend by mlx_lm's scaled_dot_product_attention")
            mx.eval([arrays[:3] for arrays in asked])
            for layer, arrays in enumerate(asked):
                calibrator.observe(layer, *arrays)
            if number % _WINDOWS_PER_GRADIENT == 0:
                key = mx.random.key((options.get("seed", 0) + number) % 2**64)
                shapes = [arrays[0].shape for arrays in asked]
                for layer, gradient in enumerate(_gradients(model, layers, window, shapes, key)):
                    calibrator.observe_gradients(layer, gradient)
            on_window()
    return calibrator


def _recorders(model: Any, layers: Sequence[int]) -> list[Any]:
    caches = stock_caches(model)
    for layer in layers:
        caches[layer] = _Recorder()
    return caches


def _gradients(
    model: Any, layers: Sequence[int], window: Sequence[int], shapes: Sequence[tuple[int, ...]], key: mx.array
) -> list[mx.array]:
    """Of the log-likelihood of tokens that the model draws itself, one after each of ``window``, by what attention puts
    out in each layer: their squares are how much its errors move the model's predictions (Fisher information)."""

    def log_likelihood(nudges: list[mx.array]) -> mx.array:
        caches = _recorders(model, layers)
        for layer, nudge in zip(layers, nudges):
            caches[layer].nudge = nudge
        logits = model(mx.array(window)[None], cache=caches).astype(mx.float32)
        drawn = mx.stop_gradient(mx.random.categorical(logits, key=key))
        likelihoods = mx.take_along_axis(logits, drawn[..., None], axis=-1)[..., 0] - mx.logsumexp(logits, axis=-1)
        return mx.sum(likelihoods)

    return mx.grad(log_likelihood)([mx.zeros(shape) for shape in shapes])
