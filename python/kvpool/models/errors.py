"""The one error that a model file can raise."""

from __future__ import annotations

MAX_CHARACTERS = 500


class ModelError(ValueError):
    """A model file or folder cannot be used.

    The text is one line: the file, the tensor or key at fault, what was found and what is allowed.
    """

    def __init__(self, path: object, problem: str) -> None:
        line = " ".join(f"{path}: {problem}".split())
        super().__init__(line if len(line) <= MAX_CHARACTERS else line[: MAX_CHARACTERS - 3] + "...")
