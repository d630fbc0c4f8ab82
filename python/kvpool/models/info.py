"""What a model is, as its metadata say it: no weights are read for this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelInfo:
    """The shape of a model.

    Attributes:
        path: the file or folder.
        container: ``"gguf"`` or ``"mlx_lm"``.
        architecture: the model type under which mlx_lm runs it.
        n_layers: decoder layers; ``n_cache_layers`` of them keep every token's keys and values.
        n_heads, n_kv_heads, head_dim: attention heads, key/value heads, elements a head.
        context_length: tokens, or None where the model does not say.
        vocab_size: rows of the embedding.
        n_parameters: elements of all weights.
        stored: the formats of the weights in the file, most bytes first, e.g. ``"Q4_1, Q8_0, F32"``.
    """

    path: str
    container: str
    architecture: str
    n_layers: int
    n_cache_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    context_length: int | None
    vocab_size: int
    n_parameters: int
    stored: str

    @property
    def elements_per_token(self) -> int:
        """Elements of K and V that one token adds over all layers that keep it."""
        return 2 * self.n_cache_layers * self.n_kv_heads * self.head_dim


def formats_by_bytes(sizes: list[tuple[str, int]]) -> str:
    """Joins format names, the one with most bytes first. ``sizes`` holds (format, bytes) a tensor."""
    totals: dict[str, int] = {}
    for name, n_bytes in sizes:
        totals[name] = totals.get(name, 0) + n_bytes
    return ", ".join(sorted(totals, key=lambda name: -totals[name]))
