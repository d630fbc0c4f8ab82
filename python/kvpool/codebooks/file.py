"""Sets of codebooks in files, and those that come with the package.

A file is safetensors: the arrays of both streams (``keys.smooth``, ``values.mean`` ...; ``rotation`` may be missing) and
the ``sketch`` of the model; its metadata say ``kvpool`` (version of the file's layout: 2, or 1, which had one code and no rotation), ``format``, ``architecture`` (JSON) and whether the
streams are coded after a Hadamard transform.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from .._core import VecInferCalibration, VecInferCodebooks, VecInferStream
from ..atomic import new_file
from ..models.errors import ModelError
from ..models.safetensors_check import check_safetensors
from .fingerprint import SKETCH_SIZE, Fingerprint, fingerprint_of

VERSION = 2

_STREAMS = ("keys", "values")
_ARRAYS = {
    "codes": (mx.int32, 2),
    "centroids": (mx.int8, 1),
    "scales": (mx.float32, 1),
    "codebook_of": (mx.int32, 2),
    "smooth": (mx.float32, 3),
    "mean": (mx.float32, 3),
}
_OPTIONAL = {"rotation": (mx.int8, 4)}
_SHIPPED = Path(__file__).parent


def save_codebooks(path: str | Path, format: str, calibration: VecInferCalibration, fingerprint: Fingerprint) -> None:
    """Writes a set of codebooks for the model of ``fingerprint``; the file appears whole or not at all.

    Raises:
        ValueError: the streams do not fit the format or the model.
        OSError: the file cannot be written.
    """
    streams = {name: getattr(calibration, name) for name in _STREAMS}
    _checked(VecInferCodebooks(format, *streams.values()), fingerprint)
    parts = {f"{name}.{part}": getattr(streams[name], part) for name in _STREAMS for part in _ARRAYS | _OPTIONAL}
    arrays = {name: array for name, array in parts.items() if array is not None}
    metadata = {
        "kvpool": str(VERSION),
        "format": format,
        "architecture": json.dumps(fingerprint.architecture, sort_keys=True),
        **{f"{name}.hadamard": str(int(stream.hadamard)) for name, stream in streams.items()},
    }
    with new_file(path) as temporary, temporary.open("wb") as file:
        mx.save_safetensors(file, arrays | {"sketch": fingerprint.sketch}, metadata)


def load_codebooks(path: str | Path, model: Any = None) -> VecInferCodebooks:
    """The set of codebooks in a file.

    Args:
        model: the loaded mlx_lm model that they shall serve; not compared if None.

    Raises:
        ValueError: the file is no such set, or is of another model. Says what is wrong.
        OSError: the file cannot be read.
    """
    codebooks, fingerprint = read_file(path)
    if model is not None and (difference := fingerprint.difference(fingerprint_of(model))):
        raise ValueError(f"{path}: these codebooks are of another model: of this one {difference}")
    return codebooks


def find_codebooks(model: Any, format: str) -> VecInferCodebooks:
    """The set that comes with kvpool for this model, whatever its type or quantisation.

    Raises:
        ValueError: there is none.
    """
    wanted = fingerprint_of(model)
    for path in sorted(_SHIPPED.glob(f"*.{format}.safetensors")):
        codebooks, fingerprint = _shipped(path)
        if fingerprint.difference(wanted) is None:
            return codebooks
    bits = format.removeprefix("vecinfer")
    raise ValueError(
        f"kvpool brings no {format} codebooks for this model; "
        f"make them once: kvpool calibrate MODEL --text FILE --bits {bits} -o FILE"
    )


def codebook_sets(model: Any, formats: Iterable[str], files: Iterable[str] | None = None) -> dict[str, Any]:
    """A set for each vecinfer format among ``formats``, by format: of ``files`` where one has it, else that which comes
    with kvpool. Raises as load_codebooks() and find_codebooks().
    """
    sets = {found.format: found for found in (load_codebooks(file, model) for file in files or ())}
    for name in formats:
        if name.startswith("vecinfer") and name not in sets:
            sets[name] = find_codebooks(model, name)
    return sets


def read_file(path: str | Path) -> tuple[VecInferCodebooks, Fingerprint]:
    """A set and the fingerprint of its model. Raises as load_codebooks()."""
    path = Path(path)
    arrays, metadata = _read(path)
    version = metadata.get("kvpool")
    if version is None or "format" not in metadata:
        raise ValueError(f"{path}: this is no file of codebooks")
    if version not in ("1", str(VERSION)):
        raise ValueError(f"{path}: the file is of version {version}, this kvpool reads versions 1 and {VERSION}")
    try:
        if version == "1":
            arrays = arrays | _codes_of_version_1(arrays)
        streams = [_stream(name, arrays, metadata) for name in _STREAMS]
        codebooks = VecInferCodebooks(metadata["format"], *streams)
        return codebooks, _checked(codebooks, _fingerprint(arrays, metadata))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def shipped_codebooks(identity: str) -> VecInferCodebooks | None:
    """The set that comes with kvpool and has this identity (hexadecimal), if there is one."""
    for path in sorted(_SHIPPED.glob("*.safetensors")):
        codebooks, _ = _shipped(path)
        if f"{codebooks.identity:016x}" == identity:
            return codebooks
    return None


@lru_cache(maxsize=16)
def _shipped(path: Path) -> tuple[VecInferCodebooks, Fingerprint]:
    return read_file(path)


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    with path.open("rb"):  # tells what is wrong in the system's words
        pass
    try:
        check_safetensors(path)
    except ModelError as error:
        raise ValueError(str(error)) from None
    return mx.load(str(path), format="safetensors", return_metadata=True)


def _stream(name: str, arrays: dict[str, mx.array], metadata: dict[str, str]) -> VecInferStream:
    wanted = _ARRAYS | {part: kind for part, kind in _OPTIONAL.items() if f"{name}.{part}" in arrays}
    parts = {part: _array(arrays, f"{name}.{part}", *kind) for part, kind in wanted.items()}
    hadamard = metadata.get(f"{name}.hadamard")
    if hadamard not in ("0", "1"):
        raise ValueError(f"{name}.hadamard must be 0 or 1, got {hadamard!r}")
    return VecInferStream(**parts, hadamard=hadamard == "1")


def _codes_of_version_1(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """What version 2 has in place of centroids (n_codebooks, n_codes, channels)."""
    changed = {}
    for name in _STREAMS:
        centroids = _array(arrays, f"{name}.centroids", mx.int8, 3)
        n_codebooks, n_codes, sub_dim = centroids.shape
        code = [sub_dim, max(n_codes - 1, 0).bit_length()]
        if n_codes != 1 << code[1]:
            raise ValueError(f"{name}.centroids must be of 256 or 4096 codes, got {n_codes}")
        changed[f"{name}.codes"] = mx.array([code] * n_codebooks, mx.int32)
        changed[f"{name}.centroids"] = centroids.reshape(-1)
    return changed


def _array(arrays: dict[str, mx.array], name: str, dtype: mx.Dtype, ndim: int) -> mx.array:
    array = arrays.get(name)
    if array is None:
        raise ValueError(f"the array {name} is missing")
    if array.dtype != dtype or array.ndim != ndim:
        raise ValueError(f"{name} must be {dtype} of {ndim} dimensions, got {array.dtype} of {array.ndim}")
    return array


def _fingerprint(arrays: dict[str, mx.array], metadata: dict[str, str]) -> Fingerprint:
    try:
        architecture = json.loads(metadata.get("architecture", ""))
    except ValueError:
        architecture = None
    if not isinstance(architecture, dict):
        raise ValueError("architecture must be a JSON object")
    sketch = _array(arrays, "sketch", mx.float32, 2)
    if not mx.all(mx.isfinite(sketch)).item():
        raise ValueError("sketch must be finite")
    return Fingerprint(architecture, sketch)


def _checked(codebooks: VecInferCodebooks, fingerprint: Fingerprint) -> Fingerprint:
    if fingerprint.sketch.shape != (codebooks.n_layers, SKETCH_SIZE):
        shape = (codebooks.n_layers, SKETCH_SIZE)
        raise ValueError(f"sketch must be {shape} for {codebooks.n_layers} layers, got {fingerprint.sketch.shape}")
    return fingerprint
