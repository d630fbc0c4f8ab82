"""``kvpool compare``: its measures, its table and its plot."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import mlx.core as mx
import numpy as np
import pytest
from kvpool.cli.contenders import PagedOptions, paged_contender, stock_contenders
from kvpool.cli.decode import time_decode
from kvpool.cli.quality import Tally, measure_window, windows_of
from kvpool.cli.svg import Axis, Chart
from kvpool.mlx_lm import install
from test_cli import kvpool
from tiny_models import random_model, write_gguf

TEXT = "hello world, hello wide world. " * 40


@pytest.fixture(scope="module")
def model():
    return random_model(hidden_size=256)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, model):
    return write_gguf(tmp_path_factory.mktemp("compare") / "tiny.gguf", model)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def test_windows_are_spread_and_do_not_overlap():
    assert windows_of(range(10), 2, 3) == [[0, 1, 2], [5, 6, 7]]
    assert windows_of(range(6), 2, 3) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="5 tokens; 2 windows of 3 need 6"):
        windows_of(range(5), 2, 3)


@pytest.mark.parametrize("n_tokens, step", [(96, 32), (50, 7), (33, 64)])
def test_measures_equal_those_of_one_pass_without_a_cache(model, n_tokens, step):
    mx.random.seed(1)
    window = mx.random.randint(0, 250, (n_tokens,)).tolist()
    options = PagedOptions(window=8, sink=0)
    contenders = [paged_contender(model, spec, 8, options) for spec in ("raw", "int4")]
    contenders += stock_contenders(model, 64)[:1]
    tallies = {contender.name: Tally() for contender in contenders}
    steps = []
    with install():
        caches = measure_window(model, window, contenders, tallies, step, lambda: steps.append(1))
    assert len(steps) == 3 * -(-n_tokens // step)
    assert all(layer.offset == n_tokens for layers in caches.values() for layer in layers)

    half = n_tokens // 2
    logits = np.array(model(mx.array([window]))[0]).astype(np.float64)[half - 1 : -1]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -log_probs[np.arange(len(log_probs)), window[half:]].mean()
    raw, int4, stock = tallies.values()
    for tally in (raw, stock):
        assert tally.tokens == n_tokens - half
        assert tally.nll / tally.tokens == pytest.approx(nll, rel=1e-4)
        assert tally.kl / tally.tokens == pytest.approx(0, abs=1e-6) and tally.agree >= tally.tokens - 1
    assert (int4.kl > 1e-6) == (step < n_tokens)  # blocks are packed when the next tokens come


def test_memory_is_what_mlx_holds(model):
    names = ["raw", "int4"]
    contenders = [paged_contender(model, name, 32, PagedOptions(window=32, sink=0)) for name in names]
    contenders += stock_contenders(model, 64)
    mx.eval(model(mx.array([[1]])), model.parameters())
    tallies = {contender.name: Tally() for contender in contenders}
    with install():
        caches = measure_window(model, [1] * 512, contenders, tallies, 32, lambda: None)
    stock = sum(layer.nbytes for layer in caches["mlx_lm"])
    assert stock == 512 * 2 * 2 * 2 * 64 * 4
    assert tallies["mlx_lm"].bytes_held == pytest.approx(stock, rel=0.01)
    for name in names:
        assert tallies[name].bytes_held == pytest.approx(caches[name][0].storage.resident_bytes(), rel=0.01)
    assert tallies["int4"].bytes_held < stock / 2
    assert tallies["mlx_lm 4 bits g64"].bytes_held == pytest.approx(stock * 5 / 32, rel=0.1)  # small buffers round up


def test_decode_leaves_caches_as_long_as_they_were(model):
    contenders = [paged_contender(model, "int4", 8, PagedOptions(8, 0)), *stock_contenders(model, 64)[:1]]
    caches = {contender.name: contender.make() for contender in contenders}
    runs = []
    with install():
        for layers in caches.values():
            mx.eval(model(mx.array([[1] * 20]), cache=layers))
        seconds = time_decode(model, caches, n_tokens=3, rounds=2, after_run=lambda: runs.append(1))
    assert {name: len(rounds) for name, rounds in seconds.items()} == {"int4": 2, "mlx_lm": 2} and len(runs) == 4
    assert all(second > 0 for rounds in seconds.values() for second in rounds)
    assert all(layer.offset == 20 for layers in caches.values() for layer in layers)


def test_json_has_a_row_for_each_cache(tiny, text):
    run = ["compare", tiny, "--text", text, "--formats", "int8,kivi2:int4-g64-plain-w8-s0", "--json"]
    code, out, err = kvpool(*run, "--context", 64, "--windows", 2, "--window", 16, "--sink", 2, "--block-size", 8)
    assert code == 0, err
    content = json.loads(out)
    rows = {row["cache"]: row for row in content["caches"]}
    quantised = [f"mlx_lm {width}" for width in ("8 bits g64", "4 bits g64", "4 bits g32", "2 bits g32")]
    assert list(rows) == ["raw", "int8", "kivi2:int4-g64-plain-w8-s0", "mlx_lm", *quantised]
    assert (content["context"], content["windows"], content["dtype"]) == (64, 2, "float32")
    assert rows["raw"]["perplexity_lost"] == rows["raw"]["kl"] == 0 and rows["raw"]["top1_agreement"] == 1
    assert rows["mlx_lm"]["perplexity_lost"] == pytest.approx(0, abs=1e-4)
    assert rows["mlx_lm 2 bits g32"]["kl"] > rows["mlx_lm 8 bits g64"]["kl"] > 0
    for row in rows.values():
        assert row["tokens_predicted"] == 64 and row["tokens_per_second"] > 0 and row["bytes_per_token"] > 0


def test_table_and_plot(tiny, text, tmp_path):
    plot = tmp_path / "plot.svg"
    run = ["compare", tiny, "--text", text, "--formats", "int4", "--context", 32, "--windows", 1, "--no-stock"]
    code, out, err = kvpool(*run, "--plot", plot)
    assert code == 0, err
    for words in ("perplexity", "KL", "top-1", "bytes a token", "tokens/s", "raw", "int4", "1 × 32 tokens"):
        assert words in out
    assert "mlx_lm" not in out
    texts = [node.text for node in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")]
    assert "raw" in texts and "int4" in texts


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--formats", "int3"], "'int3' is no format"),
        (["--formats", "int4:fp8"], "'fp8' is no format"),
        (["--formats", "int4-g48"], "'g48' is no option"),
        (["--context", "8"], "--context"),
        (["--windows", "0"], "--windows"),
        (["--step", "0"], "--step"),
        (["--plot", "plot.png"], "SVG"),
        (["--plot", "/no/such/folder/plot.svg"], "folder"),
        (["--text", "no such file"], "No such file"),
    ],
)
def test_wrong_options_are_named(tiny, text, arguments, words):
    code, out, err = kvpool("compare", tiny, "--text", text, *arguments)
    assert code == 2 and out == "" and words in err


def test_a_text_too_short_says_how_much_is_needed(tiny, text, tmp_path):
    code, out, err = kvpool("compare", tiny, "--text", text, "--context", 512, "--windows", 9)
    assert code == 2 and out == "" and "9 windows of 512 need 4608" in err
    empty = tmp_path / "empty"
    empty.write_text("\n")
    code, _, err = kvpool("compare", tiny, "--text", empty)
    assert code == 2 and "empty" in err
    code, _, err = kvpool("compare", tiny)
    assert code == 2 and "--text" in err


def test_chart_places_points_in_order_and_keeps_labels_apart():
    chart = Chart("a < b", Axis("x", log=True), Axis("y"))
    chart.line("line", [(1, 0), (10, 5), (100, 10)])
    chart.point("one", (10, 5))
    chart.point("two", (10, 5))
    chart.rule("rule", 1)
    root = ElementTree.fromstring(chart.svg())
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter("{http://www.w3.org/2000/svg}circle")]
    line = dots[:3]
    assert line == sorted(line, key=lambda dot: (dot[0], -dot[1])) and dots[3] == dots[4] == line[1]
    assert line[1][0] - line[0][0] == pytest.approx(line[2][0] - line[1][0], abs=0.2)
    texts = {node.text: float(node.get("y")) for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert "a < b" in texts and abs(texts["one"] - texts["two"]) >= 13
    with pytest.raises(ValueError, match="at least one point"):
        Chart("", Axis(""), Axis("")).svg()
