"""Draws what run.sh printed: decode of Llama-3.1-8B's shape over MLX's own cache, attention alone over PyTorch's.

    bench/gpu/run.sh | tee gpu.txt; python bench/gpu/plot.py gpu.txt docs/img

Writes gpu_decode.svg and gpu_attention.svg: one request, speed over context length.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from kvpool.cli.svg import Axis, Chart

SHAPE = re.compile(r"batch (\d+), (\d+) tokens")
DECODED = re.compile(r"([a-z][\w.]*) +[\d.]+ +[\d.]+ +([\d.]+) ")  # cache, prefill s, ms a token, their mean
ATTENDED = re.compile(r"(\S+) +B +(\d+) x +(\d+) +(?:raw +\d+ +)?([\d.]+) us")
FORMATS = ("bf16", "int8", "int4", "kivi2", "vecinfer4", "vecinfer2", "vecinfer1")

Times = dict[str, dict[int, float]]


def read(lines: list[str]) -> tuple[Times, Times]:
    """Of one request: ms a token by cache and context, the median run, and µs an attention by format and context."""
    decoded: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    attended: Times = defaultdict(dict)
    shape = (0, 0)
    for line in lines:
        if found := SHAPE.match(line):
            shape = (int(found[1]), int(found[2]))
        elif line.startswith("== "):
            shape = (0, 0)
        elif found := ATTENDED.match(line):
            if found[2] == "1":
                attended[found[1]].setdefault(int(found[3]), float(found[4]))
        elif (found := DECODED.match(line)) and shape[0] == 1:
            decoded[found[1]][shape[1]].append(float(found[2]))
    return {name: {n: median(ms) for n, ms in by.items()} for name, by in decoded.items()}, attended


def draw(title: str, times: Times, base: str, names: list[str], path: Path) -> None:
    contexts = sorted(times[base])
    chart = Chart(title, Axis("tokens in the cache", log=True, ticks=contexts), Axis(f"speed, × {base}"))
    chart.rule(base, 1.0)
    for name in names:
        chart.line(name, [(n, times[base][n] / times[name][n]) for n in contexts if n in times[name]])
    chart.save(str(path))


def main() -> int:
    results, folder = Path(sys.argv[1]), Path(sys.argv[2])
    decoded, attended = read(results.read_text(encoding="utf-8").splitlines())
    caches = [name for name in decoded if name != "stock"]
    draw("decode, Llama-3.1-8B's shape, bf16, H200, one request", decoded, "stock", caches, folder / "gpu_decode.svg")
    formats = [name for name in FORMATS if name in attended]
    draw("decode attention, 32 / 8 heads of 128, H200", attended, "torch-bf16", formats, folder / "gpu_attention.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
