"""Fixtures that several test files share."""

from __future__ import annotations

import ctypes
import ctypes.util

import pytest

if library := ctypes.util.find_library("openblas"):  # before MLX is imported, so that the default model is quick
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)

from kvpool.models import load  # noqa: E402


@pytest.fixture(scope="session")
def default_model():
    """(model, tokenizer, info) of the default model in float32, loaded once a session."""
    return load(dtype="float32")
