"""mlx_lm folders: a file that contradicts itself is refused, naming the tensor, before MLX maps it."""

from __future__ import annotations

import json
import struct

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvpool.models import ModelError, convert, load
from kvpool.models.safetensors_check import check_safetensors
from tiny_models import write_gguf


def write(path, header, n_data=4):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(n_data))
    return path


def entry(shape=(1,), offsets=(0, 4), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    convert(write_gguf(root / "tiny.gguf"), root / "model", "float32")
    return root / "model"


@pytest.fixture
def copy(folder, tmp_path):
    """A folder of links to the good model, for a test to spoil one file of."""
    target = tmp_path / "model"
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_good_file_gives_its_table(tmp_path):
    arrays = {"a": mx.zeros((2, 3)), "b": mx.zeros((5,), mx.bfloat16), "empty": mx.zeros((0, 4))}
    path = tmp_path / "good.safetensors"
    mx.save_safetensors(str(path), arrays)
    table = check_safetensors(path)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in table.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (5,)),
        "empty": ("F32", (0, 4)),
    }


@pytest.mark.parametrize(
    "header, words",
    [
        ({"t": entry((1000, 1000), (0, 4_000_000))}, "'t' ends at byte 4000000"),
        ({"t": entry((1000, 1000), (0, 4))}, "'t' spans 4 bytes"),
        ({"t": entry((1,), (4, 0))}, "'t' has reversed"),
        ({"t": entry((1,), (-4, 0))}, "'t' has the data_offsets"),
        ({"t": entry((1,), (0, 4, 8))}, "'t' has the data_offsets"),
        ({"t": entry((-1,), (0, 4))}, "'t' has the shape"),
        ({"t": entry((True,), (0, 4))}, "'t' has the shape"),
        ({"t": entry((1 << 62, 1 << 62), (0, 4))}, "'t' spans 4 bytes"),
        ({"t": entry((1.0,), (0, 4))}, "'t' has the shape"),
        ({"t": entry(dtype="F31")}, "'t' has the dtype 'F31'"),
        ({"t": {"dtype": "F32"}}, "'t' needs dtype, shape and data_offsets"),
        ({"t": 5}, "'t' needs"),
        ({"t": entry(), "u": entry()}, "'u' starts at byte 0, which overlaps"),
        ({"t": entry((0,), (0, 0)), "u": entry((0,), (4, 4))}, "'u' starts at byte 4, which leaves a gap"),
        ({"t": entry((0,), (0, 0))}, "take 0 bytes"),
        ([], "not a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"t":1,"t":2}', "twice"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_inconsistent_headers(tmp_path, header, words):
    path = write(tmp_path / "bad.safetensors", header)
    with pytest.raises(ModelError) as caught:
        check_safetensors(path)
    message = str(caught.value)
    assert words in message and str(path) in message and "\n" not in message


@pytest.mark.parametrize("content", [b"", b"\0\0\0", struct.pack("<Q", 1 << 63) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_header_lengths(tmp_path, content):
    path = tmp_path / "short.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="header"):
        check_safetensors(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_pass_or_give_a_model_error(folder, tmp_path, data):
    content = bytearray((folder / "model.safetensors").read_bytes())
    n_header = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, n_header - 1))
        content[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 1, 1000]))
    path = tmp_path / "mutated.safetensors"
    path.write_bytes(content[: len(content) - cut])
    try:
        table = check_safetensors(path)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert sum(tensor.n_bytes for tensor in table.values()) == len(content) - n_header


def test_truncated_weights_are_refused_by_load(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match="tensor '.*' ends at byte"):
        load(copy)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("config.json", None, "config.json: No such file"),
        ("config.json", b"[]", "object is wanted"),
        ("config.json", b"{", "not valid JSON"),
        ("config.json", b'{"model_type": "no_such_type"}', "'no_such_type' is not one that mlx_lm has"),
        ("config.json", b'{"model_type": "../llama"}', "model_type is"),
        ("config.json", b'{"model_type": "llama"}', "cannot build"),
        ("config.json", b'{"model_type": "llama", "num_hidden_layers": 1000000000}', "num_hidden_layers"),
        ("tokenizer.json", None, "no tokenizer"),
        ("tokenizer.json", b"{}", "cannot build"),
        ("model.safetensors", None, "no model"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"t": "model-2.safetensors"}}',
            "'model-2.safetensors', which is not there",
        ),
        ("model.safetensors.index.json", b'{"weight_map": {"t": "model.safetensors"}}', "'t' is not in"),
        ("model.safetensors.index.json", b"{}", "weight_map is missing"),
    ],
)
def test_spoiled_folders(copy, name, content, words):
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load(copy)
    assert words in str(caught.value) and "\n" not in str(caught.value)
