"""An mlx_lm folder: config.json, model*.safetensors and a tokenizer."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

from .errors import ModelError
from .info import ModelInfo, formats_by_bytes
from .safetensors_check import SafeTensor, check_safetensors

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
_INDEX = "model.safetensors.index.json"


class ModelFolder:
    """An mlx_lm folder whose config and tensor tables have been checked.

    Attributes:
        path: the folder.
        config: the content of config.json.
        tensors: every tensor of every model*.safetensors, by name.

    Raises:
        ModelError: a file is missing or inconsistent, or mlx_lm has no such model type. No weights have been read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = _read_object(self.path / "config.json")
        self._check_model_type()
        if not any((self.path / name).is_file() for name in _TOKENIZER_FILES):
            raise ModelError(self.path, f"no tokenizer; one of {', '.join(_TOKENIZER_FILES)} is wanted")
        self.tensors = self._read_tensors()
        self._n_layers()

    @property
    def info(self) -> ModelInfo:
        n_heads, n_layers = self._size("num_attention_heads", "n_head"), self._n_layers()
        layer_types = self._shape.get("layer_types") or ["full_attention"] * n_layers
        hidden = self._size("hidden_size", "n_embd")
        return ModelInfo(
            path=str(self.path),
            container="mlx_lm",
            architecture=self.config["model_type"],
            n_layers=n_layers,
            n_cache_layers=layer_types.count("full_attention"),
            n_heads=n_heads,
            n_kv_heads=self._size("num_key_value_heads") or n_heads,
            head_dim=self._size("head_dim") or (hidden // n_heads if n_heads else 0),
            context_length=self._size("max_position_embeddings", "n_positions") or None,
            vocab_size=self._size("vocab_size"),
            n_parameters=self._n_parameters(),
            stored=self._stored(),
        )

    @property
    def _shape(self) -> dict[str, Any]:
        """The part of the config that describes the language model."""
        text = self.config.get("text_config")
        return text if isinstance(text, dict) else self.config

    def _size(self, *keys: str) -> int:
        """The first of these config entries that is there, or 0."""
        for key in keys:
            size = self._shape.get(key)
            if size is None:
                continue
            if type(size) is not int or size < 0:
                raise ModelError(self.path / "config.json", f"{key} is {size!r}; a positive integer is wanted")
            return size
        return 0

    def _n_layers(self) -> int:
        n_layers = self._size("num_hidden_layers", "n_layer")
        if n_layers > len(self.tensors):
            raise ModelError(
                self.path / "config.json",
                f"num_hidden_layers is {n_layers}, but the files hold {len(self.tensors)} tensors",
            )
        return n_layers

    def _check_model_type(self) -> None:
        from mlx_lm.utils import MODEL_REMAPPING

        model_type = self.config.get("model_type")
        if not isinstance(model_type, str) or not model_type.isidentifier():
            raise ModelError(
                self.path / "config.json", f"model_type is {model_type!r}; a name that mlx_lm knows is wanted"
            )
        module = MODEL_REMAPPING.get(model_type, model_type)
        if importlib.util.find_spec(f"mlx_lm.models.{module}") is None:
            raise ModelError(self.path / "config.json", f"model_type {model_type!r} is not one that mlx_lm has")

    def _read_tensors(self) -> dict[str, SafeTensor]:
        files = sorted(self.path.glob("model*.safetensors"))
        if not files:
            raise ModelError(self.path, "no model*.safetensors")
        by_file = {file.name: check_safetensors(file) for file in files}
        if (self.path / _INDEX).exists():
            self._check_index(by_file)
        return {name: tensor for tensors in by_file.values() for name, tensor in tensors.items()}

    def _check_index(self, by_file: dict[str, dict[str, SafeTensor]]) -> None:
        weight_map = _read_object(self.path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(self.path / _INDEX, "weight_map is missing")
        for name, file in weight_map.items():
            if file not in by_file:
                raise ModelError(self.path / _INDEX, f"tensor {name!r} is said to be in {file!r}, which is not there")
            if name not in by_file[file]:
                raise ModelError(self.path / _INDEX, f"tensor {name!r} is not in {file!r}")

    def _quantization(self) -> dict[str, Any] | None:
        return self.config.get("quantization") or self.config.get("quantization_config")

    def _n_parameters(self) -> int:
        bits = (self._quantization() or {}).get("bits", 32)
        scales = {name.removesuffix(".scales") for name in self.tensors if name.endswith(".scales")}
        total = 0
        for name, tensor in self.tensors.items():
            base, _, part = name.rpartition(".")
            if base not in scales:
                total += math.prod(tensor.shape)
            elif part == "weight":
                total += tensor.n_bytes * 8 // bits
        return total

    def _stored(self) -> str:
        quantization = self._quantization()
        formats = formats_by_bytes([(tensor.dtype, tensor.n_bytes) for tensor in self.tensors.values()])
        return f"{quantization.get('bits')}-bit ({formats})" if quantization else formats


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(path, error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise ModelError(path, f"not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(path, "a JSON object is wanted")
    return content
