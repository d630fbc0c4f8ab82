"""GGUF: what loads computes what the original computes, and what is broken gives one clear line."""

from __future__ import annotations

import functools
import struct

import gguf
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvpool.models import ModelError, inspect, load
from kvpool.models.gguf_file import GGUFFile
from kvpool.models.load import read_gguf
from tiny_models import byte_level_vocab, random_model, write_byte_level, write_gguf

PRE = {"llama": "smollm", "qwen2": "qwen2"}
PROMPT = mx.array([[5, 9, 40, 100, 7, 8]])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.mark.parametrize(
    "arch, shape",
    [
        ("llama", {}),
        ("llama", {"tied": False}),
        (
            "llama",
            {"head_dim": 32, "extra": {"add_key_length": 32, "add_value_length": 32, "add_rope_dimension_count": 32}},
        ),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("qwen2", {}),
    ],
)
def test_logits_equal_the_original_model(tmp_path, arch, shape):
    extra = shape.pop("extra", {})
    if "rope_scaling" in shape:
        extra = {"add_rope_scaling_type": gguf.RopeScalingType.LINEAR, "add_rope_scaling_factor": 4.0}
    original = random_model(arch, **shape)
    path = write_gguf(
        tmp_path / "model.gguf", original, extra=extra, tokenizer=functools.partial(write_byte_level, pre=PRE[arch])
    )
    loaded, _, _ = load(path, "float32")
    assert mx.allclose(loaded(PROMPT), original(PROMPT), atol=1e-5)


def test_llama3_rope_factors_are_recovered(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    original = random_model(rope_theta=500000.0, rope_scaling=scaling)
    base = 500000.0 ** (np.arange(0, 16, 2) / 16)
    factors = np.array(original.layers[0].self_attn.rope._freqs) / base
    path = tmp_path / "llama3.gguf"

    write_gguf(path, original, tensors={"rope_freqs.weight": factors.astype(np.float32)})
    loaded, _, _ = load(path, "float32")
    assert mx.allclose(loaded(PROMPT), original(PROMPT), atol=1e-4)

    write_gguf(path, original, tensors={"rope_freqs.weight": np.linspace(1, 2, 8, dtype=np.float32)})
    with pytest.raises(ModelError, match="rope_freqs.weight"):
        load(path)


def test_quantized_weights_are_dequantized_and_counted(tmp_path):
    path = write_gguf(tmp_path / "q.gguf", quantize=True)
    info = inspect(path)
    n_vocab = len(byte_level_vocab()[0])
    assert info.stored == "Q4_1, F32"
    assert info.head_dim == 16 and info.elements_per_token == 2 * 2 * 2 * 16
    assert info.n_parameters == n_vocab * 64 + 64 + 2 * (2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    model, _, _ = load(path, "float32")
    assert mx.all(mx.isfinite(model(PROMPT)))


def test_byte_level_tokenizer(tiny):
    _, tokenizer, _ = load(tiny)
    tokens = byte_level_vocab()[0]
    ids = tokenizer.encode("hello w1<|im_end|>ü")
    assert [tokens[i] for i in ids] == ["hello", "Ġw", "1", "<|im_end|>", "Ã", "¼"]
    assert tokenizer.decode(ids) == "hello w1<|im_end|>ü"
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]) == [1, tokens.index("hello"), 2]


def test_sentencepiece_tokenizer(tmp_path):
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello"]
    scores = [0.0] * 259 + [-100.0 - i for i in range(5)] + [-2.0, -3.0, -4.0, -5.0, -6.0]

    def write_pieces(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores(scores)
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 10)
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    path = write_gguf(tmp_path / "spm.gguf", random_model(vocab_size=len(pieces)), tokenizer=write_pieces)
    _, tokenizer, _ = load(path)
    ids = tokenizer.encode("hello ü")
    assert [pieces[i] for i in ids] == ["<s>", "▁hello", "▁", "<0xC3>", "<0xBC>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello ü"


def test_every_truncation_is_an_error_before_data_are_read(tiny, tmp_path):
    data, cut = tiny.read_bytes(), tmp_path / "cut.gguf"
    for length in [*range(0, 200), *range(200, len(data), 997), len(data) - 33]:
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError) as caught:
            inspect(cut)
        assert str(cut) in str(caught.value) and "\n" not in str(caught.value)


def header(n_tensors=1, n_pairs=0, body=b"", magic=b"GGUF", version=3):
    return struct.pack("<4sIQQ", magic, version, n_tensors, n_pairs) + body


def tensor(name=b"t", dims=(32,), kind=0, offset=0, n_dims=None):
    n_dims = len(dims) if n_dims is None else n_dims
    return struct.pack(f"<Q{len(name)}sI{len(dims)}QIQ", len(name), name, n_dims, *dims, kind, offset)


def pair(key=b"k", kind=8, value=struct.pack("<Q", 0)):
    return struct.pack(f"<Q{len(key)}sI", len(key), key, kind) + value


BIG = (1 << 64) - 1


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "empty"),
        (header(magic=b"GGML"), "b'GGUF'"),
        (header(version=1), "version 1"),
        (header(version=3 << 24), "version"),
        (header(n_tensors=BIG), "tensor count"),
        (header(n_pairs=BIG, n_tensors=0), "metadata count"),
        (header(0, 1, pair(value=struct.pack("<Q", BIG))), "metadata key k"),
        (header(0, 1, pair(kind=99, value=b"x")), "type 99"),
        (header(0, 1, pair(kind=9, value=struct.pack("<IQ", 4, BIG))), "length of metadata key k"),
        (header(0, 1, pair(kind=9, value=struct.pack("<IQ", 9, 1))), "array of type 9"),
        (header(0, 2, pair() + pair()), "twice"),
        (header(0, 1, pair(key=b"\xff\xfe")), "UTF-8"),
        (header(body=tensor(n_dims=9) + bytes(64)), "9 dimensions"),
        (header(body=tensor(n_dims=BIG >> 32) + bytes(64)), "dimensions"),
        (header(body=tensor(dims=(0,)) + bytes(64)), "shape"),
        (header(body=tensor(dims=(1 << 32, 1 << 32)) + bytes(64)), "2^63"),
        (header(body=tensor(dims=(1 << 40,)) + bytes(64)), "file ends"),
        (header(body=tensor(kind=77) + bytes(64)), "unknown type 77"),
        (header(body=tensor(kind=24) + bytes(64)), "type I8"),
        (header(body=tensor(kind=3, dims=(33,)) + bytes(64)), "multiple of 32"),
        (header(body=tensor(offset=BIG - 31) + bytes(256)), "file ends"),
        (header(body=tensor(offset=4) + bytes(256)), "alignment"),
        (header(2, 0, tensor() + tensor() + bytes(512)), "twice"),
        (header(2, 0, tensor(b"a") + tensor(b"b", offset=64) + bytes(512)), "a and b overlap"),
        (header(body=tensor() + bytes(512)), "general.architecture is missing"),
        (header(0, 1, pair(b"general.alignment", 4, struct.pack("<I", 3))), "general.alignment"),
        (
            header(0, 1, pair(b"general.architecture", 8, struct.pack("<Q5s", 5, b"mamba"))),
            "'mamba'; supported: llama, qwen2",
        ),
        (header(0, 1, pair(b"general.architecture", 4, struct.pack("<I", 3))), "type int, not str"),
    ],
)
def test_hostile_headers(tmp_path, content, words):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        inspect(path)
    message = str(caught.value)
    assert words in message and str(path) in message and "\n" not in message


@pytest.mark.parametrize(
    "key, words",
    [
        ("llama.embedding_length", "llama.embedding_length is missing"),
        ("llama.attention.head_count", "llama.attention.head_count is missing"),
        ("llama.attention.layer_norm_rms_epsilon", "rms_epsilon is missing"),
        ("tokenizer.ggml.tokens", "tokenizer.ggml.tokens is missing"),
        ("tokenizer.ggml.model", "tokenizer.ggml.model is missing"),
        ("tokenizer.ggml.merges", "tokenizer.ggml.merges is missing"),
        ("blk.1.attn_q.weight", "blk.1.attn_q.weight is missing"),
        ("token_embd.weight", "token_embd.weight is missing"),
    ],
)
def test_a_missing_key_or_tensor_is_named(tiny, tmp_path, key, words):
    path = tmp_path / "renamed.gguf"
    path.write_bytes(tiny.read_bytes().replace(key.encode(), b"Z" + key[1:].encode()))
    with pytest.raises(ModelError, match=words):
        read_gguf(path)


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("llama.block_count", 1 << 31, "block_count"),
        ("llama.block_count", 3, "block_count is 3, but the file has 20 tensors"),
        ("llama.block_count", 1, "not part of"),
        ("llama.attention.head_count", 0, "head_count"),
        ("llama.attention.head_count", 3, "head"),
        ("llama.attention.head_count", 0xFFFFFFFF, "head_count"),
        ("llama.attention.head_count_kv", 3, "must divide"),
        ("llama.embedding_length", 65, "shape"),
        ("llama.feed_forward_length", 128, "ffn_gate.weight has the shape"),
        ("tokenizer.ggml.eos_token_id", 1 << 30, "eos_token_id"),
    ],
)
def test_metadata_that_contradict_the_tensors(tiny, tmp_path, key, value, words):
    data = bytearray(tiny.read_bytes())
    at = data.index(key.encode() + struct.pack("<I", 4)) + len(key) + 4
    data[at : at + 4] = struct.pack("<I", value)
    path = tmp_path / "changed.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=words):
        read_gguf(path)


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        load(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match="float16, bfloat16, float32"):
        load(tmp_path / "none.gguf", "int8")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 1 << 30), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_mutated_headers_load_or_give_a_model_error(tiny, tmp_path, edits):
    original = tiny.read_bytes()
    data = bytearray(original)
    n_header = min(tensor.start for tensor in GGUFFile(tiny).tensors.values())
    for at, replacement in edits:
        at %= n_header
        data[at : at + len(replacement)] = replacement
    path = tmp_path / "mutated.gguf"
    path.write_bytes(data[: len(original)])
    try:
        model, _ = read_gguf(path)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        for _, values in model.weights():
            assert values.size


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 1 << 30), replacement=st.binary(min_size=1, max_size=4))
def test_mutated_files_load_or_give_a_model_error(tiny, tmp_path, at, replacement):
    data = bytearray(tiny.read_bytes())
    at %= min(tensor.start for tensor in GGUFFile(tiny).tensors.values())
    data[at : at + len(replacement)] = replacement
    path = tmp_path / "mutated.gguf"
    path.write_bytes(data)
    try:
        load(path)
    except ModelError as error:
        assert "\n" not in str(error)


def test_default_model_knows_paris(default_model):
    from mlx_lm import generate

    model, tokenizer, info = default_model
    assert (info.n_layers, info.n_heads, info.n_kv_heads, info.head_dim) == (30, 9, 3, 64)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert "Paris" in generate(model, tokenizer, prompt, max_tokens=16)
