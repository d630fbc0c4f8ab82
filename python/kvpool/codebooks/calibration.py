"""What codebooks are learnt from: the queries, keys and values of a model as it reads a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .._core import VecInferCalibrator
from .._layers import attention_layers, stock_caches
from ..mlx_lm import install


class _Recorder(KVCache):
    """A layer's cache that attends as mlx_lm does, and keeps what it was asked last."""

    asked: tuple[Any, Any, Any, float] | None = None

    def attends(self, keys: Any, values: Any, mask: Any) -> bool:
        self._seen = keys, values
        return True

    def attend(self, queries: Any, scale: float, mask: Any = None, sinks: Any = None) -> Any:
        self.asked = queries, *self._seen, scale
        return mx.fast.scaled_dot_product_attention(queries, *self._seen, scale=scale, mask=mask, sinks=sinks)


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
        for window in windows:
            caches = stock_caches(model)
            for layer in layers:
                caches[layer] = _Recorder()
            model(mx.array(window)[None], cache=caches)
            asked = [caches[layer].asked for layer in layers]
            if None in asked:
                raise ValueError("the model does not attend by mlx_lm's scaled_dot_product_attention")
            mx.eval([arrays[:3] for arrays in asked])
            for layer, arrays in enumerate(asked):
                calibrator.observe(layer, *arrays)
            on_window()
    return calibrator
