"""The command line, as a user runs it: in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from kvpool import BlockPoolAllocator, PoolConfig, build_pooled_caches
from kvpool.cli.blas import find_openblas, links_reference_blas
from mlx_lm import stream_generate
from prometheus_client.parser import text_string_to_metric_families
from tiny_models import random_model, write_gguf

LONG = "Write a long story about a river."


def start(*arguments, **options):
    # A shell's background job, and all that it starts, ignores interrupts. Not by preexec_fn: it forks, which OpenBLAS in
    # this process does not always survive.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        [sys.executable, "-m", "kvpool", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def kvpool(*arguments, stdin="", **options):
    process = start(*arguments, **options)
    out, err = process.communicate(stdin, timeout=120)
    assert "Traceback" not in err
    return process.returncode, out, err


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("cli") / "tiny.gguf", random_model())


def test_version_and_help():
    code, out, _ = kvpool("--version")
    assert code == 0 and out.startswith("kvpool ")
    code, out, _ = kvpool("--help")
    assert code == 0 and all(command in out for command in ("generate", "compare", "convert", "calibrate", "info"))


def test_json_holds_the_answer_and_every_figure(tiny):
    code, out, _ = kvpool("generate", tiny, "-p", "hello", "--max-tokens", 5, "--cache", "pooled", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["answer"]["tokens"] == 5 and report["finish_reason"] == "length"
    assert report["prompt"]["tokens"] == 3 and report["prompt"]["tokens_per_second"] > 0
    pool = report["pool"]
    assert pool["blocks_held"] == pool["blocks_peak"] == 2 * 2 * 256 // 16
    assert report["bytes_held"] == report["bytes_stock"] == 2 * 2 * 256 * 2 * 16 * 4
    assert report["cache"] == "pooled" and report["dtype"] == "float32"


def test_paged_pooled_and_stock_answers_are_equal(tiny):
    run = ["generate", tiny, "-p", "hello w", "--max-tokens", 30, "--json"]
    reports = [json.loads(kvpool(*run, "--cache", cache)[1]) for cache in ("paged", "pooled", "stock")]
    assert reports[0]["text"] == reports[1]["text"] == reports[2]["text"]
    assert reports[2]["pool"] is None


def test_the_answer_is_on_stdout_and_the_table_is_not(tiny):
    code, out, err = kvpool("generate", tiny, "--raw", "--max-tokens", 4, stdin="hello\n")
    assert code == 0 and "tokens/s" not in out
    for words in (
        "prompt",
        "answer",
        "blocks held, peak",
        "cache held, peak",
        "stock cache would hold",
        "fragmentation",
    ):
        assert words in err


def test_sampling_repeats_with_the_seed(tiny):
    run = ["generate", tiny, "-p", "hello", "--max-tokens", 20, "--temp", 1.5, "--top-k", 50, "--top-p", 0.9, "--json"]
    texts = [json.loads(kvpool(*run, "--seed", seed)[1])["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_metrics_file_parses_whatever_the_model_is_called(tiny, tmp_path):
    odd = tmp_path / 'a"b\\c\nd.gguf'
    odd.write_bytes(tiny.read_bytes())
    metrics = tmp_path / "metrics.prom"
    code, _, err = kvpool("generate", odd, "-p", "hello", "--max-tokens", 3, "--metrics-file", metrics)
    assert code == 0, err
    samples = [sample for family in text_string_to_metric_families(metrics.read_text()) for sample in family.samples]
    assert samples and all(str(odd) in sample.labels.values() for sample in samples)
    assert {file.name for file in tmp_path.iterdir()} == {odd.name, "metrics.prom"}


def test_a_pool_that_is_too_small_says_what_would_do(tiny):
    run = ["generate", tiny, "-p", "hello", "--max-tokens", 300, "--cache", "pooled"]
    code, out, err = kvpool(*run, "--n-blocks", 100)
    assert code != 0 and out == ""
    assert "--n-blocks 128" in err and "300" in err
    assert kvpool(*run, "--n-blocks", 127)[0] != 0
    assert kvpool(*run, "--n-blocks", 128)[0] == 0
    code, _, err = kvpool(*run, "--max-blocks", 127)
    assert code != 0 and "--max-blocks 128" in err
    assert kvpool(*run, "--max-blocks", 128)[0] == 0
    assert kvpool(*run, "--n-blocks", 64, "--grow")[0] == 0
    assert kvpool(*run, "--no-grow", "--step", 7, "--block-size", 5)[0] == 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--max-tokens", "0"], "--max-tokens"),
        (["--temp", "-1"], "--temp"),
        (["--temp", "nan"], "--temp"),
        (["--temp", "inf"], "--temp"),
        (["--top-p", "2"], "--top-p"),
        (["--min-p", "-0.5"], "--min-p"),
        (["--top-k", "-3"], "--top-k"),
        (["--seed", "-1"], "--seed"),
        (["--block-size", "0"], "--block-size"),
        (["--n-blocks", "1"], "--n-blocks"),
        (["--n-blocks", "8", "--max-blocks", "8"], "--max-blocks"),
        (["--n-blocks", "900", "--max-blocks", "800", "--grow"], "--n-blocks"),
        (["--cache", "other"], "--cache"),
        (["--dtype", "int8"], "--dtype"),
        (["--metrics-file", "/no/such/folder/m"], "--metrics-file"),
        (["--metrics-file", "m", "--cache", "stock"], "--metrics-file"),
        (["--prompt-file", "also"], "--prompt-file"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_wrong_options_are_named(tiny, arguments, words):
    code, out, err = kvpool("generate", tiny, "-p", "hello", *arguments)
    assert code == 2 and out == "" and words in err


def test_wrong_prompts_are_named(tiny, tmp_path):
    binary, empty = tmp_path / "binary", tmp_path / "empty"
    binary.write_bytes(b"\xff\xfe\x00")
    empty.write_bytes(b"\n")
    for arguments, words in (
        (["--prompt-file", binary], "UTF-8"),
        (["--prompt-file", empty], "empty"),
        (["--prompt-file", tmp_path / "none"], "No such file"),
        (["--prompt-file", tmp_path], "Is a directory"),
        (["-p", " "], "empty"),
        (["-p", b"\xff"], "UTF-8"),
        ([], "standard input"),
    ):
        process = subprocess.run(
            [
                sys.executable,
                "-m",
                "kvpool",
                "generate",
                str(tiny),
                *[a if isinstance(a, bytes) else str(a) for a in arguments],
            ],
            input="",
            capture_output=True,
            text=True,
        )
        assert process.returncode == 2 and words in process.stderr and "Traceback" not in process.stderr


def test_bad_models_give_one_line(tiny, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-64])
    for command in (["generate", cut, "-p", "hello"], ["convert", cut, tmp_path / "out"], ["info", tmp_path / "none"]):
        code, out, err = kvpool(*command)
        last = err.strip().splitlines()[-1]
        assert code == 1 and out == "" and last.startswith("kvpool: ") and str(command[1]) in last
    assert not (tmp_path / "out").exists()


def test_convert_then_generate(tiny, tmp_path):
    code, _, err = kvpool("convert", tiny, tmp_path / "out", "--dtype", "float32")
    assert code == 0, err
    run = ["-p", "hello", "--max-tokens", 20, "--json"]
    texts = [json.loads(kvpool("generate", model, *run)[1])["text"] for model in (tiny, tmp_path / "out")]
    assert texts[0] == texts[1]
    code, _, err = kvpool("convert", tiny, tmp_path / "out")
    assert code == 1 and "--force" in err


def test_info_counts_bytes_a_token(tiny):
    code, out, _ = kvpool("info", tiny, "--memory", "1MiB", "--group-size", 32, "--json")
    assert code == 0
    content = json.loads(out)
    rows = {row["format"]: row for row in content["formats"]}
    assert list(rows) == (
        "fp32 fp16 bf16 int8 int4 int2 kivi4 kivi2 vecinfer4 vecinfer3 vecinfer2 vecinfer1.5 vecinfer1".split()
    )
    assert rows["fp16"]["bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert rows["fp16"]["tokens_in_memory"] == (1 << 20) // 256
    assert rows["int4"]["bits_per_element"] == 4 + 32 / 16
    assert rows["vecinfer1.5"]["bytes_per_token"] == 2 * 2 * 2 * 16 * 1.5 / 8
    code, out, _ = kvpool("info", tiny)
    assert code == 0 and "vecinfer1" in out and "MLX" in out
    code, _, err = kvpool("info", tiny, "--memory", "lots")
    assert code == 2 and "--memory" in err and "8GB" in err


@pytest.mark.skipif(
    not links_reference_blas() or find_openblas() is None, reason="MLX brings its own BLAS, or no OpenBLAS here"
)
def test_openblas_is_said_and_loaded(tiny):
    run = ["generate", tiny, "-p", "hello", "--max-tokens", 1]
    assert "BLAS: OpenBLAS (" in kvpool(*run)[2]
    assert "BLAS" not in kvpool(*run, "--no-blas")[2]
    code, _, err = kvpool(*run, env=os.environ | {"KVPOOL_OPENBLAS": "/no/such/lib.so"})
    assert code == 0 and "BLAS: reference, since /no/such/lib.so cannot be loaded" in err


@pytest.fixture(scope="module")
def ask(default_model):
    """Greedy tokens of the default model for one prompt, with the given cache."""
    model, tokenizer, _ = default_model
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": LONG}], add_generation_prompt=True)

    def answer(**options):
        return [reply.token for reply in stream_generate(model, tokenizer, prompt, max_tokens=48, **options)]

    return answer


@pytest.fixture(scope="module")
def stock_answer(ask):
    return ask()


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_default_model_says_the_same_in_every_block_size(default_model, ask, stock_answer, block_size):
    pool = BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=60, grow_on_exhaustion=True))
    caches = build_pooled_caches(default_model[0], pool, owner=1)
    assert ask(prompt_cache=caches) == stock_answer
    assert pool.stats.blocks_in_use() == 60 * 256 // block_size


def test_interrupt_ends_with_the_table_and_130(default_model):
    process = start("generate", default_model[2].path, "-p", LONG, "--max-tokens", 4000, "--n-blocks", 65536)
    assert process.stdout.read(1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err and "blocks held, peak" in err and "Traceback" not in err and out


def test_interrupt_while_loading_is_silent(tiny):
    process = start("generate", tiny, "-p", "-")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT) and "Error" not in err
