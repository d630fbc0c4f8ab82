"""Amounts of memory, as people write them."""

from __future__ import annotations

import os
import re
from pathlib import Path

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str) -> int:
    """``"8GB"``, ``"512 MiB"``, ``"1.5g"`` or ``"1000000"`` → bytes.

    Raises:
        ValueError: it is none of these, or not above zero.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s*([kmgt]?i?)b?", text.strip(), re.IGNORECASE)
    unit = match and _UNITS.get(match[2].upper())
    n_bytes = int(float(match[1]) * unit) if unit else 0
    if n_bytes <= 0:
        raise ValueError(f"{text!r} is no amount of memory; write it as 8GB, 512MiB or in bytes.")
    return n_bytes


def free_bytes() -> int:
    """Memory that a new process could take now: MemAvailable on Linux, else all of the machine's."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def show_bytes(n_bytes: float) -> str:
    """At most one decimal and a binary unit: ``"45.0 MiB"``."""
    amount, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{amount:.0f} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"
