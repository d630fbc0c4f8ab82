"""Runs the tests that veloxquant-mlx ships for the classes of seed 001 and 000 on kvpool.

    python tests/peers/run.py FOLDER

Downloads the source distribution into FOLDER, unpacks its tests/memory there, and runs pytest on
them with the peer's module names leading to kvpool. Nothing of it is kept in the repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

RELEASE = "veloxquant-mlx==0.94.15"

# Not run, with the reason.
LEFT_OUT = {
    "test_block_pool.py::test_free_all_clears_owner_bookkeeping_not_just_blocks":
        "reads the private fields _owner_blocks and _active_owners; kvpool's own tests show the same "
        "through register_owner() and blocks_for()",
    "test_mlx_storage.py::test_reused_block_buffer_is_recycled_not_reallocated":
        "asks that a freed block's view and its next owner's be one object, so that the old owner "
        "would read the new one's rows; kvpool's views stay as they are",
}


def download(folder: Path) -> Path:
    """The folder with the peer's memory tests."""
    tests = folder / "memory"
    if not tests.exists():
        print(f"==> downloading {RELEASE}", flush=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:",
             "--dest", str(folder), RELEASE],
            check=True,
        )
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            members = [m for m in tar.getmembers() if "/tests/memory/test_" in m.name and m.isfile()]
            unpacked = folder / "memory.partial"
            shutil.rmtree(unpacked, ignore_errors=True)
            unpacked.mkdir(parents=True)
            for member in members:
                (unpacked / Path(member.name).name).write_bytes(tar.extractfile(member).read())
        unpacked.rename(tests)
    return tests


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tests = download(folder)
    for name, reason in LEFT_OUT.items():
        print(f"left out: {name}\n    {reason}")
    deselect = [f"--deselect={tests.name}/{name}" for name in LEFT_OUT]
    shim = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": shim}
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(folder), "-c", os.devnull,
               "-p", "no:cacheprovider", tests.name, *deselect]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
