"""kvpool convert: the folder equals the GGUF, and is there whole or not at all."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm
import pytest
from kvpool.atomic import new_file, new_folder
from kvpool.models import ModelError, convert, inspect, load
from tiny_models import random_model, write_gguf

FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
}


def greedy(model, tokenizer, text, n=24):
    prompt = tokenizer.encode(text)
    return [reply.token for reply in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=n)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("convert") / "tiny.gguf", quantize=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_mlx_lm_loads_it_and_says_the_same(tmp_path, dtype, tied):
    source = write_gguf(tmp_path / "tiny.gguf", random_model(tied=tied), quantize=True)
    info = convert(source, tmp_path / "out", dtype)
    assert {file.name for file in (tmp_path / "out").iterdir()} == FILES
    model, tokenizer, _ = load(source, dtype)
    stock, stock_tokenizer = mlx_lm.load(str(tmp_path / "out"))
    ours, ours_tokenizer, ours_info = load(tmp_path / "out", dtype)
    expected = greedy(model, tokenizer, "hello w")
    assert greedy(stock, stock_tokenizer, "hello w") == expected
    assert greedy(ours, ours_tokenizer, "hello w") == expected
    assert stock.model.norm.weight.dtype == getattr(mx, dtype)
    assert stock_tokenizer.eos_token_ids == tokenizer.eos_token_ids
    assert ours_info.n_parameters == info.n_parameters


def test_default_model_converts_token_for_token(default_model, tmp_path):
    model, tokenizer, info = default_model
    convert(info.path, tmp_path / "out", "float32")
    stock, stock_tokenizer = mlx_lm.load(str(tmp_path / "out"))
    text = "The three primary colours are"
    assert greedy(stock, stock_tokenizer, text, 16) == greedy(model, tokenizer, text, 16)
    assert inspect(tmp_path / "out").n_parameters == info.n_parameters


def test_an_existing_target_is_kept_unless_forced(tiny, tmp_path):
    target = tmp_path / "out"
    convert(tiny, target)
    before = (target / "config.json").read_bytes()
    with pytest.raises(ModelError, match="--force"):
        convert(tiny, target, "float32")
    assert (target / "config.json").read_bytes() == before
    convert(tiny, target, "float32", force=True)
    assert inspect(target).stored == "F32"
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_force_does_not_replace_what_is_no_model(tiny, tmp_path):
    (tmp_path / "notes.txt").write_text("keep")
    with pytest.raises(ModelError, match="no model folder"):
        convert(tiny, tmp_path, force=True)
    assert (tmp_path / "notes.txt").read_text() == "keep"


def test_a_bad_source_leaves_nothing(tiny, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-100])
    with pytest.raises(ModelError, match="file ends"):
        convert(cut, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["cut.gguf"]


def test_a_failure_while_writing_leaves_what_was_there(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    with pytest.raises(RuntimeError), new_folder(tmp_path / "out") as folder:
        (folder / "new").write_text("half")
        raise RuntimeError
    (tmp_path / "file").write_text("old")
    with pytest.raises(RuntimeError), new_file(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert (tmp_path / "file").read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "out"]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["old"]
