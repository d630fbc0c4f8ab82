"""``kvpool generate`` on paged caches in every format, and what ``kvpool info`` says of them."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from kvpool import BlockPoolAllocator, PoolConfig
from kvpool.cli.formats import formats_for
from kvpool.cli.pool_plan import PagedDemand
from kvpool.mlx_lm import make_prompt_cache
from kvpool.models import inspect
from test_cli import kvpool
from tiny_models import random_model, write_gguf

N_LAYERS, N_KV_HEADS, HEAD_DIM = 2, 2, 64
PACKED = ["int8", "int4", "int2", "kivi4", "kivi2"]
VECTORS = ["vecinfer4", "vecinfer3", "vecinfer2", "vecinfer1.5", "vecinfer1"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = random_model(hidden_size=256, seed=1)  # one that does not end its answer
    return write_gguf(tmp_path_factory.mktemp("formats") / "tiny.gguf", model)


def generate(model, *arguments):
    code, out, err = kvpool("generate", model, "-p", "hello", "--json", *arguments)
    assert code == 0, err
    return json.loads(out)


def test_raw_paged_is_the_default_and_answers_as_stock(tiny):
    paged = generate(tiny, "--max-tokens", 60)
    stock = generate(tiny, "--max-tokens", 60, "--cache", "stock")
    assert paged["cache"] == "paged" and paged["text"] == stock["text"]
    assert paged["format"]["keys"] == paged["format"]["values"] == "raw" and stock["format"] is None
    assert paged["tokens_held"] == stock["tokens_held"] == 3 + 60
    assert paged["pool"]["block_size"] == 32 and paged["pool"]["blocks_held"] == 2 * N_LAYERS * 2


@pytest.mark.parametrize("format", PACKED)
def test_a_packed_format_holds_less(tiny, format):
    options = ["--max-tokens", 400, "--window", 32, "--sink", 4]
    raw, packed = generate(tiny, *options), generate(tiny, *options, "--format", format)
    assert packed["format"] | {"keys": format, "values": format, "window": 32, "sink": 4} == packed["format"]
    assert packed["pool"]["blocks_held"] == raw["pool"]["blocks_held"]
    assert packed["bytes_held"] < raw["bytes_held"] * (0.6 if format == "int8" else 0.4)
    for report in (raw, packed):
        assert report["bytes_per_token"] == report["bytes_held"] / report["tokens_held"]
        assert report["bytes_peak"] >= report["bytes_held"]
        assert report["bytes_per_token_raw"] == 2 * report["bytes_per_token_fp16"]
        assert report["bytes_per_token_fp16"] == 2 * N_LAYERS * N_KV_HEADS * HEAD_DIM * 2


def test_keys_and_values_may_differ(tiny):
    options = ["--max-tokens", 200, "--window", 0, "--sink", 0]
    sizes = [
        generate(tiny, *options, "--format", "int8", *names)["bytes_held"]
        for names in ([], ["--value-format", "int2"], ["--key-format", "int2", "--value-format", "int2"])
    ]
    assert sizes[0] > sizes[1] > sizes[2]
    report = generate(tiny, *options, "--key-format", "int8", "--value-format", "kivi2")
    assert (report["format"]["keys"], report["format"]["values"]) == ("int8", "kivi2")


def test_the_table_names_formats_and_bytes_a_token(tiny):
    code, _, err = kvpool("generate", tiny, "-p", "hello", "--max-tokens", 200, "--format", "int4", "--window", 32)
    assert code == 0
    for words in ("blocks held, peak", "(paged, float32)", "int4, int4", "bytes a token held", "of fp16", "of float32"):
        assert words in err


def test_a_fixed_pool_holds_just_what_it_is_said_to(tiny):
    run = ["generate", tiny, "-p", "hello", "--max-tokens", 125, "--format", "kivi2", "--window", 0, "--sink", 0]
    assert kvpool(*run, "--n-blocks", 16)[0] == 0
    code, out, err = kvpool(*run, "--n-blocks", 15)
    assert code == 2 and out == "" and "--n-blocks 16" in err and "hold 96 tokens" in err
    code, _, err = kvpool(*run, "--max-blocks", 15)
    assert code == 2 and "--max-blocks 16" in err
    assert kvpool(*run, "--block-size", 16, "--n-blocks", 32)[0] == 0
    assert kvpool(*run, "--block-size", 16, "--n-blocks", 31)[0] == 2


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--format", "int3"], "--format"),
        (["--key-format", "fp8"], "--key-format"),
        (["--value-format", "x"], "--value-format"),
        (["--window", "-1"], "--window"),
        (["--sink", "-1"], "--sink"),
        (["--group-size", "48"], "--group-size"),
        (["--step", "64"], "--step"),
        (["--format", "int4", "--cache", "pooled"], "--format"),
        (["--key-format", "int4", "--cache", "stock"], "--key-format"),
    ],
)
def test_wrong_options_are_named(tiny, arguments, words):
    code, out, err = kvpool("generate", tiny, "-p", "hello", *arguments)
    assert code == 2 and out == "" and words in err


def test_a_sliding_layer_needs_no_more_than_it_can_reach():
    demand = PagedDemand(16, [0, 64])
    assert demand.blocks_for(1000) == 2 * (63 + 5)
    assert demand.tokens_in(demand.blocks_for(1000)) == 1008
    assert demand.tokens_in(1) == 0


@pytest.mark.parametrize("head_dim", [40, 64, 80, 128])
@pytest.mark.parametrize("group_size, block_size", [(32, 32), (64, 16)])
def test_info_counts_what_the_caches_hold(tmp_path, head_dim, group_size, block_size):
    model = random_model(hidden_size=4 * head_dim, head_dim=head_dim)
    shape = inspect(write_gguf(tmp_path / "tiny.gguf", model))
    bits = {entry.name: entry.bits for entry in formats_for(shape, group_size, block_size)}
    assert list(bits) == ["fp32", "fp16", "bf16", *PACKED, *VECTORS]
    n_tokens = 4 * block_size
    for name in PACKED:
        pool = BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=2, grow_on_exhaustion=True))
        cache = make_prompt_cache(model, pool, name, window=0, sink=0, group_size=group_size)[0]
        sizes = []
        for _ in range(3):
            cache.update_and_fetch(*[mx.random.normal((1, N_KV_HEADS, n_tokens, head_dim))] * 2)
            cache.update_and_fetch(*[mx.random.normal((1, N_KV_HEADS, 1, head_dim))] * 2)
            cache.trim(1)
            sizes.append(cache.nbytes)
        assert sizes[2] - sizes[1] == n_tokens * 2 * N_KV_HEADS * head_dim * bits[name] / 8


def test_info_says_the_bits_of_each_format(tiny):
    code, out, _ = kvpool("info", tiny, "--json")
    assert code == 0
    rows = {row["format"]: row for row in json.loads(out)["formats"]}
    assert [rows[name]["bits_per_element"] for name in VECTORS] == [4, 3, 2, 1.5, 1]
    widths = [rows[name]["bits_per_element"] for name in PACKED]
    assert widths == [9, 5, 3, 5, 3]
    code, out, _ = kvpool("info", tiny, "--json", "--group-size", 64, "--block-size", 16)
    rows = {row["format"]: row for row in json.loads(out)["formats"]}
    assert [rows[name]["bits_per_element"] for name in PACKED] == [8.5, 4.5, 2.5, 5.25, 3.25]


@pytest.fixture(scope="module")
def codebooks(tiny, tmp_path_factory):
    """Files of codebooks for the tiny model, by format."""
    folder = tmp_path_factory.mktemp("codebooks")
    text = folder / "text.txt"
    text.write_text("hello world, hello wide world. " * 40)
    bits = [word for name in VECTORS for word in ("--bits", name.removeprefix("vecinfer"))]
    name = folder / "tiny.vecinfer{bits}.safetensors"
    code, _, err = kvpool("calibrate", tiny, "--text", text, "--tokens", 256, "--window", 64, *bits, "-o", name)
    assert code == 0, err
    return {format: folder / f"tiny.{format}.safetensors" for format in VECTORS}


@pytest.mark.parametrize("format", VECTORS)
def test_vector_formats_hold_their_bits(tiny, codebooks, format):
    options = ["--max-tokens", 400, "--window", 32, "--sink", 4]
    raw = generate(tiny, *options)
    packed = generate(tiny, *options, "--format", format, "--codebooks", codebooks[format])
    assert packed["format"] | {"keys": format, "values": format} == packed["format"]
    assert packed["bytes_held"] < raw["bytes_held"] * 0.4


def test_a_vector_format_needs_codebooks_of_the_model(tiny, codebooks):
    run = ["generate", tiny, "-p", "hello", "--format", "vecinfer2"]
    code, out, err = kvpool(*run)
    assert code == 1 and out == "" and "kvpool calibrate" in err
    code, out, err = kvpool(*run, "--codebooks", codebooks["vecinfer3"])
    assert code == 1 and out == "" and "kvpool calibrate" in err
    code, out, err = kvpool(*run, "--codebooks", "no such file")
    assert code == 1 and out == "" and "no such file" in err


def test_compare_takes_codebooks(tiny, codebooks, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("hello world, hello wide world. " * 40)
    run = ["compare", tiny, "--text", text, "--formats", "vecinfer4,vecinfer1", "--context", 64, "--windows", 1]
    files = ["--codebooks", codebooks["vecinfer1"], "--codebooks", codebooks["vecinfer4"]]
    code, out, err = kvpool(*run, "--json", *files, "--no-stock", "--window", 0, "--sink", 0, "--block-size", 8, "--step", 8)
    assert code == 0, err
    rows = {row["cache"]: row for row in json.loads(out)["caches"]}
    assert 0 < rows["vecinfer4"]["kl"] < rows["vecinfer1"]["kl"]
