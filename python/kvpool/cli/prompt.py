"""The prompt: from an option, a file or standard input, to tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

MAX_PROMPT_BYTES = 1 << 26


def read_prompt(text: Optional[str], file: Optional[str]) -> str:
    """The prompt's text. ``-`` for either, or neither when something is piped in, means standard input.
    One newline at the end of a file or of standard input is dropped.

    Raises:
        typer.BadParameter: both or none given, no such file, not UTF-8, empty, or longer than 64 MiB.
    """
    if text is not None and file is not None:
        raise typer.BadParameter("give one of --prompt and --prompt-file.", param_hint="'--prompt-file'")
    if text is None and file is None and sys.stdin.isatty():
        raise typer.BadParameter("give --prompt, --prompt-file, or pipe the prompt in.", param_hint="'--prompt'")
    if text is not None and text != "-":
        return _decode(text.encode("utf-8", "surrogateescape"), "'--prompt'", "prompt")
    if file is not None and file != "-":
        return read_text(file, "'--prompt-file'", "prompt")
    return _decode(sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1).removesuffix(b"\n"), "standard input", "prompt")


def read_text(file: str, hint: str, what: str) -> str:
    """The text of a file without one newline at its end. ``hint`` and ``what`` name the option and the text in errors.

    Raises:
        typer.BadParameter: no such file, not UTF-8, empty, or longer than 64 MiB.
    """
    try:
        with Path(file).open("rb") as opened:
            content = opened.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}.", param_hint=hint) from None
    return _decode(content.removesuffix(b"\n"), hint, what)


def encode_prompt(tokenizer: TokenizerWrapper, text: str, *, raw: bool, system: Optional[str]) -> list[int]:
    """The prompt's tokens: through the model's chat template, or as they are when ``raw`` or when there is none."""
    if raw or not tokenizer.has_chat_template:
        return tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def _decode(content: bytes, source: str, what: str) -> str:
    if len(content) > MAX_PROMPT_BYTES:
        raise typer.BadParameter(f"the {what} is longer than {MAX_PROMPT_BYTES} bytes.", param_hint=source)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"the {what} is not UTF-8 (byte {error.start}).", param_hint=source) from None
    if not text.strip():
        raise typer.BadParameter(f"the {what} is empty.", param_hint=source)
    return text
