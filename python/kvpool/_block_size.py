"""How many tokens a block has where nobody says."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

#: Blocks of 32 keep up to 48 tokens more raw than window and sink, here more than a twentieth of all at 8192 tokens.
_FEW_BITS = {"vecinfer1", "vecinfer1.5", "vecinfer2"}


def default_block_size(formats: Iterable[str]) -> int:
    """32; 16 for vecinfer at 2 bits and less on the CPU. The GPU's decode kernel takes no such blocks of 16."""
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    return 16 if on_cpu and not _FEW_BITS.isdisjoint(formats) else 32
