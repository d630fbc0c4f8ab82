"""The entry point of ``kvpool``: commands, and the one place where errors become one line."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import Annotated

import typer

from . import blas
from .calibrate import calibrate
from .compare import compare
from .convert import convert
from .generate import generate
from .info import info

app = typer.Typer(
    help="A KV-cache memory engine for MLX.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(compare)
app.command()(convert)
app.command()(calibrate)
app.command()(info)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvpool {importlib.metadata.version('kvpool')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def run() -> None:
    """Runs the command line of this process. Exits 0, 1 (error), 2 (wrong option) or 130 (interrupted).

    ``KVPOOL_DEBUG=1`` shows the traceback of an error.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    arguments = sys.argv[1:]
    try:
        runs_a_model = arguments[:1] in (["generate"], ["compare"], ["calibrate"])
        wants_blas = runs_a_model and not {"--no-blas", "--help"} & set(arguments)
        app(prog_name="kvpool", obj=blas.use_openblas() if wants_blas else None)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.environ.get("KVPOOL_DEBUG") == "1":
            raise
        print(f"kvpool: {_one_line(error)}", file=sys.stderr)
        sys.exit(1)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'error'}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    run()
