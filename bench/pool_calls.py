"""Nanoseconds of pool calls from Python, for kvpool or its peer: prints one JSON object.

    python bench/pool_calls.py kvpool | veloxquant_mlx.memory.block_pool
"""

from __future__ import annotations

import importlib
import json
import sys
from time import perf_counter_ns

REPEATS = 5
CALLS = 20_000


def best(calls: int, run) -> float:
    """Nanoseconds a call, the least of REPEATS."""
    times = []
    for _ in range(REPEATS):
        start = perf_counter_ns()
        for _ in range(calls):
            run()
        times.append((perf_counter_ns() - start) / calls)
    return min(times)


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    pool = module.BlockPoolAllocator(module.PoolConfig(block_size=16, n_blocks=1024))

    def one() -> None:
        pool.free(pool.allocate("k", 16, 1))

    def many() -> None:
        pool.allocate("k", 64 * 16, 1)
        pool.free_all(1)

    print(json.dumps({"one": best(CALLS, one), "many": best(CALLS // 20, many) / 64}))


if __name__ == "__main__":
    main()
