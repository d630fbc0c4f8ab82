"""The installed packages, as their users meet them.

    python tests/install/run.py WHEEL_FOLDER FOLDER

C++: ``cmake --install`` into FOLDER/prefix, then a consumer that finds the package there is built
and run. Python: the wheel in WHEEL_FOLDER is installed into a clean environment in FOLDER/venv, where the
command and the import are run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import mlx.core

ROOT = Path(__file__).resolve().parents[2]
MLX_DIR = Path(mlx.core.__file__).parent / "share/cmake/MLX"


def run(*command: object, **options: object) -> str:
    print("==>", *command, flush=True)
    done = subprocess.run([str(c) for c in command], check=True, text=True, stdout=subprocess.PIPE, **options)
    return done.stdout


def cpp_package(folder: Path) -> None:
    prefix, build = folder / "prefix", folder / "consumer"
    shutil.rmtree(prefix, ignore_errors=True)
    shutil.rmtree(build, ignore_errors=True)
    run("cmake", "--install", ROOT / "build/dev", "--prefix", prefix)
    run("cmake", "-S", ROOT / "tests/install/consumer", "-B", build, "-G", "Ninja",
        f"-DCMAKE_PREFIX_PATH={prefix}", f"-DMLX_DIR={MLX_DIR}")
    run("cmake", "--build", build)
    assert "pool_blocks_in_use 3\n" in run(build / "pool_consumer")
    run(build / "mlx_consumer")


def python_package(wheels: Path, folder: Path) -> None:
    environment = folder / "venv"
    python = environment / "bin/python"
    if not python.exists():
        venv.create(environment, with_pip=True)
    (wheel,) = wheels.glob("kvpool-*.whl")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*pip, wheel)
    run(*pip, "--no-deps", "--force-reinstall", wheel)
    version = run(environment / "bin/kvpool", "--version", cwd=folder)
    assert version.startswith("kvpool "), version
    said = run(python, "-c", "import kvpool; p = kvpool.BlockPoolAllocator(); "
               "print(len(p.allocate('k', 40, 1)))", cwd=folder)
    assert said == "3\n", said


def main() -> None:
    wheels, folder = (Path(argument).resolve() for argument in sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    cpp_package(folder)
    python_package(wheels, folder)
    print("install: 2 passed, 0 failed")


if __name__ == "__main__":
    main()
