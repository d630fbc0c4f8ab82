"""Decode attention beside llama.cpp's flash attention: ``make llama``, which compiles llama-cpp-python first.

    python bench/beside_llama.py [--tokens 8192] [--rounds 7]

What llama.cpp's attention takes is a step of SmolLM2-135M after so many tokens less one after 64; ours is that of
bench/attention.py, in bfloat16. Both on two threads, in turn in one process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import attention
from rich.progress import track
from rows import Row, print_rows

FEW = 64
THREADS = 2
#: How much faster than llama.cpp's float16 cache attention should be.
FACTORS = {"raw": 1.2, "int4": 2.0, "int2": 3.0, "kivi2": 3.0, "vecinfer2": 3.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()

    steps = build(arguments.tokens)
    rounds = [measure(steps) for _ in track(range(arguments.rounds), description="measuring", transient=True)]
    title = f"attention of {attention.LAYERS} layers, {arguments.tokens} tokens, {THREADS} threads"
    return 0 if print_rows(title, rows(), rounds) else 1


def measure(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    times = {name: attention.timed(step) for name, step in steps.items() if name not in FACTORS}
    steps["raw"]()  # Not timed: llama.cpp's threads look for more work for a while.
    return times | {name: attention.timed(steps[name]) for name in FACTORS}


def build(n_tokens: int) -> dict[str, Callable[[], None]]:
    import llama_cpp

    steps: dict[str, Callable[[], None]] = {}
    types = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}
    cases = [(name, n) for name in types for n in (FEW, n_tokens)]
    for name, n in track(cases, description="filling llama.cpp's caches", transient=True):
        steps[f"{name} {'few' if n == FEW else 'many'}"] = llama_step(types[name], n)
    for name in track(FACTORS, description="filling caches", transient=True):
        caches = attention.paged(name)
        attention.fill(caches, n_tokens, "bfloat16")
        steps[name] = attention.attend(caches, "bfloat16")
    for step in steps.values():
        step()
    return steps


def llama_step(cache_type: int, n_tokens: int) -> Callable[[], None]:
    import llama_cpp
    from kvpool.models.default import default_model_path

    llama: Any = llama_cpp.Llama(
        str(default_model_path()), n_ctx=n_tokens + FEW, n_batch=512, n_threads=THREADS, n_threads_batch=THREADS,
        flash_attn=True, type_k=cache_type, type_v=cache_type, verbose=False,
    )  # fmt: skip
    llama.eval([1000 + i % 999 for i in range(n_tokens)])
    return lambda: llama.eval([1])


def rows() -> list[Row]:
    def theirs(name: str) -> Callable[[Any], float]:
        return lambda r: r[f"{name} many"] - r[f"{name} few"]

    out = [
        Row(f"attend, {name}", lambda r, n=name: r[n], theirs("f16"), "ms", "llama.cpp, f16", f"≥ {factor} × as fast",
            lambda ours, other, f=factor: other >= f * ours)
        for name, factor in FACTORS.items()
    ]  # fmt: skip
    for name in ("int4", "vecinfer2"):
        out.append(
            Row(f"attend, {name}", lambda r, n=name: r[n], theirs("q8_0"), "ms", "llama.cpp, q8_0", "",
                lambda ours, other: ours <= other)
        )  # fmt: skip
    return out


if __name__ == "__main__":
    sys.exit(main())
