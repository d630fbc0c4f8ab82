"""The pool rows of docs/performance.md: ``make bench``.

Each row is measured beside what it is compared with, in turn, ROUNDS times; the figure is the median
round, and the ratio the median of the rounds' ratios. Needs the ``release`` preset built. The Python
peer is installed into .peer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

from rich.progress import track
from rows import Row, console, print_rows

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "build/release/bench"
PEER = ROOT / ".peer"
PEER_PACKAGES = ["veloxquant-mlx==0.94.15", "mlx[cpu]"]
ROUNDS = 5


def cpp(binary: str) -> dict[str, dict]:
    """The results of a Google Benchmark program, by name."""
    said = subprocess.run(
        [BENCH / binary, "--benchmark_format=json", "--benchmark_min_time=0.2"],
        check=True, capture_output=True, text=True,
    ).stdout
    return {result["name"]: result for result in json.loads(said)["benchmarks"]}


def python(interpreter: Path, module: str) -> dict[str, float]:
    said = subprocess.run([interpreter, ROOT / "bench/pool_calls.py", module],
                          check=True, capture_output=True, text=True, cwd=ROOT / "bench").stdout
    return json.loads(said)


def peer_interpreter() -> Path:
    interpreter = PEER / "bin/python"
    if not (PEER / ".ready").exists():
        console.print(f"==> installing {PEER_PACKAGES[0]} into {PEER.name}")
        venv.create(PEER, with_pip=True, clear=True)
        subprocess.run([interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                        *PEER_PACKAGES], check=True)
        (PEER / ".ready").touch()
    return interpreter


def cpu_ns(result: dict) -> float:
    return result["cpu_time"]


def per_block_ns(result: dict) -> float:
    return result["per_block"] * 1e9


ROWS = [
    Row("allocate + free one block, C++",
        lambda r: cpu_ns(r["pool"]["AllocateFreeOneBesideAThread"]),
        lambda r: r["peer"]["one"], "ns", "Python peer", "≤ 60 ns", lambda ours, _: ours <= 60),
    Row("allocate + free one block, Python",
        lambda r: r["python"]["one"],
        lambda r: r["peer"]["one"], "ns", "Python peer", "≤ 700 ns", lambda ours, _: ours <= 700),
    Row("allocate 64 + free_all, C++, a block",
        lambda r: per_block_ns(r["pool"]["AllocateFreeAllBesideAThread/64"]),
        lambda r: r["peer"]["many"], "ns", "Python peer", "≤ 10 ns", lambda ours, _: ours <= 10),
    Row("8 threads on one pool, blocks in all",
        lambda r: r["pool"]["OnePool/real_time/threads:8"]["blocks"] / 1e6,
        lambda r: r["pool"]["OnePool/real_time/threads:1"]["blocks"] / 1e6,
        "M/s", "1 thread", "≥ 0.5 ×", lambda ours, theirs: ours >= 0.5 * theirs),
    Row("buffer pool, 1750 alloc + reset, a buffer",
        lambda r: r["buffers"]["step_one_by_one/16KB"]["per_buffer"] * 1e9,
        lambda r: r["buffers"]["mlx_malloc_and_free/16KB"]["per_buffer"] * 1e9,
        "ns", "mlx malloc + free, 16 KB", "≤ 30 ns", lambda ours, _: ours <= 30),
]


def main() -> int:
    peer = peer_interpreter()
    rounds = [
        {
            "pool": cpp("pool_bench"),
            "peer": python(peer, "veloxquant_mlx.memory.block_pool"),
            "python": python(Path(sys.executable), "kvpool"),
            "buffers": cpp("buffer_pool_bench"),
        }
        for _ in track(range(ROUNDS), description="measuring", console=console, transient=True)
    ]

    return 0 if print_rows("kvpool", ROWS, rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
