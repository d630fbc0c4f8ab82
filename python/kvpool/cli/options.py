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


class CacheKind(str, Enum):
    paged = "paged"
    pooled = "pooled"
    stock = "stock"


class CacheFormat(str, Enum):
    raw = "raw"
    int8 = "int8"
    int4 = "int4"
    int2 = "int2"
    kivi4 = "kivi4"
    kivi2 = "kivi2"
    vecinfer4 = "vecinfer4"
    vecinfer3 = "vecinfer3"
    vecinfer2 = "vecinfer2"
    vecinfer1_5 = "vecinfer1.5"
    vecinfer1 = "vecinfer1"


class GroupSize(str, Enum):
    g32 = "32"
    g64 = "64"


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

CodebooksOption = Annotated[
    Optional[list[str]],
    typer.Option(
        metavar="FILE",
        help="Codebooks of a vecinfer format, made by kvpool calibrate; may be repeated. Default: those that come with "
        "kvpool for the model.",
    ),
]
