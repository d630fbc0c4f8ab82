"""A progress bar for the prompt, shown only once it has taken two seconds."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE_S = 2.0


class PrefillProgress:
    """The callback that mlx_lm calls with (tokens done, tokens in all) after each chunk of the prompt."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        columns = (
            TextColumn("prompt"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} tokens"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("prompt")

    def __call__(self, done: int, total: int) -> None:
        if done >= total:
            self.close()
            return
        if time.monotonic() - self._started > PATIENCE_S:
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        self._bar.stop()
