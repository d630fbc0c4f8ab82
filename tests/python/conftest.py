"""Fixtures that several test files share."""

from __future__ import annotations

import pytest
from kvpool.models import load


@pytest.fixture(scope="session")
def default_model():
    """(model, tokenizer, info) of the default model in float32, loaded once a session."""
    return load(dtype="float32")
