"""A table of measurements, each beside what it is compared with."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(width=None if sys.stdout.isatty() else 150)


@dataclass(frozen=True)
class Row:
    """``ours`` and ``theirs`` take a round's results; ``met`` the medians over the rounds, ours first, where there is
    a target."""

    what: str
    ours: Callable[[Any], float]
    theirs: Callable[[Any], float]
    unit: str
    against: str
    target: str = ""
    met: Callable[[float, float], bool] | None = None


def print_rows(title: str, rows: list[Row], rounds: list[Any]) -> bool:
    """Prints the median round of each row, and the median of the rounds' ratios. Returns whether all are met."""
    table = Table(title=f"{title}, {platform.machine()}, median of {len(rounds)} rounds")
    for column in ("what", "kvpool", "against", "", "ratio", "target", "met"):
        table.add_column(column, justify="left" if column in ("what", "against", "target") else "right")
    all_met = True
    for row in rows:
        ours = [row.ours(r) for r in rounds]
        theirs = [row.theirs(r) for r in rounds]
        met = row.met is None or row.met(median(ours), median(theirs))
        all_met &= met
        table.add_row(
            row.what, f"{median(ours):.3g} {row.unit}", row.against, f"{median(theirs):.3g} {row.unit}",
            f"{median(a / b for a, b in zip(ours, theirs)):.3g}", row.target, ("yes" if met else "NO") if row.target else "",
        )  # fmt: skip
    console.print(table)
    return all_met
