"""``kvpool generate``: a model answers, its keys and values in a pool."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from ..atomic import new_file
from .options import CacheFormat, CacheKind, CodebooksOption, DType, GroupSize, ModelArgument, finite
from .prompt import encode_prompt, read_prompt

if TYPE_CHECKING:
    from kvpool import BlockPoolAllocator

    from .report import Report


def _metrics_file(name: Optional[str]) -> Optional[str]:
    if name is not None and not Path(name).resolve().parent.is_dir():
        raise typer.BadParameter(f"{name}: its folder does not exist.")
    if name is not None and Path(name).is_dir():
        raise typer.BadParameter(f"{name} is a folder.")
    return name


def generate(
    context: typer.Context,
    model: ModelArgument = None,
    prompt: Annotated[Optional[str], typer.Option("--prompt", "-p", help="The prompt; - reads standard input.")] = None,
    prompt_file: Annotated[
        Optional[str], typer.Option(metavar="FILE", help="A UTF-8 file with the prompt; - reads standard input.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the prompt as it is, without the chat template.")
    ] = False,
    system: Annotated[Optional[str], typer.Option(help="The system message of the chat template.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=1 << 24, help="The most answer tokens.")] = 256,
    temp: Annotated[
        float, typer.Option(min=0.0, callback=finite, help="Sampling temperature; 0 takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, callback=finite, help="Sample from the likeliest tokens of this probability; 0 for all."
        ),
    ] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many likeliest tokens; 0 for all.")] = 0,
    min_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, callback=finite, help="Least probability, relative to the likeliest token."),
    ] = 0.0,
    seed: Annotated[Optional[int], typer.Option(min=0, max=(1 << 64) - 1, help="Seed for sampling.")] = None,
    cache: Annotated[
        CacheKind,
        typer.Option(
            help="The KV cache: in blocks attended where they lie, contiguous and counted in a pool, or mlx_lm's own."
        ),
    ] = CacheKind.paged,
    format: Annotated[
        CacheFormat, typer.Option(help="How a paged cache stores tokens; raw is the type that the model runs in.")
    ] = CacheFormat.raw,
    key_format: Annotated[
        Optional[CacheFormat], typer.Option(help="Of keys. Default: --format.", show_default=False)
    ] = None,
    value_format: Annotated[
        Optional[CacheFormat], typer.Option(help="Of values. Default: --format.", show_default=False)
    ] = None,
    window: Annotated[int, typer.Option(min=0, max=1 << 24, help="Newest tokens that stay raw.")] = 128,
    sink: Annotated[int, typer.Option(min=0, max=1 << 24, help="First tokens that stay raw.")] = 16,
    group_size: Annotated[GroupSize, typer.Option(help="Elements that share a scale in int formats.")] = GroupSize.g32,
    hadamard: Annotated[
        bool, typer.Option("--hadamard/--no-hadamard", help="Store int formats and kivi's values after a Hadamard transform.")
    ] = True,
    codebooks: CodebooksOption = None,
    block_size: Annotated[
        Optional[int],
        typer.Option(
            min=1,
            max=1 << 20,
            help="Tokens a block. Default: 32; pooled, and vecinfer at 2 bits and less on the CPU, 16.",
            show_default=False,
        ),
    ] = None,
    n_blocks: Annotated[
        Optional[int],
        typer.Option(min=2, max=1 << 24, help="Blocks in the pool, K and V together. Default: as the prompt needs."),
    ] = None,
    grow: Annotated[
        Optional[bool],
        typer.Option(
            "--grow/--no-grow", help="Let the pool grow. Default: unless --n-blocks is given.", show_default=False
        ),
    ] = None,
    max_blocks: Annotated[Optional[int], typer.Option(min=2, max=1 << 24, help="Cap of a pool that grows.")] = None,
    step: Annotated[
        Optional[int],
        typer.Option(min=1, max=1 << 20, help="Tokens by which a pooled cache grows. Default: its block, or 256."),
    ] = None,
    dtype: Annotated[
        Optional[DType], typer.Option(help="Type to run in. Default: float32 on the CPU, on a GPU the model's own.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with the answer and all figures.")
    ] = False,
    metrics_file: Annotated[
        Optional[str],
        typer.Option(metavar="FILE", callback=_metrics_file, help="Write the pool's metrics as Prometheus text."),
    ] = None,
    no_blas: Annotated[bool, typer.Option("--no-blas", help="Leave MLX's BLAS as it is, without OpenBLAS.")] = False,
) -> None:
    """Answer a prompt, streamed to standard output; a table of what it took follows."""
    text = read_prompt(prompt, prompt_file)
    if metrics_file is not None and cache is CacheKind.stock:
        raise typer.BadParameter("the stock cache has no pool to measure.", param_hint="'--metrics-file'")
    if step is not None and cache is not CacheKind.pooled:
        raise typer.BadParameter("only --cache pooled grows in steps.", param_hint="'--step'")
    named = {"--format": format, "--key-format": key_format, "--value-format": value_format}
    for option, value in named.items():
        if cache is not CacheKind.paged and value not in (None, CacheFormat.raw):
            raise typer.BadParameter(f"{value.value} needs --cache paged.", param_hint=f"'{option}'")

    if context.obj:
        _note(context.obj)

    from .. import models
    from ..codebooks import codebook_sets
    from .answer import PREFILL_CHUNK, Answer, report_on
    from .caches import PagedFormat, paged_caches, pooled_caches, stock_caches
    from .pool_plan import PoolOptions

    loaded, tokenizer, shape = models.load(model, dtype.value if dtype else None)
    tokens = encode_prompt(tokenizer, text, raw=raw, system=system)
    if not tokens:
        raise typer.BadParameter("the prompt has no tokens.", param_hint="'--prompt'")
    if shape.context_length and len(tokens) + max_tokens > shape.context_length:
        _note(f"{len(tokens)} + {max_tokens} tokens may exceed the model's context of {shape.context_length}")
    options = PoolOptions(block_size, step, n_blocks, grow, max_blocks)
    if cache is CacheKind.stock:
        caches = stock_caches(loaded)
    elif cache is CacheKind.pooled:
        caches = pooled_caches(loaded, options, len(tokens), max_tokens)
    else:
        keys, values = (key_format or format).value, (value_format or format).value
        sets = codebook_sets(loaded, [keys, values], codebooks)
        paged = PagedFormat(keys, values, window, sink, int(group_size.value), hadamard)
        caches = paged_caches(loaded, options, paged, sets, len(tokens), max_tokens, PREFILL_CHUNK)
    if seed is not None:
        _seed(seed)

    answer = Answer(tokens)
    sampling = {"temp": temp, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    write = _discard if as_json else _write
    answer.run(loaded, tokenizer, caches, max_tokens=max_tokens, sampling=sampling, write=write)
    _show(report_on(answer, loaded, shape, caches), answer.text, as_json=as_json)
    if metrics_file is not None and caches.pool is not None:
        _write_metrics(metrics_file, shape.path, caches.pool)
    if answer.finish_reason == "interrupted":
        raise typer.Exit(130)


def _seed(seed: int) -> None:
    import mlx.core as mx

    mx.random.seed(seed)


def _show(report: Report, text: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.to_json(text), ensure_ascii=False))
        return
    from rich.console import Console

    print(flush=True)
    report.print(Console(stderr=not sys.stdout.isatty(), highlight=False))


def _write_metrics(name: str, model: str, pool: BlockPoolAllocator) -> None:
    from kvpool import render_prometheus

    with new_file(name) as temporary:
        temporary.write_text(render_prometheus({model: pool.stats}), encoding="utf-8")


def _write(piece: str) -> None:
    print(piece, end="", flush=True)


def _discard(piece: str) -> None:
    pass


def _note(text: str) -> None:
    print(f"kvpool: {text}", file=sys.stderr)
