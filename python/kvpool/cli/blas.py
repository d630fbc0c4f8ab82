"""OpenBLAS in place of the reference BLAS that the CPU wheel of MLX links on Linux.

A library loaded into the global scope before MLX is found first when MLX's symbols are bound. Once MLX is loaded that
is too late, and the process starts itself again with ``LD_PRELOAD``.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import sys
from pathlib import Path

_PRELOADED = "KVPOOL_OPENBLAS_PRELOADED"
_HINT = (
    "`apt install libopenblas0-pthread` (or KVPOOL_OPENBLAS=/path/to/libopenblas.so.0) makes the CPU many times faster"
)


def use_openblas() -> str:
    """Makes MLX use OpenBLAS in this process; may replace the process by itself (``exec``).

    ``$KVPOOL_OPENBLAS`` names the library; otherwise it is looked for where Debian and ``ldconfig`` put it.

    Returns: one line that says what MLX's CPU backend uses now.
    """
    if not links_reference_blas():
        return "BLAS: as MLX was built"
    if preloaded := os.environ.pop(_PRELOADED, None):
        os.environ.pop("LD_PRELOAD", None)
        return f"BLAS: OpenBLAS ({preloaded})"
    path = find_openblas()
    if path is None:
        return f"BLAS: reference; {_HINT}"
    try:
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    except OSError as error:
        return f"BLAS: reference, since {path} cannot be loaded ({error}); {_HINT}"
    if "mlx.core" in sys.modules:
        _restart_with(path)
    return f"BLAS: OpenBLAS ({path})"


def find_openblas() -> str | None:
    """The path or soname of OpenBLAS, or None."""
    if named := os.environ.get("KVPOOL_OPENBLAS"):
        return named
    for pattern in ("*/openblas-pthread", "*/openblas-openmp", "*/openblas-serial", "*"):
        for library in sorted(Path("/usr/lib").glob(f"{pattern}/libopenblas.so.0")):
            return str(library)
    return ctypes.util.find_library("openblas")


def links_reference_blas() -> bool:
    """Whether the installed MLX is the Linux CPU wheel, which brings the reference BLAS along. Does not import MLX."""
    spec = importlib.util.find_spec("mlx")
    locations = (spec.submodule_search_locations or []) if spec else []
    return any(any(Path(location).parent.glob("mlx_cpu.libs/libblas*")) for location in locations)


def _restart_with(path: str) -> None:
    preload = " ".join(filter(None, (path, os.environ.get("LD_PRELOAD"))))
    environment = os.environ | {"LD_PRELOAD": preload, _PRELOADED: path}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
