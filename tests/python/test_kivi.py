"""Standalone caches from KVCacheBuilder: attention within the error of their format, and packed for real."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from kvpool import KVCacheBuilder, KVCacheConfig, KVCacheFactory

HEAD_DIM = 64
#: method, bits, largest error of attention over normal keys and values
METHODS = [("fp16", 2, 2e-3), ("int", 8, 2e-2), ("int", 4, 0.15), ("kivi", 4, 0.15), ("kivi", 2, 0.6)]


def build(method="kivi", bits=2, window=0, sink=0, head_dim=HEAD_DIM):
    builder = KVCacheBuilder().with_method(method).with_head_dim(head_dim).with_bits(bits)
    return builder.with_window(window).with_sink(sink).build()


def fill(cache, n, *, seed=0, head_dim=HEAD_DIM):
    mx.random.seed(seed)
    keys, values = mx.random.normal((2, n, head_dim)).astype(mx.float16)
    for key, value in zip(keys, values):
        cache.append_key(key)
        cache.append_value(value)
    return keys.astype(mx.float32), values.astype(mx.float32)


def attend(keys, values, query):
    return mx.softmax(keys @ query / math.sqrt(keys.shape[1])) @ values


@pytest.mark.parametrize("n", [1, 31, 32, 33, 100])
@pytest.mark.parametrize(("method", "bits", "tolerance"), METHODS)
def test_attention_is_within_the_formats_error(method, bits, tolerance, n):
    cache = build(method, bits)
    keys, values = fill(cache, n)
    query = mx.random.normal((HEAD_DIM,))
    out = cache.attend(query.astype(mx.float16))
    assert out.shape == (HEAD_DIM,) and out.dtype == mx.float16
    assert mx.abs(out - attend(keys, values, query)).max().item() < tolerance
    assert len(cache) == n


def test_tokens_in_the_window_are_exact():
    cache = build("kivi", 2, window=128)
    keys, values = fill(cache, 100)
    query = mx.random.normal((HEAD_DIM,))
    assert mx.abs(cache.attend(query) - attend(keys, values, query)).max().item() < 2e-3


def test_old_tokens_are_really_packed():
    sizes = {}
    for method, bits in (("fp16", 2), ("int", 8), ("int", 4), ("kivi", 4), ("kivi", 2)):
        cache = build(method, bits)
        fill(cache, 1024)
        sizes[method, bits] = cache.memory_bytes()
    raw = 1024 * 2 * HEAD_DIM * 2
    assert raw <= sizes["fp16", 2] <= raw * 1.1
    for (method, bits), size in sizes.items():
        if method != "fp16":
            assert raw * bits / 16 < size < raw * (bits + 1.2) / 16 + raw / 16, (method, bits)


@pytest.mark.parametrize("constant", [0.0, 0.5, -3.0])
@pytest.mark.parametrize(("method", "bits", "tolerance"), METHODS)
def test_p9_flat_groups_decode_to_their_constant(method, bits, tolerance, constant):
    cache = build(method, bits)
    vector = mx.full((HEAD_DIM,), constant, mx.float16)
    for _ in range(64):
        cache.append(vector, vector)
    out = cache.attend(vector)
    assert mx.isfinite(out).all()
    rounding = 1.2e-2 if method == "int" else 2e-3  # its Hadamard transform puts all of a flat row into one channel
    assert mx.abs(out - constant).max().item() <= abs(constant) * rounding


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_head_dims(head_dim):
    cache = build("kivi", 4, head_dim=head_dim)
    keys, values = fill(cache, 40, head_dim=head_dim)
    query = mx.random.normal((head_dim,))
    assert mx.abs(cache.attend(query) - attend(keys, values, query)).max().item() < 0.3


def test_reset_forgets_and_a_key_can_be_taken_back():
    cache = build()
    fill(cache, 40)
    cache.append_key(mx.ones(HEAD_DIM))
    assert cache.drop_last_key()
    assert not cache.drop_last_key()
    assert len(cache) == 40
    cache.reset()
    assert len(cache) == 0 and cache.memory_bytes() == 0
    keys, values = fill(cache, 3, seed=5)
    query = mx.ones(HEAD_DIM)
    assert mx.abs(cache.attend(query) - attend(keys, values, query)).max().item() < 0.8


def test_errors_name_the_argument():
    cache = build()
    with pytest.raises(ValueError, match=r"\(64,\)"):
        cache.append_key(mx.ones(63))
    with pytest.raises(ValueError):
        cache.append_value(mx.ones(HEAD_DIM))
    with pytest.raises(ValueError):
        cache.attend(mx.ones(HEAD_DIM))
    for config, reason in [
        (KVCacheConfig(method="snapkv"), "got 'snapkv'"),
        (KVCacheConfig(bits=7), "bits"),
        (KVCacheConfig(head_dim=0), "head_dim"),
        (KVCacheConfig(group_size=0), "group_size"),
        (KVCacheConfig(window=-1), "window"),
        (KVCacheConfig(sink=-1), "sink"),
    ]:
        with pytest.raises(ValueError, match=reason):
            KVCacheFactory.create(config)


def test_the_builder_is_the_factory_with_names():
    builder = KVCacheBuilder().with_method("int").with_bits(4).with_head_dim(96).with_group_size(32)
    config = builder.with_block_size(16).with_window(8).with_sink(4).config
    assert config == KVCacheConfig("int", 96, 4, 32, 16, 8, 4)
    assert type(builder.build()) is type(KVCacheFactory.create(config))
