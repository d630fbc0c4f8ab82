"""``kvpool generate``: a model answers, its keys and values in a pool."""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ..atomic import new_file
from .options import DType, ModelArgument, finite
from .prompt import encode_prompt, read_prompt

if TYPE_CHECKING:
    from mlx.nn import Module

    from kvpool import BlockPoolAllocator

    from .pool_plan import PoolOptions
    from .report import Report


class CacheKind(str, Enum):
    pooled = "pooled"
    stock = "stock"


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
        CacheKind, typer.Option(help="The KV cache: kvpool's, or mlx_lm's own to compare.")
    ] = CacheKind.pooled,
    block_size: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens a block.")] = 16,
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
        typer.Option(min=1, max=1 << 20, help="Tokens by which a cache grows. Default: the block size, at least 256."),
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

    if context.obj:
        _note(context.obj)

    from .. import models
    from .answer import Answer, report_on
    from .pool_plan import PoolOptions

    loaded, tokenizer, shape = models.load(model, dtype.value if dtype else None)
    tokens = encode_prompt(tokenizer, text, raw=raw, system=system)
    if not tokens:
        raise typer.BadParameter("the prompt has no tokens.", param_hint="'--prompt'")
    if shape.context_length and len(tokens) + max_tokens > shape.context_length:
        _note(f"{len(tokens)} + {max_tokens} tokens may exceed the model's context of {shape.context_length}")
    if cache is CacheKind.pooled:
        options = PoolOptions(block_size, step, n_blocks, grow, max_blocks)
        caches, pool = _pooled_caches(loaded, options, len(tokens), max_tokens)
    else:
        caches, pool = _stock_caches(loaded), None
    if seed is not None:
        _seed(seed)

    answer = Answer(tokens)
    sampling = {"temp": temp, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    write = _discard if as_json else _write
    answer.run(loaded, tokenizer, caches, max_tokens=max_tokens, sampling=sampling, write=write)
    _show(report_on(answer, loaded, shape, caches, pool), answer.text, as_json=as_json)
    if metrics_file is not None and pool is not None:
        _write_metrics(metrics_file, shape.path, pool)
    if answer.finish_reason == "interrupted":
        raise typer.Exit(130)


def _stock_caches(model: Module) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


def _pooled_caches(
    model: Module, options: PoolOptions, n_prompt: int, n_answer: int
) -> tuple[list[Any], BlockPoolAllocator]:
    from mlx_lm.models.cache import KVCache

    from kvpool import build_pooled_caches

    from .pool_plan import demand_of, make_pool

    n_layers = sum(type(cache) is KVCache for cache in _stock_caches(model))
    if n_layers == 0:
        raise ValueError("this model has no plain attention layers to pool; run it with --cache stock")
    demand = demand_of(options, n_layers)
    pool = make_pool(options, demand, n_prompt, n_answer)
    return build_pooled_caches(model, pool, owner=1, step=demand.step), pool


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
