"""The GGUF container: metadata and the tensor table, checked against the size of the file.

Every count, length, shape and offset is compared with the bytes that are really there before it is used, so that a
truncated or hostile file costs neither memory nor time. Tensor data are mapped, and read only by :meth:`GGUFFile.raw`.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from .errors import ModelError

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_LENGTH = 1 << 22

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

DEQUANTIZED = frozenset(
    GGMLQuantizationType[name]
    for name in (
        "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K TQ1_0 TQ2_0 MXFP4 "
        "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS"
    ).split()
)


@dataclass(frozen=True)
class GGUFTensor:
    """One row of the tensor table. ``shape`` is row-major (GGUF stores it reversed); ``start`` is a file offset."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    n_bytes: int


class GGUFFile:
    """A GGUF file whose table of contents has been checked.

    Raises:
        ModelError: the file is missing, no GGUF, truncated, or inconsistent with itself. Nothing but the header
            has been read then.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(path, error.strerror or str(error)) from None
        except ValueError:
            raise ModelError(path, "the file is empty; a GGUF file is wanted") from None
        header = _Header(self.path, self._data)
        self.metadata = header.metadata
        self.tensors = header.tensors

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor: uint8, shape ``(*shape[:-1], bytes a row)``. A view of the mapped file."""
        tensor = self.tensors[name]
        stored = np.frombuffer(self._data, np.uint8, tensor.n_bytes, tensor.start)
        return stored.reshape(*tensor.shape[:-1], -1)

    def read(self, name: str) -> np.ndarray:
        """A tensor's values, dequantised: float32 of its shape."""
        tensor = self.tensors[name]
        return dequantize(self.raw(name), tensor.kind).astype(np.float32, copy=False).reshape(tensor.shape)

    def value(self, key: str, kind: type, default: Any = None, *, low: float | None = None) -> Any:
        """A metadata value of the given type (``int``, ``float``, ``bool``, ``str`` or ``list``).

        Raises:
            ModelError: the key is missing and has no default, is of another type, not finite, or below ``low``.
        """
        if key not in self.metadata:
            if default is None:
                raise ModelError(self.path, f"metadata key {key} is missing")
            return default
        found = self.metadata[key]
        if type(found) is not kind:
            raise ModelError(self.path, f"metadata key {key} is of type {type(found).__name__}, not {kind.__name__}")
        if kind is float and not math.isfinite(found):
            raise ModelError(self.path, f"metadata key {key} is {found}; a finite number is wanted")
        if low is not None and found < low:
            raise ModelError(self.path, f"metadata key {key} is {found}; it must be at least {low}")
        return found


class _Header:
    """Reads the header once, front to back, never past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0
        if data[:4] != b"GGUF":
            raise ModelError(path, f"the file starts with {data[:4]!r}; a GGUF file starts with b'GGUF'")
        self._at = 4
        version = self._scalar("I", "the version")
        if version not in VERSIONS:
            raise ModelError(path, f"GGUF version {version}; versions 2 and 3 (little-endian) are read")
        n_tensors = self._count("the tensor count", _MIN_TENSOR_BYTES)
        n_pairs = self._count("the metadata count", _MIN_PAIR_BYTES)
        self.metadata: dict[str, Any] = {}
        for index in range(n_pairs):
            self._read_pair(index)
        table = [self._read_tensor(index) for index in range(n_tensors)]
        self.tensors = self._place(table)

    def _need(self, n_bytes: int, what: str) -> None:
        left = len(self._data) - self._at
        if n_bytes > left:
            raise ModelError(
                self._path,
                f"{what} needs {n_bytes} bytes at offset {self._at}, but {left} are left: the file is cut short",
            )

    def _scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self._need(size, what)
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += size
        return value

    def _count(self, what: str, min_bytes: int) -> int:
        count = self._scalar("Q", what)
        most = (len(self._data) - self._at) // min_bytes
        if count > most:
            raise ModelError(self._path, f"{what} is {count}; the rest of the file holds at most {most}")
        return count

    def _string(self, what: str) -> str:
        length = self._scalar("Q", f"the length of {what}")
        if length > MAX_STRING_BYTES:
            raise ModelError(self._path, f"{what} is {length} bytes long; at most {MAX_STRING_BYTES} are allowed")
        self._need(length, what)
        stored = self._data[self._at : self._at + length]
        self._at += length
        try:
            return stored.decode()
        except UnicodeDecodeError:
            raise ModelError(self._path, f"{what} is not UTF-8") from None

    def _read_pair(self, index: int) -> None:
        key = self._string(f"the name of metadata entry {index}")
        what = f"metadata key {_shown(key)}"
        if key in self.metadata:
            raise ModelError(self._path, f"{what} occurs twice")
        self.metadata[key] = self._value(self._scalar("I", f"the type of {what}"), what)

    def _value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            return self._array(what)
        raise ModelError(self._path, f"{what} has the unknown value type {kind}; types 0 to 12 are allowed")

    def _array(self, what: str) -> list[Any]:
        kind = self._scalar("I", f"the element type of {what}")
        if kind != _STRING and kind not in _SCALARS:
            raise ModelError(
                self._path, f"{what} is an array of type {kind}; arrays of scalars and strings are allowed"
            )
        size = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind])
        count = self._count(f"the length of {what}", size)
        if count > MAX_ARRAY_LENGTH:
            raise ModelError(self._path, f"{what} has {count} elements; at most {MAX_ARRAY_LENGTH} are allowed")
        if kind == _STRING:
            return [self._string(f"element {index} of {what}") for index in range(count)]
        values = struct.unpack_from(f"<{count}{_SCALARS[kind]}", self._data, self._at)
        self._at += count * size
        return list(values)

    def _read_tensor(self, index: int) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string(f"the name of tensor {index}")
        what = f"tensor {_shown(name)}"
        n_dims = self._scalar("I", f"the dimension count of {what}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise ModelError(self._path, f"{what} has {n_dims} dimensions; 1 to {MAX_DIMS} are allowed")
        shape = tuple(self._scalar("Q", f"the shape of {what}") for _ in range(n_dims))[::-1]
        if min(shape) < 1 or math.prod(shape) >= 1 << 63:
            raise ModelError(
                self._path, f"{what} has the shape {shape}; each side must be positive, their product below 2^63"
            )
        kind = self._scalar("I", f"the type of {what}")
        offset = self._scalar("Q", f"the offset of {what}")
        try:
            return name, shape, GGMLQuantizationType(kind), offset
        except ValueError:
            raise ModelError(self._path, f"{what} has the unknown type {kind}; known: {_known_types()}") from None

    def _place(self, table: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]]) -> dict[str, GGUFTensor]:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise ModelError(
                self._path, f"metadata key general.alignment is {alignment!r}; a power of two from 8 is wanted"
            )
        base = -(-self._at // alignment) * alignment
        placed: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in table:
            what = f"tensor {_shown(name)}"
            if name in placed:
                raise ModelError(self._path, f"{what} occurs twice")
            if kind not in DEQUANTIZED:
                raise ModelError(
                    self._path, f"{what} has the type {kind.name}, which is not read; read: {_known_types()}"
                )
            per_block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % per_block:
                raise ModelError(
                    self._path, f"{what} has rows of {shape[-1]}; {kind.name} needs a multiple of {per_block}"
                )
            n_bytes = math.prod(shape) // per_block * block_bytes
            if offset % alignment:
                raise ModelError(
                    self._path, f"{what} starts at {offset}, which is no multiple of the alignment {alignment}"
                )
            if base + offset + n_bytes > len(self._data):
                raise ModelError(
                    self._path,
                    f"{what} needs bytes {base + offset} to {base + offset + n_bytes}, "
                    f"but the file ends at {len(self._data)}",
                )
            placed[name] = GGUFTensor(name, shape, kind, base + offset, n_bytes)
        in_order = sorted(placed.values(), key=lambda tensor: tensor.start)
        for before, after in itertools.pairwise(in_order):
            if before.start + before.n_bytes > after.start:
                raise ModelError(self._path, f"tensors {_shown(before.name)} and {_shown(after.name)} overlap")
        return placed


def _shown(name: str) -> str:
    """A name from the file, fit for one line of an error message."""
    short = name if len(name) <= 80 else name[:77] + "..."
    return short if short.isprintable() and short else repr(short)


def _known_types() -> str:
    return " ".join(sorted(kind.name for kind in DEQUANTIZED))
