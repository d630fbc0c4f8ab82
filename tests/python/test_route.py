"""install(): where it reaches, and that it goes without a trace."""

from __future__ import annotations

import importlib
import sys

import mlx.core as mx
import pytest
from kvpool import mlx_lm as paged
from kvpool.paged_cache import BatchPagedKVCache, CausalMask
from mlx_lm.models import base, llama
from mlx_lm.models.cache import make_prompt_cache
from paged_models import prompt, tiny_model

STOCK = base.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def no_route():
    paged.uninstall()
    yield
    paged.uninstall()


def is_routed(*modules):
    return {module.scaled_dot_product_attention is not STOCK for module in modules} == {True}


def test_install_is_idempotent_and_reversible():
    paged.install()
    once = llama.scaled_dot_product_attention
    paged.install()
    assert is_routed(base, llama) and llama.scaled_dot_product_attention is once
    paged.uninstall()
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention is STOCK
    paged.uninstall()
    assert base.scaled_dot_product_attention is STOCK


def test_scopes_nest_and_end_with_an_error():
    with pytest.raises(RuntimeError), paged.install():
        with paged.install():
            assert is_routed(llama)
        assert is_routed(llama)
        raise RuntimeError
    assert llama.scaled_dot_product_attention is STOCK
    paged.install()
    with paged.install():
        pass
    assert is_routed(llama)


def test_modules_imported_later_are_routed_and_released():
    name = "mlx_lm.models.olmo2"
    sys.modules.pop(name, None)
    with paged.install():
        module = importlib.import_module(name)
        assert is_routed(module)
    assert module.scaled_dot_product_attention is STOCK


def test_other_caches_are_left_alone():
    model, tokens = tiny_model("llama"), prompt(20)
    stock = model(tokens[None], cache=make_prompt_cache(model)), model(tokens[None])
    with paged.install():
        routed = model(tokens[None], cache=make_prompt_cache(model)), model(tokens[None])
    assert all(mx.array_equal(a, b) for a, b in zip(stock, routed))


class Attention:
    """Counts who attends."""

    def __init__(self, monkeypatch):
        self.stock = 0
        original = mx.fast.scaled_dot_product_attention

        def counted(*args, **kwargs):
            self.stock += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", counted)


def test_blocks_are_attended_where_they_lie(monkeypatch):
    model = tiny_model("llama")
    count = Attention(monkeypatch)
    model(prompt(9)[None], cache=paged.make_prompt_cache(model))
    assert count.stock == 2
    with paged.install():
        model(prompt(9)[None], cache=paged.make_prompt_cache(model))
    assert count.stock == 2


def layer(n_tokens=12, **options):
    model = tiny_model("llama")
    cache = paged.make_prompt_cache(model, **options)[0]
    tokens = mx.random.normal((1, 2, n_tokens, 16), key=mx.random.key(1))
    return cache, *cache.update_and_fetch(tokens, tokens + 1)


@pytest.mark.parametrize("swap", ["keys", "values", "both"])
def test_other_keys_or_values_than_fetched_are_attended_as_given(swap):
    queries = mx.random.normal((1, 4, 3, 16), key=mx.random.key(2))
    with paged.install():
        cache, keys, values = layer()
        other = {"keys": (keys * 2, values), "values": (keys, keys), "both": (values, keys)}[swap]
        got = base.scaled_dot_product_attention(queries, *other, cache, scale=0.25, mask="causal")
    assert mx.allclose(got, mx.fast.scaled_dot_product_attention(queries, *other, scale=0.25, mask="causal"))


def test_a_window_reaches_attention_that_is_not_routed():
    queries = mx.random.normal((1, 4, 12, 16), key=mx.random.key(2))
    with paged.install():
        model = tiny_model("llama")
        cache = paged.make_prompt_cache(model)[0]
        mask = cache.make_mask(12, window_size=5)
        tokens = mx.random.normal((1, 2, 12, 16), key=mx.random.key(1))
        keys, values = cache.update_and_fetch(tokens, tokens + 1)
        routed = base.scaled_dot_product_attention(queries, keys, values, cache, scale=0.25, mask=mask)
        given = base.scaled_dot_product_attention(queries, keys + 0, values, cache, scale=0.25, mask=mask)
    assert mx.allclose(routed, given, atol=1e-5)
    plain = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask="causal")
    assert not mx.allclose(routed, plain, atol=1e-3)
    with pytest.raises(ValueError):
        mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=mask)


def test_ragged_rows_never_pass_as_plain_causal():
    with paged.install():
        caches = [layer(n)[0] for n in (3, 7)]
        with pytest.raises(ValueError, match="storage"):
            caches[0].merge(caches)
        storage = caches[0].storage
        caches = [layer(n, pool=storage)[0] for n in (3, 7)]
        batch = caches[0].merge(caches)
        mask = batch.make_mask(1)
        assert isinstance(batch, BatchPagedKVCache) and isinstance(mask, CausalMask) and mask != "causal"
    assert batch.make_mask(1).tolist() == [[[[False] * 4 + [True] * 4]], [[[True] * 8]]]
