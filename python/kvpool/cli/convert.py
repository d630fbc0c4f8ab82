"""``kvpool convert``: a GGUF file becomes an mlx_lm folder."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .options import DType


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC.gguf", help="A GGUF file of the Llama family.")],
    target: Annotated[str, typer.Argument(metavar="OUT_DIR", help="The folder to write.")],
    dtype: Annotated[DType, typer.Option(help="Type of the weights written.")] = DType.float16,
    force: Annotated[bool, typer.Option("--force", help="Replace a model folder that exists.")] = False,
) -> None:
    """Write a GGUF file as a folder that mlx_lm and its tools load."""
    from ..models import convert as convert_model

    info = convert_model(source, target, dtype.value, force=force)
    print(f"kvpool: {target}: {info.n_parameters:,} parameters in {dtype.value}", file=sys.stderr)
