"""Checks a safetensors file against its own size before anything maps it.

MLX loads lazily: a file shorter than its header says looks loaded, and fails, or yields zeros, when it is used.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ModelError

MAX_HEADER_BYTES = 100_000_000

_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class SafeTensor:
    """One entry of the header: row-major ``shape``, and the bytes it takes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int


def check_safetensors(path: str | Path) -> dict[str, SafeTensor]:
    """Reads and checks the header of one file.

    Returns: the tensors by name. No tensor data are read.

    Raises:
        ModelError: the header does not fit the file, or a tensor's dtype, shape and offsets do not fit each other;
            names the tensor.
    """
    path = Path(path)
    header, n_data_bytes = _read_header(path)
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, SafeTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensors[name], begin, end = _check_entry(path, name, entry, n_data_bytes)
        spans.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            fault = "overlaps the tensor before it" if begin < at else f"leaves a gap after byte {at}"
            raise ModelError(path, f"tensor {name!r} starts at byte {begin}, which {fault}")
        at = end
    if at != n_data_bytes:
        raise ModelError(path, f"the tensors take {at} bytes of data, but the file holds {n_data_bytes}")
    return tensors


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the parsed header and the number of data bytes after it."""
    try:
        n_file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ModelError(
                    path, f"the file has {n_file_bytes} bytes; a safetensors file starts with 8 for the header's length"
                )
            (length,) = struct.unpack("<Q", prefix)
            if length > min(n_file_bytes - 8, MAX_HEADER_BYTES):
                raise ModelError(
                    path,
                    f"the header's length is {length}; after it {n_file_bytes - 8} bytes follow, and at most "
                    f"{MAX_HEADER_BYTES} are allowed",
                )
            text = file.read(length)
    except OSError as error:
        raise ModelError(path, error.strerror or str(error)) from None
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(path, f"the header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise ModelError(path, "the header is not a JSON object")
    return header, n_file_bytes - 8 - length


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name occurs twice")
    return unique


def _check_entry(path: Path, name: str, entry: Any, n_data_bytes: int) -> tuple[SafeTensor, int, int]:
    what = f"tensor {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ModelError(path, f"{what} needs dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise ModelError(path, f"{what} has the dtype {dtype!r}; known: {' '.join(_DTYPE_BITS)}")
    if not _are_counts(shape):
        raise ModelError(path, f"{what} has the shape {_clipped(shape)}; a list of integers from 0 is wanted")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ModelError(path, f"{what} has the data_offsets {_clipped(offsets)}; two integers from 0 are wanted")
    begin, end = offsets
    if begin > end:
        raise ModelError(path, f"{what} has reversed data_offsets [{begin}, {end}]")
    wanted = math.prod(shape) * _DTYPE_BITS[dtype] // 8
    if end - begin != wanted:
        raise ModelError(path, f"{what} spans {end - begin} bytes; {dtype} of shape {_clipped(shape)} takes {wanted}")
    if end > n_data_bytes:
        raise ModelError(path, f"{what} ends at byte {end}, but the file holds {n_data_bytes} bytes of data")
    return SafeTensor(name, dtype, tuple(shape), wanted), begin, end


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and len(values) <= 32 and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _clipped(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
