"""Any model file or folder → an mlx_lm model with its tokenizer."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .default import default_model_path
from .errors import ModelError
from .folder import ModelFolder
from .gguf_file import GGUFFile
from .gguf_llama import LlamaGGUF
from .gguf_tokenizer import GGUFTokenizer
from .info import ModelInfo

if TYPE_CHECKING:
    from mlx.nn import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper

DTYPES = ("float16", "bfloat16", "float32")


def inspect(path: str | Path | None = None) -> ModelInfo:
    """What the model is, from its metadata: the file's tables are checked, no weights are read.

    Raises:
        ModelError: as :func:`load`.
    """
    return _open(path).info


def load(path: str | Path | None = None, dtype: str | None = None) -> tuple[Module, TokenizerWrapper, ModelInfo]:
    """Loads a GGUF file or an mlx_lm folder; without a path, the default model.

    Args:
        dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``, for weights and activations (packed weights stay packed).
            By default float32 on the CPU, where it is fastest; on a GPU the folder's own, and float16 for a GGUF.

    Returns: the evaluated model, its tokenizer and its shape. Nothing is fetched but the default model.

    Raises:
        ModelError: the file is missing, truncated, inconsistent, or of a kind that is not supported. One line.
        ValueError: another ``dtype``.
    """
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
    source = _open(path)
    try:
        if isinstance(source, ModelFolder):
            return *_load_folder(source, dtype), source.info
        return *_load_gguf(source, dtype), source.info
    except ModelError:
        raise
    except Exception as error:  # mlx_lm, transformers and jinja2 raise anything on a bad config or tokenizer
        raise ModelError(source.info.path, f"mlx_lm cannot build this model: {error}") from error


def read_gguf(path: str | Path) -> tuple[LlamaGGUF, GGUFTokenizer]:
    """Opens a GGUF file and checks all that can be checked before tensor data are read."""
    model = LlamaGGUF(GGUFFile(path))
    return model, GGUFTokenizer(model.file, model.config["vocab_size"])


def write_settings(folder: Path, model: LlamaGGUF, tokenizer: GGUFTokenizer, dtype: str) -> None:
    """Writes every file of an mlx_lm folder but the weights."""
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_ids}
    ids = {name: value for name, value in ids.items() if value not in (None, [])}
    contents: dict[str, Any] = {
        "config.json": model.config | ids | {"torch_dtype": dtype},
        "generation_config.json": ids,
        "tokenizer.json": tokenizer.tokenizer_json,
        "tokenizer_config.json": tokenizer.tokenizer_config,
    }
    for name, content in contents.items():
        indent = None if name == "tokenizer.json" else 2
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=indent), encoding="utf-8")
    if tokenizer.chat_template:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _open(path: str | Path | None) -> ModelFolder | LlamaGGUF:
    path = default_model_path() if path is None else Path(path)
    if path.is_dir():
        return ModelFolder(path)
    if not path.exists():
        raise ModelError(path, "no such file or folder; a GGUF file or an mlx_lm folder is wanted")
    return LlamaGGUF(GGUFFile(path))


def _running_dtype(dtype: str | None) -> str | None:
    import mlx.core as mx

    return dtype or ("float32" if mx.default_device() == mx.cpu else None)


def _load_gguf(source: LlamaGGUF, dtype: str | None) -> tuple[Module, TokenizerWrapper]:
    import mlx.core as mx
    from mlx_lm.tokenizer_utils import load as load_tokenizer
    from mlx_lm.utils import _get_classes

    running = _running_dtype(dtype) or "float16"
    tokenizer = GGUFTokenizer(source.file, source.config["vocab_size"])
    model_class, args_class = _get_classes(source.config)
    model = model_class(args_class.from_dict(source.config))
    weights = [(name, mx.array(values).astype(getattr(mx, running))) for name, values in source.weights()]
    model.load_weights(weights)
    model.eval()
    mx.eval(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        write_settings(Path(folder), source, tokenizer, running)
        return model, load_tokenizer(Path(folder), eos_token_ids=tokenizer.eos_ids or None)


def _load_folder(source: ModelFolder, dtype: str | None) -> tuple[Module, TokenizerWrapper]:
    import mlx.core as mx
    from mlx_lm.utils import load as load_mlx_lm

    model, tokenizer = load_mlx_lm(str(source.path), lazy=True)
    running = _running_dtype(dtype)
    if running:
        model.set_dtype(getattr(mx, running))
    mx.eval(model.parameters())
    return model, tokenizer
