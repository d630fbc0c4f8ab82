"""What tells the models apart that codebooks are for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .._core import weight_sketch
from .._layers import attention_layers

SKETCH_SIZE = 8
# Between the sketches of a model and of itself in 4 bits lie about 0.1 of their length, of other weights about 1.4.
TOLERANCE = 0.4

_NUMBERS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
_ROPE = ("rope_theta", "rope_scaling", "rope_traditional", "partial_rotary_factor")
_PROJECTIONS = ("k_proj", "qkv_proj", "Wqkv", "query_key_value", "c_attn")


@dataclass(frozen=True)
class Fingerprint:
    """The numbers of a model's architecture, as JSON has them, and (layers, SKETCH_SIZE) numbers that stand for its
    key projections."""

    architecture: dict[str, Any]
    sketch: mx.array

    def difference(self, other: Fingerprint) -> str | None:
        """What tells ``other`` apart, in words; None if the same codebooks serve both."""
        for name in sorted(self.architecture.keys() | other.architecture.keys()):
            mine, its = self.architecture.get(name), other.architecture.get(name)
            if mine != its:
                return f"{name} is {its}, not {mine}"
        if self.sketch.shape != other.sketch.shape:
            return f"{other.sketch.shape[0]} layers keep keys and values, not {self.sketch.shape[0]}"
        apart = mx.linalg.norm(self.sketch - other.sketch) / mx.maximum(mx.linalg.norm(self.sketch), 1e-20)
        if not apart.item() <= TOLERANCE:
            return "its key projections have other weights"
        return None


def fingerprint_of(model: Any) -> Fingerprint:
    """The fingerprint of a loaded mlx_lm model: the same for any type or quantisation of the same weights.

    Raises:
        ValueError: it keeps no keys and values, or its layers have no key projection that kvpool knows.
    """
    layers = attention_layers(model)
    if not layers:
        raise ValueError("no layer of the model keeps keys and values of plain attention")
    sketches = [weight_sketch(_key_weight(model.layers[i], i), SKETCH_SIZE) for i in layers]
    return Fingerprint(_architecture(model), mx.stack(sketches))


def _architecture(model: Any) -> dict[str, Any]:
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None)
    fields = vars(args) if args is not None else {}
    fields = {**fields, **text} if isinstance(text, dict) else fields
    numbers = {name: fields.get(name) for name in _NUMBERS + _ROPE}
    if numbers["head_dim"] is None and numbers["hidden_size"] and numbers["num_attention_heads"]:
        numbers["head_dim"] = numbers["hidden_size"] // numbers["num_attention_heads"]
    return json.loads(json.dumps(_plain(numbers)))


def _plain(value: Any) -> Any:
    """Numbers as floats where they are not whole, so that 10000 and 10000.0 are the same."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def _key_weight(layer: Any, index: int) -> mx.array:
    """The weight (out, in) that makes a layer's keys, dequantised."""
    for name, module in layer.named_modules():
        if name.rsplit(".", 1)[-1] in _PROJECTIONS and "weight" in module:
            if "scales" not in module:
                return module.weight
            options = {"group_size": module.group_size, "bits": module.bits, "mode": getattr(module, "mode", "affine")}
            return mx.dequantize(module.weight, module.scales, module.get("biases"), **options)
    raise ValueError(f"layer {index} has no key projection that kvpool knows ({', '.join(_PROJECTIONS)})")
