"""``kvpool compare``: what each cache format costs in quality, memory and speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from .contenders import (
    REFERENCE,
    STOCK,
    WITHOUT_CODEBOOKS,
    Contender,
    PagedOptions,
    formats_of,
    paged_contender,
    stock_contenders,
)
from .options import CodebooksOption, DType, ModelArgument
from .prompt import read_text

if TYPE_CHECKING:
    from mlx.nn import Module

    from ..models import ModelInfo

DECODE_TOKENS, DECODE_ROUNDS = 8, 5
LEAST_LOSS = 0.001
FAMILIES = ("int", "kivi", STOCK, "vecinfer")


def _plot_file(name: Optional[str]) -> Optional[str]:
    if name is not None and Path(name).suffix.lower() != ".svg":
        raise typer.BadParameter(f"{name}: the plot is an SVG; name it so, as plot.svg.")
    if name is not None and not Path(name).resolve().parent.is_dir():
        raise typer.BadParameter(f"{name}: its folder does not exist.")
    return name


def compare(
    context: typer.Context,
    model: ModelArgument = None,
    text: Annotated[str, typer.Option(metavar="FILE", help="UTF-8 text to predict.")] = ...,
    formats: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Formats, with commas between them: F or KEYS:VALUES, then options, each after a dash: g32, g64, "
            "plain (no Hadamard transform), wN (window), sN (sink), as in int8:int4-g64-w32.",
        ),
    ] = ",".join(WITHOUT_CODEBOOKS),
    context_tokens: Annotated[
        int, typer.Option("--context", min=16, max=1 << 20, help="Tokens of a window; its second half counts.")
    ] = 1024,
    windows: Annotated[int, typer.Option(min=1, max=1 << 16, help="Windows, spread over the text.")] = 4,
    step: Annotated[int, typer.Option(min=1, max=1 << 16, help="Tokens fed at a time.")] = 32,
    window: Annotated[int, typer.Option(min=0, max=1 << 24, help="Newest tokens that stay raw.")] = 128,
    sink: Annotated[int, typer.Option(min=0, max=1 << 24, help="First tokens that stay raw.")] = 16,
    block_size: Annotated[int, typer.Option(min=1, max=1 << 16, help="Tokens a block.")] = 32,
    codebooks: CodebooksOption = None,
    stock: Annotated[bool, typer.Option("--stock/--no-stock", help="Measure mlx_lm's own caches, too.")] = True,
    plot: Annotated[
        Optional[str], typer.Option(metavar="FILE.svg", callback=_plot_file, help="Draw loss over bytes a token.")
    ] = None,
    dtype: Annotated[
        Optional[DType], typer.Option(help="Type to run in. Default: float32 on the CPU, on a GPU the model's own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    no_blas: Annotated[bool, typer.Option("--no-blas", help="Leave MLX's BLAS as it is, without OpenBLAS.")] = False,
) -> None:
    """Measure cache formats on a text: perplexity, KL, top-1 agreement, bytes held and decode speed.

    Every format predicts the same text, in lockstep; losses are against kvpool's raw cache.
    """
    content = read_text(text, "'--text'", "text")
    if context.obj:
        print(f"kvpool: {context.obj}", file=sys.stderr)

    from .. import models
    from ..codebooks import codebook_sets
    from ..mlx_lm import install
    from .quality import windows_of

    specs = _specs(formats)
    for spec in specs:
        _checked(None, spec, block_size, PagedOptions(window, sink))
    loaded, tokenizer, shape = models.load(model, dtype.value if dtype else None)
    try:
        pieces = windows_of(tokenizer.encode(content), windows, context_tokens)
    except ValueError as error:
        raise typer.BadParameter(f"{text}: {error}.", param_hint="'--text'") from None
    if shape.context_length and context_tokens > shape.context_length:
        print(f"kvpool: {context_tokens} tokens exceed the model's context of {shape.context_length}", file=sys.stderr)
    sets = codebook_sets(loaded, [name for spec in specs for name in formats_of(spec)], codebooks)
    options = PagedOptions(window, sink, codebooks=sets)
    contenders = [_checked(loaded, spec, block_size, options) for spec in specs]
    if stock:
        contenders += stock_contenders(loaded, shape.head_dim)

    with install():
        rows = _measure(loaded, pieces, contenders, step)
    settings = {"context": context_tokens, "windows": windows, "step": step, "window": window, "sink": sink}
    settings |= {"block_size": block_size, "dtype": _dtype_name(loaded)}
    if as_json:
        print(json.dumps({"model": shape.path, "text": text, **settings, "caches": rows}, ensure_ascii=False))
    else:
        _print_table(rows, shape, settings)
    if plot is not None:
        _plot(rows, shape, settings, plot)


def _specs(formats: str) -> list[str]:
    """The specs of the list without repeats, the reference first."""
    specs = [spec.strip() for spec in formats.split(",")]
    return list(dict.fromkeys([REFERENCE, *filter(None, specs)]))


def _checked(model: Optional[Module], spec: str, block_size: int, options: PagedOptions) -> Contender:
    try:
        return paged_contender(model, spec, block_size, options)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.", param_hint="'--formats'") from None


def _measure(
    model: Module, pieces: list[list[int]], contenders: list[Contender], step: int
) -> list[dict[str, Any]]:
    import mlx.core as mx
    from rich.console import Console
    from rich.progress import Progress

    from .decode import time_decode
    from .quality import Tally, measure_window

    tallies = {contender.name: Tally() for contender in contenders}
    steps = len(pieces) * -(-len(pieces[0]) // step)
    mx.eval(model(mx.array([[1]])), model.parameters())
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("predicting", total=(steps + DECODE_ROUNDS) * len(contenders))

        def advance() -> None:
            progress.advance(task)

        for piece in pieces:
            caches = measure_window(model, piece, contenders, tallies, step, advance)
        progress.update(task, description="decoding")
        seconds = time_decode(model, caches, n_tokens=DECODE_TOKENS, rounds=DECODE_ROUNDS, after_run=advance)
    return [_row(contender, tallies, seconds, len(pieces[0])) for contender in contenders]


def _row(
    contender: Contender, tallies: dict[str, Any], seconds: dict[str, list[float]], n_tokens: int
) -> dict[str, Any]:
    tally, reference, rounds = tallies[contender.name], tallies[REFERENCE], seconds[contender.name]
    return {
        "cache": contender.name,
        "paged": contender.paged,
        "perplexity": tally.perplexity,
        "perplexity_lost": tally.perplexity / reference.perplexity - 1,
        "kl": max(tally.kl / tally.tokens, 0.0),
        "top1_agreement": tally.agree / tally.tokens,
        "tokens_predicted": tally.tokens,
        "bytes_held": tally.bytes_held,
        "bytes_per_token": tally.bytes_held / n_tokens,
        "tokens_per_second": 1 / median(rounds),
        "speed_relative_to_raw": median(raw / own for raw, own in zip(seconds[REFERENCE], rounds)),
    }


def _print_table(rows: list[dict[str, Any]], shape: ModelInfo, settings: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=_title(shape, settings))
    columns = ("cache", "perplexity", "lost", "KL, nats", "top-1", "bytes a token", "of fp16", "tokens/s", "× raw")
    for title in columns:
        table.add_column(title, justify="left" if title == "cache" else "right")
    for row, following in zip(rows, [*rows[1:], None]):
        table.add_row(
            row["cache"],
            f"{row['perplexity']:,.4f}",
            f"{round(row['perplexity_lost'], 4) + 0.0:.2%}",
            f"{row['kl']:.5f}",
            f"{row['top1_agreement']:.1%}",
            f"{row['bytes_per_token']:,.0f}",
            f"{row['bytes_per_token'] / (2 * shape.elements_per_token):.0%}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speed_relative_to_raw']:.2f}",
            end_section=following is not None and following["paged"] != row["paged"],
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)


def _plot(rows: list[dict[str, Any]], shape: ModelInfo, settings: dict[str, Any], path: str) -> None:
    from .svg import Axis, Chart

    chart = Chart(
        _title(shape, settings),
        Axis("bytes held a token", log=True, ticks=[n * 1000 for n in (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100, 200)]),
        Axis(f"perplexity lost, % ({LEAST_LOSS} stands for what is less)", log=True),
    )
    for row in rows:
        family = next((n for n, name in enumerate(FAMILIES, 1) if row["cache"].startswith(name)), 0)
        loss = max(100 * row["perplexity_lost"], LEAST_LOSS)
        chart.point(row["cache"], (row["bytes_per_token"], loss), family)
    chart.save(path)


def _title(shape: ModelInfo, settings: dict[str, Any]) -> str:
    return (
        f"{Path(shape.path).name}, {settings['dtype']}: {settings['windows']} × {settings['context']} tokens, "
        f"window {settings['window']}, sink {settings['sink']}"
    )


def _dtype_name(model: Module) -> str:
    from .answer import activation_dtype

    return str(activation_dtype(model)).removeprefix("mlx.core.")
