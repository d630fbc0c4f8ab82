"""What one element of the cache costs in each format."""

from __future__ import annotations

from dataclasses import dataclass

from ..models import ModelInfo

_SCALE_AND_BIAS_BITS = 32


@dataclass(frozen=True)
class Format:
    """A cache format for one model: mean bits an element over K and V."""

    name: str
    bits: float


def formats_for(model: ModelInfo, group_size: int, block_size: int) -> list[Format]:
    """Every format, widest first, as a full block of ``block_size`` tokens stores it.

    ``group_size``: elements of a head that share scale and bias in int formats and in the values of kivi.
    """
    head_dim = model.head_dim
    by_token = _SCALE_AND_BIAS_BITS * -(-head_dim // group_size) / head_dim
    by_channel = _SCALE_AND_BIAS_BITS / block_size

    def packed(bits: int) -> float:
        """Of codes: those of a key are whole 32-bit words, those of values are whole across 16 tokens."""
        return (32 * -(-bits * head_dim // 32) / head_dim + bits) / 2

    raw = [Format(name, bits) for name, bits in (("fp32", 32), ("fp16", 16), ("bf16", 16))]
    ints = [Format(f"int{bits}", packed(bits) + by_token) for bits in (8, 4, 2)]
    kivis = [Format(f"kivi{bits}", packed(bits) + (by_channel + by_token) / 2) for bits in (4, 2)]
    vectors = [Format(f"vecinfer{bits:g}", bits) for bits in (4, 3, 2, 1.5, 1)]
    return raw + ints + kivis + vectors


def what_is_counted(group_size: int, block_size: int) -> str:
    """One sentence on what the bits of each family contain."""
    return (
        f"Per token that has left the raw window. int: with fp16 scale and bias per {group_size} elements of a head; "
        f"kivi: the same for V, for K per channel over {block_size} tokens; vecinfer: codes, without the codebooks."
    )
