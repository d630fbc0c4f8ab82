"""Routes the attention of mlx_lm's models to the caches that attend over their own blocks."""

from __future__ import annotations

import sys
from typing import Any

_PREFIX = "mlx_lm.models."
_NAME = "scaled_dot_product_attention"
_original: Any = None


def is_installed() -> bool:
    return _original is not None


def install() -> None:
    """Puts the route in every module of ``mlx_lm.models``, those not yet imported included. Idempotent."""
    global _original
    from mlx_lm.models import base

    if _original is None:
        _original = getattr(base, _NAME)
    _replace(_original, routed)


def uninstall() -> None:
    """Takes the route out again. Idempotent."""
    global _original
    if _original is not None:
        _replace(routed, _original)
        _original = None


def _replace(old: Any, new: Any) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(_PREFIX) and getattr(module, _NAME, None) is old:
            setattr(module, _NAME, new)


def routed(queries, keys, values, cache, scale, mask=None, sinks=None, **kwargs):
    """mlx_lm's function; a cache of ours attends itself if ``keys`` and ``values`` are just what it returned."""
    attends = getattr(cache, "attends", None)
    if attends is not None and not kwargs and attends(keys, values, mask):
        return cache.attend(queries, scale, mask, sinks)
    if isinstance(mask, str) and mask != "causal":
        mask = mask.array()
    return _original(queries, keys, values, cache, scale, mask, sinks, **kwargs)
