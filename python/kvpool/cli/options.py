"""Option types that several commands share."""

from __future__ import annotations

import math
from enum import Enum
from typing import Annotated, Optional

import typer


class DType(str, Enum):
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


def finite(value: float) -> float:
    """Refuses NaN and infinity, which pass a range check."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


ModelArgument = Annotated[
    Optional[str],
    typer.Argument(
        metavar="MODEL", help="A GGUF file or an mlx_lm folder. Default: SmolLM2-135M-Instruct, fetched once."
    ),
]
