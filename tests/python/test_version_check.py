"""What ``import kvpool`` says of an MLX that is missing or another, and what it imports itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kvpool
import mlx.core
import pytest


def run(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **environment}
    )


def import_error(prelude):
    """The ImportError of ``import kvpool`` after ``prelude``, in a process of its own."""
    done = run(
        f"{prelude}\n"
        "try:\n    import kvpool\n"
        "except ImportError as error:\n    print(type(error).__name__, '|', error, '|', repr(error.__cause__))\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout, "kvpool was imported"
    return done.stdout


@pytest.mark.parametrize("version", ["0.1.2", mlx.core.__version__ + ".1", mlx.core.__version__ + ".dev20261128"])
def test_another_mlx_is_an_error_that_names_both_and_the_way_out(version):
    said = import_error(f"import mlx.core; mlx.core.__version__ = {version!r}")
    built_against = mlx.core.__version__
    assert said.startswith("ImportError | ")
    assert f"built against MLX {built_against}, and MLX {version} is installed" in said
    assert f"pip install 'mlx=={built_against}'" in said
    assert f"'mlx[cpu]=={built_against}'" in said and f"'mlx[cuda13]=={built_against}'" in said


def test_another_mlx_is_noticed_before_the_extension_is_loaded():
    done = run(
        "import sys, mlx.core\n"
        "mlx.core.__version__ = '0.1.2'\n"
        "try:\n    import kvpool\nexcept ImportError:\n    pass\n"
        "print([name for name in sys.modules if name.startswith('kvpool._core')])"
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_missing_mlx_is_another_error(tmp_path):
    said = import_error("import sys; sys.modules['mlx'] = None")
    assert said.startswith("ImportError | kvpool needs MLX, which cannot be imported")
    assert "'mlx[cpu]'" in said and "'mlx[cuda13]'" in said
    assert "ModuleNotFoundError" in said.rpartition("|")[2]


def test_an_mlx_without_a_backend_says_what_it_said():
    said = import_error(
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'mlx.core': raise ImportError('libmlx.so: cannot open shared object file')\n"
        "sys.meta_path.insert(0, Broken())"
    )
    assert "cannot be imported (libmlx.so: cannot open shared object file)" in said and "exactly one" in said


def test_importing_kvpool_imports_no_part_of_mlx_lm():
    program = "import sys, json, kvpool; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = run(program)
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout))
    assert {"kvpool", "mlx"} <= imported
    assert not imported & {"mlx_lm", "transformers", "tokenizers", "numpy", "gguf", "typer", "rich", "torch"}


def test_the_caches_work_without_mlx_lm_until_it_is_needed():
    done = run(
        "import sys, kvpool, mlx.core as mx\n"
        "pool = kvpool.BlockPoolAllocator()\n"
        "cache = kvpool.PoolBackedKVCache(pool, owner=1)\n"
        "cache.update_and_fetch(mx.zeros((1, 2, 3, 8)), mx.zeros((1, 2, 3, 8)))\n"
        "cache.trim(1); cache.state; cache.release()\n"
        "print('mlx_lm' in sys.modules)"
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_source_tree_without_the_extension_says_how_to_build_it(tmp_path):
    package = tmp_path / "kvpool"
    package.mkdir()
    for module in ("__init__.py", "_version_check.py"):
        (package / module).write_text((Path(kvpool.__file__).parent / module).read_text())
    done = run("import kvpool", PYTHONPATH=str(tmp_path))
    assert "ImportError: kvpool's extension is not built" in done.stderr and "make build" in done.stderr
