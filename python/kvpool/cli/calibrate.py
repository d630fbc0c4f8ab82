"""``kvpool calibrate``: VecInfer's codebooks for a model, from a text."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .memory import show_bytes
from .options import ModelArgument
from .prompt import read_text

if TYPE_CHECKING:
    from mlx.nn import Module

    from .._core import VecInferCalibration
    from ..codebooks import Fingerprint

N_RANGES = 3


class Bits(str, Enum):
    b1 = "1"
    b1_5 = "1.5"
    b2 = "2"
    b3 = "3"
    b4 = "4"


def _new_file(name: str) -> str:
    if not Path(name).resolve().parent.is_dir():
        raise typer.BadParameter(f"{name}: its folder does not exist.")
    if Path(name).is_dir():
        raise typer.BadParameter(f"{name}: this is a folder.")
    return name


def calibrate(
    context: typer.Context,
    model: ModelArgument = None,
    text: Annotated[str, typer.Option(metavar="FILE", help="UTF-8 text to learn from.")] = ...,
    bits: Annotated[list[Bits], typer.Option(help="Bits an element; may be repeated.")] = [Bits.b2],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            callback=_new_file,
            help="File to write (safetensors); {bits} in its name stands for the bits.",
        ),
    ] = ...,
    tokens: Annotated[
        int, typer.Option(min=64, max=1 << 24, help="Tokens of the text that are read, spread over it.")
    ] = 32768,
    window: Annotated[
        int, typer.Option(min=64, max=1 << 20, help="Tokens that are read together, from an empty cache.")
    ] = 1024,
    context_tokens: Annotated[
        int,
        typer.Option(
            "--context",
            min=0,
            max=1 << 24,
            help="Tokens of the longest text that is to be coded well: the pieces are read as if they began at "
            "positions spread over it. 0: the model's context.",
        ),
    ] = 0,
    raw_window: Annotated[int, typer.Option(min=0, max=1 << 20, help="Newest tokens that caches keep raw.")] = 128,
    sink: Annotated[int, typer.Option(min=0, max=1 << 20, help="First tokens that caches keep raw.")] = 16,
    codebooks: Annotated[
        int,
        typer.Option(
            min=0,
            max=1 << 20,
            help="Codebooks of the keys, and of the values, all of one code. 0: one a head, of codes chosen by layer.",
        ),
    ] = 0,
    restarts: Annotated[int, typer.Option(min=1, max=1000, help="Starts of k-means that are tried.")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 64) - 1, help="Of every choice.")] = 0,
    no_blas: Annotated[bool, typer.Option("--no-blas", help="Leave MLX's BLAS as it is, without OpenBLAS.")] = False,
) -> None:
    """Make the codebooks of a model for vecinfer formats. The same text, options and seed make the same file."""
    if len(set(bits)) > 1 and "{bits}" not in output:
        raise typer.BadParameter("with several --bits the name needs {bits}.", param_hint="'--output'")
    content = read_text(text, "'--text'", "text")
    if sink >= window:
        raise typer.BadParameter(f"a window of {window} tokens must be longer than {sink}.", param_hint="'--sink'")
    if context.obj:
        print(f"kvpool: {context.obj}", file=sys.stderr)

    from .. import models
    from ..codebooks import fingerprint_of
    from ..codebooks.calibration import pieces_without_gaps

    loaded, tokenizer, shape = models.load(model)
    pieces = _pieces(text, tokenizer.encode(content), tokens, window)
    context_tokens = context_tokens or shape.context_length or window
    print(
        f"kvpool: {shape.path}: reading {len(pieces)} × {window} tokens of {text} at positions up to {context_tokens}",
        file=sys.stderr,
    )
    n_pieces = pieces_without_gaps(window, context_tokens)
    if len(pieces) < n_pieces:
        print(f"kvpool: there are gaps between them that --tokens {n_pieces * window} would fill", file=sys.stderr)
    fingerprint = fingerprint_of(loaded)
    options = {"context": context_tokens, "max_tokens": tokens, "sink": sink, "window": raw_window, "seed": seed}
    training = {"n_codebooks": codebooks, "n_restarts": restarts}
    files = {f"vecinfer{b.value}": output.replace("{bits}", b.value) for b in dict.fromkeys(bits)}
    made = _calibrate(loaded, pieces, fingerprint, files, options, training)
    for format, calibration in made.items():
        _print_table(files[format], calibration)


def _pieces(text: str, ids: list[int], tokens: int, window: int) -> list[list[int]]:
    from .quality import windows_of

    n_windows = max(1, min(tokens, len(ids)) // window)
    try:
        return windows_of(ids, n_windows, window)
    except ValueError as error:
        raise typer.BadParameter(f"{text}: {error}.", param_hint="'--text'") from None


def _calibrate(
    model: Module,
    pieces: list[list[int]],
    fingerprint: Fingerprint,
    files: dict[str, str],
    options: dict[str, int],
    training: dict[str, int],
) -> dict[str, VecInferCalibration]:
    """Makes the file of each format. Returns what was made, by format."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from ..codebooks import save_codebooks
    from ..codebooks.calibration import observe

    made = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        reading = progress.add_task("reading windows", total=len(pieces))
        calibrator = observe(model, pieces, lambda: progress.advance(reading), **options)
        for format, file in files.items():
            task = progress.add_task(f"training {format}", total=None)

            def show(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            made[format] = calibrator.train(format, **training, progress=show)
            save_codebooks(file, format, made[format], fingerprint)
    return made


def _print_table(output: str, made: VecInferCalibration) -> None:
    """The file, and what coding costs, over a few ranges of layers."""
    from rich.console import Console
    from rich.table import Table

    n_layers = len(made.key_errors)
    edges = sorted({n_layers * i // N_RANGES for i in range(N_RANGES + 1)})
    table = Table()
    for title in ("layers", "K error", "V error"):
        table.add_column(title, justify="right")
    for first, end in zip(edges, edges[1:]):
        cells = (f"{sum(errors[first:end]) / (end - first):.4f}" for errors in (made.key_errors, made.value_errors))
        table.add_row(f"{first} to {end - 1}" if end - first > 1 else str(first), *cells)
    console = Console(highlight=False)
    size = show_bytes(Path(output).stat().st_size)
    console.print(f"{output}: {size}; error of what is coded, over its energy:", markup=False, soft_wrap=True)
    console.print(table)
