"""MLX's SDPA as MLX is installed, with the BLAS that its wheel brings along, timed when asked to.

    python bench/installed_sdpa.py TOKENS

Each line of stdin is a dtype; the answer, a line of stdout, is the milliseconds of bench/attention.py's SDPA step.
"""

from __future__ import annotations

import sys

from attention import TYPES, sdpa, timed


def main() -> None:
    steps = {dtype: sdpa(int(sys.argv[1]), dtype) for dtype in TYPES}
    for line in sys.stdin:
        print(timed(steps[line.strip()]), flush=True)


if __name__ == "__main__":
    main()
