"""mlx_lm finds kvpool's caches by name, whichever of the two is imported first."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import pytest
from kvpool import BlockPoolAllocator, PagedKVCache, PagedStorage, PoolBackedKVCache, PoolConfig
from mlx_lm.models.cache import save_prompt_cache

KVPOOL_FIRST = "import kvpool\nfrom mlx_lm.models import cache\n"
MLX_LM_FIRST = "from mlx_lm.models import cache\nimport kvpool\n"

# After the imports: the classes are there; what was saved comes back and goes on.
RESTORES = """
import pathlib, sys
import mlx.core as mx

def restores(cache):
    for path in sys.argv[1:]:
        name = pathlib.Path(path).stem
        assert getattr(cache, name) is getattr(kvpool, name)
        (restored,), metadata = cache.load_prompt_cache(path, return_metadata=True)
        assert type(restored) is getattr(kvpool, name), type(restored)
        assert restored.offset == 5 and metadata == {"model": "m"}
        more = mx.ones((1, 2, 1, 32))
        keys, values = restored.update_and_fetch(more, more)
        expected = mx.arange(2 * 5 * 32, dtype=mx.float32).reshape(1, 2, 5, 32)
        assert mx.array_equal(keys, mx.concatenate([expected, more], axis=2)) and restored.offset == 6
        assert mx.array_equal(values, mx.concatenate([-expected, more], axis=2))

restores(cache)
"""


def run(program, *arguments):
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two files, each of a cache and named after its class."""
    folder = tmp_path_factory.mktemp("saved")
    pool = BlockPoolAllocator(PoolConfig(n_blocks=64))
    keys = mx.arange(2 * 5 * 32, dtype=mx.float32).reshape(1, 2, 5, 32)
    for cache in (PoolBackedKVCache(pool, owner=1), PagedKVCache(PagedStorage(pool))):
        cache.update_and_fetch(keys, -keys)
        save_prompt_cache(str(folder / f"{type(cache).__name__}.safetensors"), [cache], {"model": "m"})
    return sorted(folder.iterdir())


@pytest.mark.parametrize("imports", [KVPOOL_FIRST, MLX_LM_FIRST], ids=["kvpool first", "mlx_lm first"])
def test_saved_caches_are_restored_in_a_fresh_process_and_after_a_reload(saved, imports):
    reload = "\nimport importlib\ndel cache.PoolBackedKVCache, cache.PagedKVCache\nrestores(importlib.reload(cache))"
    run(imports + RESTORES + reload, *saved)


def test_a_module_that_was_dropped_and_imported_anew_knows_them(saved):
    again = (
        "\nimport importlib, mlx_lm.models\n"
        "del sys.modules['mlx_lm.models.cache'], mlx_lm.models.cache\n"
        "new = importlib.import_module('mlx_lm.models.cache')\n"
        "assert new is not cache\n"
        "restores(new)"
    )
    run(KVPOOL_FIRST + RESTORES + again, *saved)


HOOK = """
import sys

class Hook:
    '''Another package's: does something to each module of mlx_lm that the finders after it find.'''
    def find_spec(self, name, path, target=None):
        if not name.startswith('mlx_lm.models.'):
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1:]:
            if spec := finder.find_spec(name, path, target):
                run = spec.loader.exec_module
                def exec_module(module):
                    run(module)
                    module.hooked = True
                spec.loader.exec_module = exec_module
                return spec

hook = Hook()
"""
HOOKED = """
from mlx_lm.models import base, cache, llama
assert base.hooked and llama.hooked and cache.hooked
assert cache.PoolBackedKVCache is kvpool.PoolBackedKVCache and cache.PagedKVCache is kvpool.PagedKVCache
assert not hasattr(base, 'PagedKVCache') and not hasattr(llama, 'PagedKVCache')
"""


@pytest.mark.parametrize(
    "install",
    ["sys.meta_path.insert(0, hook)\nimport kvpool", "import kvpool\nsys.meta_path.insert(0, hook)"],
    ids=["hook first", "kvpool first"],
)
def test_other_import_hooks_see_every_module(install):
    run(HOOK + install + HOOKED)


def test_other_modules_are_found_as_before():
    names = ("mlx_lm.models.base", "mlx_lm.models.llama", "json", "mlx_lm.nothing")
    program = f"""
import importlib.util, sys, mlx_lm.models
before = {{name: importlib.util.find_spec(name) for name in {names}}}
finders = list(sys.meta_path)
import kvpool
assert sys.meta_path[1:] == finders, sys.meta_path
assert before == {{name: importlib.util.find_spec(name) for name in before}}
ours = sys.meta_path.pop(0)
assert ours.find_spec('mlx_lm.models.base', mlx_lm.models.__path__) is None
assert ours.find_spec('mlx_lm.models.cache', mlx_lm.models.__path__) is None  # of a path it is not in
import mlx_lm.models.cache
"""
    run(program)


def test_without_mlx_lm_the_error_is_as_without_kvpool():
    program = """
import sys
sys.modules['mlx_lm'] = None
def error():
    try:
        import mlx_lm.models.cache
    except ModuleNotFoundError as error:
        return error.name, str(error)
before = error()
import kvpool
assert error() == before != None
"""
    run(program)
