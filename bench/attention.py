"""The attention and memory rows of docs/performance.md: ``make bench``.

    python bench/attention.py [--tokens 8192] [--rounds 7]

SmolLM2-135M's shape: 30 layers of caches with memory of their own, 9 query and 3 KV heads of 64, one query a step,
random contents. What is compared takes turns. Times are of MLX's evaluation from outside. MLX's own SDPA is timed with
the BLAS that its wheel brings along, in a process of its own, and with OpenBLAS, which kvpool's programs load.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from kvpool.cli.blas import use_openblas

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
BLOCK, CHUNK = 32, 512
#: Memory is measured in the pool's default blocks, too, which some formats have under mlx_lm.
BLOCKS_HELD = (16, BLOCK)
MIB = 2**20
SCALE = HEAD_DIM**-0.5
TYPES = ("float32", "bfloat16")
#: What MLX's SDPA has for BLAS.
INSTALLED, OPENBLAS = "MLX as installed", "OpenBLAS"
WINDOW, SINK = 128, 16
#: Bits of an element's code.
VECTOR = {"vecinfer4": 4, "vecinfer3": 3, "vecinfer2": 2, "vecinfer1.5": 1.5, "vecinfer1": 1}
PACKED = {"int8": 8, "int4": 4, "int2": 2, "kivi4": 4, "kivi2": 2} | VECTOR
BITS = {"raw float32": 32, "raw bfloat16": 16} | PACKED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print(use_openblas(), file=sys.stderr)

    from rows import print_rows
    from rich.progress import track

    steps, held = build(arguments.tokens)
    installed = InstalledSdpa(arguments.tokens)
    for step in steps.values():
        step()
    rounds = []
    for _ in track(range(arguments.rounds), description="measuring", transient=True):
        times = {f"sdpa {dtype}, {INSTALLED}": installed.milliseconds(dtype) for dtype in TYPES}
        for step in list(steps.values())[:2]:  # Threads find their places again after another process's turn.
            step()
        rounds.append(times | {name: timed(step) for name, step in steps.items()} | held)
    title = f"{LAYERS} layers of {HEADS} heads, {KV_HEADS} KV heads of {HEAD_DIM}, {arguments.tokens} tokens"
    return 0 if print_rows(title, rows(arguments.tokens), rounds) else 1


def build(n_tokens: int) -> tuple[dict[str, Callable[[], None]], dict[str, float]]:
    """What is timed, by name, and the MiB that each format holds, "NAME held BLOCK"."""
    import mlx.core as mx
    from rich.progress import track

    steps: dict[str, Callable[[], None]] = {}
    held: dict[str, float] = {}
    cases = [(dtype, "raw") for dtype in TYPES] + [("bfloat16", name) for name in PACKED]
    for dtype, name in track(cases, description="filling caches", transient=True):
        key = f"{name} {dtype}" if name == "raw" else name
        held |= {f"{key} held {block}": held_mib(name, n_tokens, dtype, block) for block in BLOCKS_HELD}
        caches = paged(name)
        fill(caches, n_tokens, dtype)
        steps[f"{key} attend"] = attend(caches, dtype)
        steps[f"{key} append"] = append(caches, dtype)
    for dtype in TYPES:
        steps[f"sdpa {dtype}, {OPENBLAS}"] = sdpa(n_tokens, dtype)
    steps["decode step"] = decode_step()
    return steps, held


def held_mib(name: str, n_tokens: int, dtype: str, block: int) -> float:
    """By how much MLX's active memory grew, and the codebooks, which kernels on the CPU have outside of it."""
    import mlx.core as mx

    books = shipped(name)
    gc.collect()
    before = mx.get_active_memory()
    caches = paged(name, books, block)
    fill(caches, n_tokens, dtype)
    append(caches, dtype)()
    gc.collect()
    return (mx.get_active_memory() - before + (books.nbytes if books else 0)) / MIB


@cache
def shipped(name: str) -> Any:
    """The default model's codebooks, if the format needs some."""
    from kvpool import models
    from kvpool.codebooks import find_codebooks

    return find_codebooks(models.load(None, "float32")[0], name) if name in VECTOR else None


def paged(name: str, codebooks: Any = None, block: int = BLOCK) -> list[Any]:
    from kvpool import BlockPoolAllocator, PagedKVCache, PagedKVCacheConfig, PagedStorage, PoolConfig, VecInferCodebooks

    pool = BlockPoolAllocator(PoolConfig(block_size=block, n_blocks=64, grow_on_exhaustion=True))
    storage = PagedStorage(pool)
    if name in VECTOR and codebooks is None:  # Random ones, of one code in all layers: as quick as trained ones.
        codebooks = VecInferCodebooks.random(name, LAYERS, KV_HEADS, HEAD_DIM, 0)
    return [
        PagedKVCache(
            storage, PagedKVCacheConfig(name, name, window=WINDOW, sink=SINK, codebooks=codebooks, layer=layer)
        )
        for layer in range(LAYERS)
    ]


def rows_of(n_tokens: int, dtype: str) -> tuple[Any, Any]:
    import mlx.core as mx

    size = (1, KV_HEADS, n_tokens, HEAD_DIM)
    pair = tuple(mx.random.normal(size, getattr(mx, dtype)) for _ in range(2))
    mx.eval(pair)
    return pair


def fill(caches: list[Any], n_tokens: int, dtype: str) -> None:
    import mlx.core as mx

    for start in range(0, n_tokens, CHUNK):
        keys, values = rows_of(min(CHUNK, n_tokens - start), dtype)
        for cache in caches:
            cache.update_and_fetch(keys, values)
        mx.eval([cache.state for cache in caches])


def attend(caches: list[Any], dtype: str) -> Callable[[], None]:
    import mlx.core as mx

    queries = mx.random.normal((1, HEADS, 1, HEAD_DIM), getattr(mx, dtype))
    return lambda: mx.eval([cache.attend(queries, SCALE) for cache in caches])


def append(caches: list[Any], dtype: str) -> Callable[[], None]:
    """A block of tokens, one at a time, so that one block of each layer is sealed. The caches grow."""
    import mlx.core as mx

    keys, values = rows_of(1, dtype)

    def step() -> None:
        for _ in range(BLOCK):
            for cache in caches:
                cache.update_and_fetch(keys, values)
            mx.eval(caches[0].state)

    return step


def sdpa(n_tokens: int, dtype: str) -> Callable[[], None]:
    import mlx.core as mx

    queries = mx.random.normal((1, HEADS, 1, HEAD_DIM), getattr(mx, dtype))
    layers = [rows_of(n_tokens, dtype) for _ in range(LAYERS)]
    return lambda: mx.eval(
        [mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE) for keys, values in layers]
    )


class InstalledSdpa:
    """bench/installed_sdpa.py at work."""

    def __init__(self, n_tokens: int) -> None:
        program = Path(__file__).with_name("installed_sdpa.py")
        self._process = subprocess.Popen(
            [sys.executable, program, str(n_tokens)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for dtype in TYPES:  # The first time is longer.
            self.milliseconds(dtype)

    def milliseconds(self, dtype: str) -> float:
        assert self._process.stdin and self._process.stdout
        print(dtype, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def decode_step() -> Callable[[], None]:
    """A step of the default model itself, over an empty cache."""
    import mlx.core as mx
    from kvpool import models
    from mlx_lm.models.cache import make_prompt_cache

    model, _, _ = models.load(None, "float32")
    caches = make_prompt_cache(model)

    def step() -> None:
        mx.eval(model(mx.array([[1]]), cache=caches))
        for cache in caches:
            cache.trim(1)

    return step


def bits_an_element(name: str, block: int) -> float:
    """Of a sealed block: the code and, but for vecinfer, a scale and a bias of 16 bits over 32 elements, of kivi's keys
    over the tokens of a block."""
    if name in VECTOR:
        return shipped(name).average_bits
    if name.startswith("raw"):
        return BITS[name]
    keys = 32 / (min(block, 32) if name.startswith("kivi") else 32)
    return BITS[name] + (keys + 1) / 2


def packed_mib(name: str, n_tokens: int, block: int) -> float:
    """Of codes, window, sink and codebooks."""
    books = shipped(name)
    n_raw = WINDOW + SINK
    n_bits = n_raw * (32 if name == "raw float32" else 16) + (n_tokens - n_raw) * bits_an_element(name, block)
    return (2 * LAYERS * KV_HEADS * HEAD_DIM * n_bits / 8 + (books.nbytes if books else 0)) / MIB


def rows(n_tokens: int) -> list[Any]:
    from kvpool._block_size import default_block_size
    from rows import Row

    def times_faster(factor: float) -> tuple[str, Callable[[float, float], bool]]:
        return f"≥ {factor} × as fast", lambda ours, theirs: theirs >= factor * ours

    out = [
        Row(f"attend, raw, {dtype}", lambda r, d=dtype: r[f"raw {d} attend"],
            lambda r, d=dtype, b=blas: r[f"sdpa {d}, {b}"], "ms", f"mx.fast SDPA, {blas}", *target)
        for dtype, factor in zip(TYPES, (8, 20))
        for blas, target in ((INSTALLED, times_faster(factor)), (OPENBLAS, ()))
    ]  # fmt: skip
    for name in PACKED:  # Their target is of the kernels alone: attention_bench.
        out.append(
            Row(f"attend, {name}", lambda r, n=name: r[f"{n} attend"], lambda r: r["raw bfloat16 attend"],
                "ms", "raw, bfloat16")
        )  # fmt: skip
    for name in BITS:
        out.append(
            Row(f"append + seal, {name}, a token", lambda r, n=name: r[f"{n} append"] / BLOCK,
                lambda r: r["decode step"], "ms", "decode step of the model, float32", "≤ 0.05 ×",
                lambda ours, theirs: ours <= 0.05 * theirs)
        )  # fmt: skip
    for name, block in product(BITS, BLOCKS_HELD):
        packed = packed_mib(name, n_tokens + BLOCK, block)
        # Larger blocks than a format has by default are a choice, and have no target.
        target = ("≤ 1.05 ×", lambda ours, theirs: ours <= 1.05 * theirs) if block <= default_block_size([name]) else ()
        out.append(
            Row(f"memory held, {name}, blocks of {block}", lambda r, n=name, b=block: r[f"{n} held {b}"],
                lambda _, p=packed: p, "MiB", f"codes, {WINDOW + SINK} tokens raw, codebooks", *target)
        )  # fmt: skip
    return out


if __name__ == "__main__":
    sys.exit(main())
