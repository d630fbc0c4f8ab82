"""``kvpool info``: what a token costs in each format, and how many fit."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
from typing import Annotated, Any, Optional

import typer

from ..models import ModelInfo, inspect
from . import blas
from .formats import formats_for, what_is_counted
from .memory import free_bytes, parse_bytes, show_bytes
from .options import GroupSize, ModelArgument


def _memory(text: Optional[str]) -> Optional[int]:
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def info(
    model: ModelArgument = None,
    memory: Annotated[
        Optional[str],
        typer.Option(metavar="SIZE", callback=_memory, help="Memory for the cache, e.g. 8GB. Default: what is free."),
    ] = None,
    group_size: Annotated[GroupSize, typer.Option(help="Elements that share a scale in int formats.")] = GroupSize.g32,
    block_size: Annotated[int, typer.Option(min=1, max=1 << 16, help="Tokens a block.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a token costs in each cache format, and how many fit in memory. Reads no weights."""
    shape = inspect(model)
    budget = memory if memory is not None else free_bytes()
    rows = _rows(shape, int(group_size.value), block_size, budget)
    counted = what_is_counted(int(group_size.value), block_size)
    runtime = _runtime()
    if as_json:
        content = {"runtime": runtime, "model": dataclasses.asdict(shape), "memory_bytes": budget, "formats": rows}
        content["counted"] = counted
        print(json.dumps(content, ensure_ascii=False))
    else:
        _print_tables(runtime, shape, budget, rows)
        if rows:
            print(counted)


def _rows(shape: ModelInfo, group_size: int, block_size: int, budget: int) -> list[dict[str, Any]]:
    if shape.elements_per_token == 0:
        return []
    rows = []
    for entry in formats_for(shape, group_size, block_size):
        bytes_per_token = shape.elements_per_token * entry.bits / 8
        rows.append(
            {
                "format": entry.name,
                "bits_per_element": entry.bits,
                "bytes_per_token": bytes_per_token,
                "tokens_in_memory": int(budget / bytes_per_token),
                "relative_to_fp16": entry.bits / 16,
            }
        )
    return rows


def _runtime() -> dict[str, str]:
    import mlx.core as mx
    from kvpool import BlockPoolAllocator, PagedStorage, PoolConfig

    on_cpu = mx.default_device() == mx.cpu
    openblas = blas.find_openblas() if blas.links_reference_blas() else None
    built_in = "reference" if blas.links_reference_blas() else "as MLX was built"
    return {
        "kvpool": _version("kvpool"),
        "mlx": _version("mlx"),
        "mlx_lm": _version("mlx-lm"),
        "python": sys.version.split()[0],
        "kernels": PagedStorage(BlockPoolAllocator(PoolConfig(n_blocks=2))).level,
        "device": "cpu" if on_cpu else str(mx.device_info().get("device_name", "gpu")),
        "blas": f"OpenBLAS ({openblas})" if openblas else built_in,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _print_tables(runtime: dict[str, str], shape: ModelInfo, budget: int, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        "kvpool {kvpool}, MLX {mlx}, mlx_lm {mlx_lm}, Python {python}; device {device}, kernels {kernels}, BLAS {blas}".format(**runtime),
        markup=False,
        soft_wrap=True,
    )
    console.print(
        f"{shape.path}: {shape.architecture}, {shape.n_parameters:,} parameters in {shape.stored}; "
        f"{shape.n_layers} layers, {shape.n_heads} heads, {shape.n_kv_heads} KV heads of {shape.head_dim}, "
        f"context {shape.context_length or 'unknown'}",
        markup=False,
        soft_wrap=True,
    )
    if not rows:
        console.print(
            "This model states no attention heads, so its tokens have no cost that can be told from its config."
        )
        return
    if shape.n_cache_layers < shape.n_layers:
        console.print(f"{shape.n_cache_layers} of the layers keep every token; the others are not counted.")
    table = Table()
    columns = ("format", "bits", "bytes a token", f"tokens in {show_bytes(budget)}", "of fp16")
    for title in columns:
        table.add_column(title, justify="left" if title == "format" else "right")
    for row in rows:
        table.add_row(
            row["format"],
            f"{row['bits_per_element']:.4g}",
            f"{row['bytes_per_token']:,.0f}",
            f"{row['tokens_in_memory']:,}",
            f"{row['relative_to_fp16']:.0%}",
        )
    console.print(table)
