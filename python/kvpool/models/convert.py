"""A GGUF file → an ordinary mlx_lm folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..atomic import new_folder
from .errors import ModelError
from .info import ModelInfo
from .load import DTYPES, read_gguf, write_settings


def convert(source: str | Path, target: str | Path, dtype: str = "float16", *, force: bool = False) -> ModelInfo:
    """Writes the model and tokenizer of a Llama-family GGUF as a folder that ``mlx_lm.load`` takes.

    The folder appears whole or not at all. Greedy answers equal those of the GGUF loaded with the same ``dtype``.

    Raises:
        ModelError: the source cannot be used, or the target exists and ``force`` is false. Nothing is written then.
        ValueError: another ``dtype`` than float16, bfloat16 or float32.
        OSError: the target cannot be written.
    """
    import mlx.core as mx

    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
    target = Path(target)
    if target.exists() and not force:
        raise ModelError(target, "exists already; --force replaces it")
    if target.exists() and not (target / "config.json").is_file() and not _is_empty_folder(target):
        raise ModelError(target, "is no model folder, so it is not replaced")
    if not Path(source).is_file():
        raise ModelError(source, "no such file; a GGUF file is wanted")
    model, tokenizer = read_gguf(source)
    with new_folder(target) as folder:
        write_settings(folder, model, tokenizer, dtype)
        weights = {name: _cast(values, getattr(mx, dtype)) for name, values in model.weights()}
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return model.info


def _cast(values: np.ndarray, dtype: object) -> object:
    """Evaluates at once, so that only one tensor is held as float32."""
    import mlx.core as mx

    array = mx.array(values).astype(dtype)
    mx.eval(array)
    return array


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
