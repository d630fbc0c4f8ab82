"""MLXBlockStorage from Python, in the names of seed 000."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest

from kvpool import BlockPoolAllocator, MlxBufferPool, MLXBlockStorage, PoolConfig


def make_pool(n_blocks=8):
    return BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=n_blocks))


def one(pool, n_tokens=16, owner=1, format="fp16"):
    return pool.allocate("k", n_tokens, owner=owner, format=format)[0]


@pytest.mark.parametrize("head_dim", [40, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("n_kv_heads", [1, 3])
@pytest.mark.parametrize("format", ["fp32", "fp16", "bf16", "int8", "int5", "int4", "int3", "int2", "int1"])
def test_read_gives_back_what_was_written(format, n_kv_heads, head_dim):
    pool = make_pool()
    storage = MLXBlockStorage(pool, head_dim, n_kv_heads)
    block = one(pool, 5, format=format)
    shape = (5, head_dim) if n_kv_heads == 1 else (n_kv_heads, 5, head_dim)
    if format.startswith("int"):
        bits = int(format[3:])
        rows = mx.random.randint(0, 2**bits, shape).astype(mx.uint8)
        width = (head_dim * bits + 7) // 8
    else:
        rows = mx.random.normal(shape).astype({"fp32": mx.float32, "fp16": mx.float16, "bf16": mx.bfloat16}[format])
        width = head_dim
    storage.write(block, 0, rows)
    read, whole = storage.read(block), storage.buffer_for(block)
    assert read.dtype == rows.dtype and mx.array_equal(read, rows)
    assert whole.shape == (*shape[:-2], 16, width)
    assert not whole[..., 5:, :].any()


@pytest.mark.parametrize(("first", "second"), [("fp16", "int8"), ("int8", "fp16"), ("fp16", "int4"), ("fp16", "fp16")])
def test_p5_a_recycled_block_shows_nothing_of_its_last_user(first, second):
    pool = make_pool()
    storage = MLXBlockStorage(pool, head_dim=8)
    a = one(pool, 16, 1, first)
    junk = mx.full((16, 8), 255, mx.int32) if first == "int8" else mx.full((16, 8), mx.nan)
    storage.write(a, 0, junk)
    pool.free([a])
    b = one(pool, 3, 2, second)
    assert b.block_id == a.block_id
    storage.write(b, 0, mx.ones((3, 8), mx.int32 if second.startswith("int") else mx.float16))
    whole = storage.buffer_for(b)
    assert whole.dtype == (mx.uint8 if second.startswith("int") else mx.float16)
    assert mx.array_equal(storage.read(b), mx.ones((3, 8)))
    assert mx.array_equal(whole[3:], mx.zeros_like(whole[3:]))


def test_a_late_read_shows_its_owners_rows():
    pool = make_pool()
    storage = MLXBlockStorage(pool, 4)
    reads = []
    for owner in range(10):
        block = one(pool, 16, owner, "fp32")
        storage.write(block, 0, mx.full((16, 4), float(owner)))
        reads.append(storage.read(block))
        pool.free([block])
    for owner in reversed(range(10)):
        assert mx.array_equal(reads[owner], mx.full((16, 4), float(owner)))


def test_memory_is_counted_to_the_byte_and_really_falls():
    pool = make_pool(64)
    storage = MLXBlockStorage(pool, 128, 8, buffers=MlxBufferPool(max_free_bytes=0))
    mx.synchronize()
    before = mx.get_active_memory()
    blocks = pool.allocate("k", 32 * 16, owner=1)
    assert storage.resident_bytes() == 0
    for block in blocks:
        storage.write(block, 0, mx.zeros((8, 16, 128)))
        mx.eval(storage.read(block))
    needed = 32 * 8 * 16 * 128 * 2
    assert needed <= storage.resident_bytes() <= needed * 9 // 8
    assert mx.get_active_memory() - before >= storage.resident_bytes()
    pool.free_all(1)
    for block in blocks:
        storage.release(block)
    mx.synchronize()
    assert storage.resident_bytes() == 0
    assert mx.get_active_memory() - before < needed // 64


def test_release_wants_a_freed_block_and_spares_its_next_owner():
    pool = make_pool(2)
    storage = MLXBlockStorage(pool, 4)
    a = one(pool)
    storage.write(a, 0, mx.ones((1, 4)))
    with pytest.raises(ValueError, match="still held"):
        storage.release(a)
    pool.free([a])
    b = one(pool, owner=2)
    storage.write(b, 0, mx.ones((16, 4)))
    storage.release(a)
    assert mx.array_equal(storage.read(b), mx.ones((16, 4)))


def test_errors():
    pool = make_pool()
    storage = MLXBlockStorage(pool, 4)
    block = one(pool)
    with pytest.raises(ValueError, match="do not fit"):
        storage.write(block, 15, mx.ones((2, 4)))
    with pytest.raises(ValueError, match=r"values must be \(n, 4\), got \(1, 5\)"):
        storage.write(block, 0, mx.ones((1, 5)))
    with pytest.raises(ValueError, match="is not held"):
        storage.read(one(make_pool()))
    pool.free([block])
    with pytest.raises(ValueError, match="is not held"):
        storage.buffer_for(block)
    with pytest.raises(ValueError, match="head_dim must be >= 1"):
        MLXBlockStorage(pool, 0)


def test_threads_use_one_storage_each_for_itself():
    pool = make_pool(64)
    storage = MLXBlockStorage(pool, 8)
    errors = []

    def work(owner):
        try:
            for i in range(60):
                (block,) = pool.allocate("k", 16, owner=owner, format="fp32")
                storage.write(block, 0, mx.full((16, 8), float(owner * 1000 + i)))
                assert mx.array_equal(storage.read(block), mx.full((16, 8), float(owner * 1000 + i)))
                pool.free([block])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(owner,)) for owner in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
