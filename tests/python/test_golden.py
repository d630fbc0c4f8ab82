"""Files that earlier versions saved (tests/golden/) load, and hold what they held."""

from __future__ import annotations

from pathlib import Path

import kvpool  # noqa: F401  (load_prompt_cache finds the caches by it)
import mlx.core as mx
import numpy as np
import pytest
from kvpool.paged_state import VERSION
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

GOLDEN = Path(__file__).parents[1] / "golden"
VERSIONS = range(1, VERSION + 1)


def as_numpy(array):
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_of_each_version_loads_and_decodes(version):
    caches, metadata = load_prompt_cache(str(GOLDEN / f"paged_v{version}.safetensors"), return_metadata=True)
    expected = mx.load(str(GOLDEN / f"paged_v{version}.values.safetensors"))
    assert metadata == {"made": "by tests/golden/make.py"}
    assert [cache.offset for cache in caches] == [21] * len(caches)
    for layer, cache in enumerate(caches):
        formats = cache.config.key_format, cache.config.value_format
        for name, format, held in zip(("keys", "values"), formats, cache.keys_and_values()):
            stored = expected[f"{layer}.{name}"]
            assert held.dtype == stored.dtype and held.shape == stored.shape
            # Sums of a transform may be rounded otherwise by another backend.
            tolerance = 0 if format == "raw" else 1e-2 if held.dtype == mx.bfloat16 else 1e-3
            np.testing.assert_allclose(as_numpy(held), as_numpy(stored), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_of_each_version_holds_encoded_blocks_and_can_be_continued(version):
    for cache in load_prompt_cache(str(GOLDEN / f"paged_v{version}.safetensors")):
        keys, values = cache.keys_and_values()
        raw = cache.offset * keys.shape[1] * (keys.shape[3] + values.shape[3]) * keys.itemsize
        assert (cache.nbytes < raw) == ((cache.config.key_format, cache.config.value_format) != ("raw", "raw"))
        more, _ = cache.update_and_fetch(keys[:, :, :1], values[:, :, :1])
        np.testing.assert_array_equal(as_numpy(more[:, :, -1:]), as_numpy(keys[:, :, :1]))


def test_the_present_version_is_written_as_in_the_file(tmp_path):
    path = GOLDEN / f"paged_v{VERSION}.safetensors"
    caches, metadata = load_prompt_cache(str(path), return_metadata=True)
    save_prompt_cache(str(tmp_path / "again.safetensors"), caches, metadata)
    then, now = mx.load(str(path)), mx.load(str(tmp_path / "again.safetensors"))
    assert then.keys() == now.keys()
    for name, array in then.items():
        assert array.dtype == now[name].dtype
        np.testing.assert_array_equal(np.array(array), np.array(now[name]))
