"""From a GGUF of the Llama family to what mlx_lm's own classes take: a config and weights.

llama.cpp stores the rows of Q and K of its ``llama`` architecture in the order of interleaved RoPE; they are put back
into the half-split order here. ``qwen2`` files keep the original order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .errors import ModelError
from .gguf_file import GGUFFile
from .info import ModelInfo, formats_by_bytes

ARCHITECTURES = ("llama", "qwen2")

_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_QKV_BIAS = {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_MAX_SIZE = 1 << 24


class LlamaGGUF:
    """A Llama-family model in a GGUF file, its metadata and tensor shapes checked against each other.

    Attributes:
        file: the container.
        config: the ``config.json`` that mlx_lm reads.

    Raises:
        ModelError: another architecture, a missing key or tensor, a wrong shape. No tensor data have been read.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.value("general.architecture", str)
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                file.path, f"general.architecture is {self.architecture!r}; supported: {', '.join(ARCHITECTURES)}"
            )
        self.config = self._read_config()
        self._names = self._check_tensors()
        if _ROPE_FACTORS in file.tensors:
            self.config["rope_scaling"] = self._llama3_rope()

    @property
    def info(self) -> ModelInfo:
        config, tensors = self.config, self.file.tensors.values()
        return ModelInfo(
            path=str(self.file.path),
            container="gguf",
            architecture=config["model_type"],
            n_layers=config["num_hidden_layers"],
            n_cache_layers=config["num_hidden_layers"],
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            context_length=config["max_position_embeddings"],
            vocab_size=config["vocab_size"],
            n_parameters=sum(math.prod(tensor.shape) for tensor in tensors),
            stored=formats_by_bytes([(tensor.kind.name, tensor.n_bytes) for tensor in tensors]),
        )

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (mlx_lm's name, float32 array) one tensor at a time, in the file's order."""
        for name, target in self._names.items():
            values = self.file.read(name)
            if self.architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
                values = _half_split_rows(values, self.config["head_dim"])
            yield target, values

    def _size(self, key: str, default: int | None = None) -> int:
        size = self.file.value(f"{self.architecture}.{key}", int, default, low=1)
        if size > _MAX_SIZE:
            raise ModelError(
                self.file.path, f"metadata key {self.architecture}.{key} is {size}; at most {_MAX_SIZE} is allowed"
            )
        return size

    def _read_config(self) -> dict[str, Any]:
        file, arch = self.file, self.architecture
        if file.value(f"{arch}.expert_count", int, 0):
            raise ModelError(file.path, f"metadata key {arch}.expert_count: mixtures of experts are not supported")
        hidden, n_heads = self._size("embedding_length"), self._size("attention.head_count")
        head_dim = self._size("attention.key_length", hidden // n_heads or None)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._size(key, head_dim) != head_dim:
                raise ModelError(
                    file.path,
                    f"metadata key {arch}.{key} is {self._size(key)}; it must equal the head dimension {head_dim}",
                )
        if arch == "qwen2" and head_dim * n_heads != hidden:
            raise ModelError(
                file.path, f"metadata key {arch}.attention.key_length is {head_dim}; qwen2 needs {hidden // n_heads}"
            )
        if head_dim % 2:
            raise ModelError(file.path, f"the head dimension is {head_dim}; RoPE needs an even one")
        config: dict[str, Any] = {
            "model_type": arch,
            "architectures": ["LlamaForCausalLM" if arch == "llama" else "Qwen2ForCausalLM"],
            "hidden_size": hidden,
            "num_hidden_layers": self._size("block_count"),
            "intermediate_size": self._size("feed_forward_length"),
            "num_attention_heads": n_heads,
            "num_key_value_heads": self._size("attention.head_count_kv", n_heads),
            "head_dim": head_dim,
            "rms_norm_eps": _shortest(file.value(f"{arch}.attention.layer_norm_rms_epsilon", float, low=0.0)),
            "max_position_embeddings": self._size("context_length"),
            "rope_theta": _shortest(file.value(f"{arch}.rope.freq_base", float, 10000.0, low=1.0)),
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "vocab_size": self._vocab_size(),
        }
        if n_heads % config["num_key_value_heads"]:
            raise ModelError(
                file.path,
                f"metadata key {arch}.attention.head_count_kv is {config['num_key_value_heads']}; "
                f"it must divide the {n_heads} heads",
            )
        scaling = self._rope_scaling()
        if scaling:
            config["rope_scaling"] = scaling
        return config

    def _vocab_size(self) -> int:
        if "token_embd.weight" not in self.file.tensors:
            raise ModelError(self.file.path, "tensor token_embd.weight is missing")
        return self.file.tensors["token_embd.weight"].shape[0]

    def _rope_scaling(self) -> dict[str, Any] | None:
        key = f"{self.architecture}.rope.scaling"
        kind = self.file.value(f"{key}.type", str, "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ModelError(
                self.file.path, f"metadata key {key}.type is {kind!r}; none, linear and yarn are supported"
            )
        scaling = {"rope_type": kind, "factor": self.file.value(f"{key}.factor", float, low=1.0)}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._size("rope.scaling.original_context_length")
        return scaling

    def _llama3_rope(self) -> dict[str, Any]:
        """Recovers Llama 3's RoPE parameters from the factors that llama.cpp stored a frequency."""
        factors = self.file.read(_ROPE_FACTORS)
        scaling = {"rope_type": "llama3", "factor": _shortest(float(factors.max())), **_LLAMA3_ROPE}
        expected = _llama3_factors(self.config["rope_theta"], self.config["head_dim"], scaling)
        if not np.allclose(factors, expected, rtol=1e-3):
            raise ModelError(self.file.path, f"tensor {_ROPE_FACTORS} does not hold the RoPE factors of Llama 3")
        return scaling

    def _expected(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """GGUF name → (mlx_lm's name, shape) of every weight that the config calls for."""
        config = self.config
        hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        q_rows = config["num_attention_heads"] * config["head_dim"]
        kv_rows = config["num_key_value_heads"] * config["head_dim"]
        shapes = {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (q_rows, hidden),
            "attn_k.weight": (kv_rows, hidden),
            "attn_v.weight": (kv_rows, hidden),
            "attn_output.weight": (hidden, q_rows),
            "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (inner, hidden),
            "ffn_up.weight": (inner, hidden),
            "ffn_down.weight": (hidden, inner),
            "attn_q.bias": (q_rows,),
            "attn_k.bias": (kv_rows,),
            "attn_v.bias": (kv_rows,),
        }
        expected = {
            "token_embd.weight": ("model.embed_tokens.weight", (vocab, hidden)),
            "output_norm.weight": ("model.norm.weight", (hidden,)),
        }
        if not config["tie_word_embeddings"]:
            expected["output.weight"] = ("lm_head.weight", (vocab, hidden))
        layer = _LAYER | (_QKV_BIAS if self.architecture == "qwen2" else {})
        for index in range(config["num_hidden_layers"]):
            for name, target in layer.items():
                expected[f"blk.{index}.{name}"] = (f"model.layers.{index}.{target}", shapes[name])
        return expected

    def _check_tensors(self) -> dict[str, str]:
        """Compares the tensor table with the config. Returns GGUF name → mlx_lm's name."""
        file, tensors = self.file, self.file.tensors
        n_layers = self.config["num_hidden_layers"]
        if n_layers * len(_LAYER) > len(tensors):
            raise ModelError(
                file.path,
                f"metadata key {self.architecture}.block_count is {n_layers}, but the file has {len(tensors)} tensors",
            )
        expected = self._expected()
        for name, (_, shape) in expected.items():
            if name not in tensors:
                raise ModelError(file.path, f"tensor {name} is missing")
            if tensors[name].shape != shape:
                raise ModelError(file.path, f"tensor {name} has the shape {tensors[name].shape}; {shape} is wanted")
        if _ROPE_FACTORS in tensors and tensors[_ROPE_FACTORS].shape != (self.config["head_dim"] // 2,):
            raise ModelError(
                file.path,
                f"tensor {_ROPE_FACTORS} has the shape {tensors[_ROPE_FACTORS].shape}; "
                f"({self.config['head_dim'] // 2},) is wanted",
            )
        for name in tensors.keys() - expected.keys() - {_ROPE_FACTORS}:
            raise ModelError(file.path, f"tensor {name} is not part of a {self.architecture} model that kvpool can run")
        return {name: target for name, (target, _) in expected.items()}


def _half_split_rows(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows (0, 1, 2, 3, …) of each head → (0, 2, …, 1, 3, …): interleaved RoPE pairs become half-split ones."""
    rows, columns = values.shape
    pairs = values.reshape(rows // head_dim, head_dim // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _llama3_factors(theta: float, head_dim: int, scaling: dict[str, Any]) -> np.ndarray:
    """The divisors of Llama 3's RoPE frequencies, shape ``(head_dim / 2,)``."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32, so that 1e-5 is stored as 1e-05 and not 9.99999974e-06."""
    return float(str(np.float32(value)))
