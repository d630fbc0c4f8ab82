"""What one element of the cache costs in each format."""

from __future__ import annotations

from dataclasses import dataclass

from ..models import ModelInfo

KIVI_TOKENS = 64
_SCALE_AND_BIAS_BITS = 32


@dataclass(frozen=True)
class Format:
    """A cache format for one model: mean bits an element over K and V, and whether ``generate`` runs it yet."""

    name: str
    bits: float
    runs: bool


def formats_for(model: ModelInfo, group_size: int) -> list[Format]:
    """Every format, widest first. ``group_size``: elements of a head that share scale and bias in int formats."""
    head_dim = model.head_dim
    affine = _SCALE_AND_BIAS_BITS * -(-head_dim // group_size) / head_dim
    kivi = (_SCALE_AND_BIAS_BITS / KIVI_TOKENS + _SCALE_AND_BIAS_BITS / head_dim) / 2
    raw = [Format(name, bits, True) for name, bits in (("fp32", 32), ("fp16", 16), ("bf16", 16))]
    ints = [Format(f"int{bits}", bits + affine, False) for bits in (8, 4, 2)]
    kivis = [Format(f"kivi{bits}", bits + kivi, False) for bits in (4, 2)]
    vectors = [Format(f"vecinfer{bits}", bits, False) for bits in (4, 3, 2, 1)]
    return raw + ints + kivis + vectors


def what_is_counted(group_size: int) -> str:
    """One sentence on what the bits of each family contain."""
    return (
        f"int: with fp16 scale and bias per {group_size} elements of a head; kivi: the same for K per channel over "
        f"{KIVI_TOKENS} tokens, for V per head; vecinfer: codes, without the codebooks."
    )
