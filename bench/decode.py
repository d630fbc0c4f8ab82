"""Decode speed of kvpool's paged caches beside mlx_lm's own, on the default model.

    python bench/decode.py [--contexts 512,1024,2048,4096,8192] [--rounds 11] [--plot decode.svg] [--json decode.json]

Caches are filled with random keys and values. All then decode in turn, in one process, through
mlx_lm's own loop; a figure is the median round, a ratio the median of the rounds' ratios, the least
beside it. Ratios above 1 are in kvpool's favour.
"""

from __future__ import annotations

import argparse
import json
import sys
from statistics import median

from kvpool.cli.blas import use_openblas

CONTEXTS = "512,1024,2048,4096,8192"
FORMATS = "raw,int4,kivi2"
BLOCK_SIZES = "16,32"
CHUNK = 512


def main() -> int:
    arguments = parse()
    print(use_openblas(), file=sys.stderr)

    from kvpool import models
    from kvpool.mlx_lm import install
    from rich.console import Console
    from rich.progress import Progress

    console = Console()
    install()
    model, _, shape = models.load(arguments.model, arguments.dtype)
    runs = 1 + len(arguments.formats) * len(arguments.block_sizes)
    results = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("decoding", total=len(arguments.contexts) * arguments.rounds * runs)
        for context in arguments.contexts:
            results[context] = measure(model, shape, context, arguments, lambda: progress.advance(task))
    title = f"decode on {shape.path.rpartition('/')[2]}, {arguments.dtype}, {arguments.rounds} rounds in turn"
    console.print(table(title, results))
    if arguments.plot:
        plot(title, results, arguments.plot)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    return 0


def parse() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a GGUF file or an mlx_lm folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--contexts", type=numbers, default=CONTEXTS)
    parser.add_argument("--formats", type=lambda text: text.split(","), default=FORMATS)
    parser.add_argument("--block-sizes", type=numbers, default=BLOCK_SIZES)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=4, help="of each round")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--plot", help="an SVG file to write")
    parser.add_argument("--json", help="a file for every round's seconds a token")
    return parser.parse_args()


def measure(model, shape, context: int, arguments, after_run) -> dict[str, list[float]]:
    """Seconds a token in each round, by cache."""
    from kvpool import BlockPoolAllocator, PoolConfig
    from kvpool.cli.decode import time_decode
    from kvpool.mlx_lm import make_prompt_cache
    from mlx_lm.models.cache import KVCache

    caches = {"mlx_lm": [KVCache() for _ in model.layers]}
    for block_size in arguments.block_sizes:
        for name in arguments.formats:
            pool = BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=64, grow_on_exhaustion=True))
            caches[f"{name}, {block_size}"] = make_prompt_cache(model, pool, name)
    for layers in caches.values():
        fill(layers, context, shape, arguments.dtype)
    time_decode(model, caches, n_tokens=2, rounds=1)
    return time_decode(model, caches, n_tokens=arguments.tokens, rounds=arguments.rounds, after_run=after_run)


def fill(layers: list, n_tokens: int, shape, dtype: str) -> None:
    import mlx.core as mx

    mx.random.seed(0)
    for start in range(0, n_tokens, CHUNK):
        size = (1, shape.n_kv_heads, min(CHUNK, n_tokens - start), shape.head_dim)
        keys, values = (mx.random.normal(size, getattr(mx, dtype)) for _ in range(2))
        for cache in layers:
            cache.update_and_fetch(keys, values)
        mx.eval([cache.state for cache in layers])


def ratios(rounds: dict[str, list[float]], name: str) -> list[float]:
    return [stock / ours for stock, ours in zip(rounds["mlx_lm"], rounds[name])]


def table(title: str, results: dict[int, dict[str, list[float]]]):
    from rich.table import Table

    out = Table(title=title)
    for column in ("tokens", "cache, block", "ms a token, least", "median", "× stock, median", "of the least"):
        out.add_column(column, justify="left" if column == "cache, block" else "right")
    for context, rounds in results.items():
        for name, seconds in rounds.items():
            out.add_row(
                str(context), name, f"{min(seconds) * 1e3:.1f}", f"{median(seconds) * 1e3:.1f}",
                f"{median(ratios(rounds, name)):.2f}", f"{min(rounds['mlx_lm']) / min(seconds):.2f}",
                end_section=name == list(rounds)[-1],
            )  # fmt: skip
    return out


def plot(title: str, results: dict[int, dict[str, list[float]]], path: str) -> None:
    from kvpool.cli.svg import Axis, Chart

    chart = Chart(title, Axis("tokens in the cache", log=True, ticks=list(results)), Axis("speed, × mlx_lm's cache"))
    chart.rule("mlx_lm", 1.0)
    for name in next(iter(results.values())):
        if name != "mlx_lm":
            chart.line(name, [(context, median(ratios(rounds, name))) for context, rounds in results.items()])
    chart.save(path)


if __name__ == "__main__":
    sys.exit(main())
