"""Codebooks: made from a model, kept in a file, found again by the model's fingerprint."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from kvpool import VecInferCalibrator, VecInferStream
from kvpool._core import weight_sketch
from kvpool.codebooks import find_codebooks, fingerprint_of, load_codebooks, save_codebooks
from kvpool.codebooks.calibration import observe, offsets_of, pieces_without_gaps
from kvpool.codebooks.file import read_file
from kvpool.mlx_lm import attach, install, make_prompt_cache
from mlx.utils import tree_map
from mlx_lm.models.cache import save_prompt_cache
from test_cli import kvpool
from tiny_models import random_model, write_gguf

BITS = ("1", "1.5", "2", "3", "4")


def observed(n_tokens=200, n_layers=2, **options):
    """A calibrator that has seen normal numbers."""
    rng = np.random.default_rng(0)
    calibrator = VecInferCalibrator(n_layers, **options)
    for layer in range(n_layers):
        q, k, v = (mx.array(rng.standard_normal((1, h, n_tokens, 16)).astype(np.float32)) for h in (4, 2, 2))
        calibrator.observe(layer, q, k, v, 0.25)
    return calibrator


def arrays_of(made):
    names = ("centroids", "scales", "codebook_of", "smooth", "mean")
    return [np.array(getattr(stream, name)) for stream in (made.keys, made.values) for name in names]


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture(scope="module")
def windows():
    rng = np.random.default_rng(1)
    return rng.integers(3, 250, (4, 96)).tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, model, windows):
    path = tmp_path_factory.mktemp("codebooks") / "tiny.safetensors"
    save_codebooks(path, "vecinfer2", observe(model, windows).train("vecinfer2"), fingerprint_of(model))
    return path


@pytest.mark.parametrize("bits", BITS)
def test_codebooks_of_every_format_fit_the_model(bits):
    made = observed(n_tokens=100).train(f"vecinfer{bits}", n_codebooks=4)
    keys, values = {"1": (8, 8), "1.5": (8, 8), "2": (4, 4), "3": (2, 4), "4": (2, 2)}[bits]
    code_bits = 12 if bits == "1.5" else 8
    for stream, sub_dim in ((made.keys, keys), (made.values, values)):
        assert np.array(stream.codes).tolist() == [[sub_dim, code_bits]] * 4
        assert stream.centroids.shape == (4 * sub_dim << code_bits,)
    assert made.keys.smooth.shape == made.values.mean.shape == (2, 2, 16)
    assert made.keys.rotation.shape == (2, 2, 16, 16) and made.values.rotation is None
    assert np.array(made.keys.codebook_of).tolist() == [[0, 1], [2, 3]]
    assert len(made.key_errors) == 2 and all(0 <= error < 0.5 for error in made.key_errors + made.value_errors)


def test_training_repeats_with_the_seed_whatever_the_order_of_progress():
    seen = []
    first = observed(seed=3).train("vecinfer2", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (8 * 3 + 8, 8 * 3 + 8) and seen == sorted(seen)
    assert all(np.array_equal(a, b) for a, b in zip(arrays_of(first), arrays_of(observed(seed=3).train("vecinfer2"))))
    other = observed(seed=4).train("vecinfer2")
    assert not np.array_equal(np.array(first.keys.centroids), np.array(other.keys.centroids))


def test_what_progress_raises_ends_the_training():
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observed().train("vecinfer2", progress=stop)


def test_means_are_taken_off_and_heads_scaled_to_one():
    rng = np.random.default_rng(2)
    scale, mean = np.array([100.0] + [0.1] * 15), np.arange(16.0)
    keys = (rng.standard_normal((1, 1, 4000, 16)) * scale + mean).astype(np.float32)
    calibrator = VecInferCalibrator(1, sink=0)
    calibrator.observe(0, mx.array(keys * 0), mx.array(keys), mx.array(keys), 1.0)
    made = calibrator.train("vecinfer2")
    for stream in (made.keys, made.values):
        assert (np.abs(np.array(stream.mean)[0, 0] - keys[0, 0].mean(0)) < 0.1 * scale).all()
        coded = (keys[0, 0] - np.array(stream.mean)[0, 0]) / np.array(stream.smooth)[0, 0]
        assert (coded**2).mean() == pytest.approx(1, rel=0.15)

def test_channels_of_keys_that_queries_ask_for_are_coded_finely():
    rng = np.random.default_rng(5)
    queries, keys, values = (rng.standard_normal((1, 1, 400, 16)).astype(np.float32) for _ in range(3))
    queries[..., 3] *= 8
    calibrator = VecInferCalibrator(1, sink=0, window=16)
    calibrator.observe(0, *(mx.array(x) for x in (queries, keys, values)), 0.25)
    smooth = np.array(calibrator.train("vecinfer2").keys.smooth)[0, 0]
    assert 5 * smooth[3] < np.delete(smooth, 3).min()


def test_what_is_coded_of_keys_is_shared_out_among_sub_vectors():
    """Keys that vary in two directions only: each sub-vector gets as much of them."""
    rng = np.random.default_rng(6)
    wide = rng.standard_normal((1, 1, 2000, 2)) @ np.linalg.qr(rng.standard_normal((16, 2)))[0].T * 10
    keys = (wide + 0.1 * rng.standard_normal((1, 1, 2000, 16))).astype(np.float32)
    calibrator = VecInferCalibrator(1, sink=0)
    calibrator.observe(0, mx.array(keys * 0), mx.array(keys), mx.array(keys), 1.0)
    made = calibrator.train("vecinfer2", n_codebooks=1).keys
    rows = np.linalg.qr(np.array(made.rotation)[0, 0].astype(float).T)[0].T
    energy = (((keys[0, 0] - np.array(made.mean)[0, 0]) @ rows.T) ** 2).mean(0).reshape(4, 4).sum(1)
    assert np.abs(energy / energy.sum() - 0.25).max() < 0.05


def bits_of(stream):
    sub_dim, code_bits = np.array(stream.codes)[np.array(stream.codebook_of)[:, 0]].T
    return code_bits / sub_dim


def test_layers_whose_errors_cost_more_get_more_bits():
    rng = np.random.default_rng(7)
    calibrator = VecInferCalibrator(4, sink=0, window=16)
    for layer in range(4):
        q, k, v = (mx.array(rng.standard_normal((1, h, 300, 16)).astype(np.float32)) for h in (4, 2, 2))
        calibrator.observe(layer, q, k, v, 0.25)
        calibrator.observe_gradients(layer, mx.full((1, 4, 300, 16), 100.0 if layer == 2 else 1.0))
    made = calibrator.train("vecinfer2")
    for stream in (made.keys, made.values):
        bits = bits_of(stream)
        assert bits[2] == 4 and bits[[0, 1, 3]].max() <= 2
    assert np.concatenate([bits_of(made.keys), bits_of(made.values)]).mean() <= 2
    even = calibrator.train("vecinfer2", n_codebooks=8)
    assert set(bits_of(even.keys)) == set(bits_of(even.values)) == {2}
    for layer, gradients, words in ((4, mx.ones((2,)), "layer"), (0, mx.array([float("nan")]), "finite")):
        with pytest.raises(ValueError, match=words):
            calibrator.observe_gradients(layer, gradients)


def test_nothing_is_learnt_from_the_sink():
    rng = np.random.default_rng(3)
    tokens = mx.array(rng.standard_normal((1, 1, 64, 16)).astype(np.float32))
    loud = mx.concatenate([tokens[:, :, :8] * 1000, tokens[:, :, 8:]], axis=2)
    made = []
    for rows in (tokens, loud):
        calibrator = VecInferCalibrator(1, sink=8)
        calibrator.observe(0, rows * 0, rows, rows, 1.0)
        made.append(arrays_of(calibrator.train("vecinfer2")))
    assert all(np.array_equal(a, b) for a, b in zip(*made))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"n_layers": 0}, "n_layers must be at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"sink": -1}, "sink"),
        ({"window": -1}, "window"),
    ],
)
def test_wrong_options_of_a_calibrator_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        VecInferCalibrator(**({"n_layers": 1} | options))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"format": "int4"}, "vecinfer1.5"),
        ({"format": "vecinfer5"}, "vecinfer5"),
        ({"n_codebooks": -1}, "n_codebooks"),
        ({"n_restarts": 0}, "n_restarts"),
        ({"n_iterations": 0}, "n_iterations must be at least 1, got 0"),
    ],
)
def test_wrong_options_of_training_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        observed(n_tokens=20).train(**({"format": "vecinfer2"} | options))


def test_what_gets_attention_counts():
    """Half of the tokens get all attention of later queries: they are coded better than the others."""
    rng = np.random.default_rng(4)
    n = 600
    loved = np.arange(n) % 2 == 0
    keys, values = (rng.standard_normal((1, 1, n, 16)).astype(np.float32) for _ in range(2))
    keys[..., 0] = np.where(loved, 8, -8)
    values[0, 0, loved] += 5
    queries = np.zeros_like(keys)
    queries[..., 0] = 8
    calibrator = VecInferCalibrator(1, sink=0, window=16)
    calibrator.observe(0, *(mx.array(x) for x in (queries, keys, values)), 1.0)
    mean = np.array(calibrator.train("vecinfer2").values.mean)[0, 0]
    assert np.abs(mean - values[0, 0, loved].mean(0)).max() < 0.5


def test_keys_are_scaled_towards_their_energy():
    made = observed(n_tokens=2000, n_layers=1, window=0, sink=0).train("vecinfer2", n_codebooks=2)
    rng = np.random.default_rng(0)
    keys = [rng.standard_normal((1, h, 2000, 16)).astype(np.float32) for h in (4, 2, 2)][1]
    for head in range(2):
        smooth, mean = np.array(made.keys.smooth)[0, head], np.array(made.keys.mean)[0, head]
        turn = np.linalg.qr(np.array(made.keys.rotation)[0, head].astype(float).T)  # rows in turn, but for signs
        x = ((keys[0, head] - mean) / smooth @ (turn[0] * np.sign(np.diag(turn[1])))).reshape(-1, 4)
        book = np.array(made.keys.centroids).reshape(2, 256, 4)[head].astype(np.float32) * np.array(made.keys.scales)[head]
        coded = book[((x[:, None] - book[None]) ** 2).sum(-1).argmin(-1)]
        assert 0.89 < (coded**2).mean() / (x**2).mean() < 1.03
        assert (coded * x).mean() / (coded**2).mean() < 0.99  # unscaled centroids are means: 1


def test_what_cannot_be_observed_is_named_and_leaves_no_trace():
    x = mx.ones((1, 2, 20, 16))
    calibrator = VecInferCalibrator(1)
    for arguments, words in (
        ((1, x, x, x), "layer must be 0 to 0, got 1"),
        ((0, x, x[..., :12], x), "multiple of 8"),
        ((0, x, x, x[:, :1]), "values must be of the keys' shape"),
        ((0, mx.ones((1, 3, 20, 16)), x, x), "queries"),
        ((0, x, x * float("nan"), x), "finite"),
        ((0, x, x, x * 1e6), "fp16"),
    ):
        with pytest.raises(ValueError, match=words):
            calibrator.observe(*arguments, 1.0)
    with pytest.raises(ValueError, match="scale must be finite"):
        calibrator.observe(0, x, x, x, float("inf"))
    with pytest.raises(RuntimeError, match="layer 0 has seen no token"):
        calibrator.train("vecinfer2")
    calibrator.observe(0, x[:, :, :16], x[:, :, :16], x[:, :, :16], 1.0)  # the sink alone
    with pytest.raises(RuntimeError, match="first 16"):
        calibrator.train("vecinfer2")


def test_a_set_is_read_as_it_was_written(saved, model):
    codebooks = load_codebooks(saved, model)
    assert (codebooks.format, codebooks.n_layers, codebooks.n_kv_heads, codebooks.head_dim) == ("vecinfer2", 2, 2, 16)
    assert read_file(saved)[1].difference(fingerprint_of(model)) is None
    assert list(saved.parent.iterdir()) == [saved]


def test_calibration_repeats_to_the_byte(saved, model, windows, tmp_path):
    again = tmp_path / "again.safetensors"
    save_codebooks(again, "vecinfer2", observe(model, windows).train("vecinfer2"), fingerprint_of(model))
    assert load_codebooks(again).identity == load_codebooks(saved).identity


def test_gradients_of_long_pieces_do_not_keep_the_scores_of_all_layers():
    layers, heads, tokens = 8, 4, 2048
    model = random_model(num_hidden_layers=layers, num_attention_heads=heads)
    piece = np.random.default_rng(2).integers(3, 250, tokens).tolist()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    observe(model, [piece])
    assert mx.get_peak_memory() - before < layers * heads * tokens**2 * 4


def test_positions_that_pieces_are_spread_over_are_coded_well(tmp_path):
    """Slow channels of RoPE turn keys' common part to where pieces of 128 tokens that begin at 0 never saw it."""
    model = random_model()
    embedding = model.model.embed_tokens
    embedding.weight = embedding.weight + 8 * mx.abs(embedding.weight).mean()
    for layer in model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight = projection.weight * 4
    rng = np.random.default_rng(1)
    pieces = rng.integers(3, 250, (8, 128)).tolist()
    tokens = mx.array(rng.integers(3, 250, 2000))[None]

    def log_probabilities(caches):
        with install():
            steps = [model(tokens[:, first : first + 100], cache=caches) for first in range(0, 2000, 100)]
        logits = mx.concatenate(steps, axis=1)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    raw = log_probabilities(make_prompt_cache(model, format="raw"))
    divergences = []
    for context in (0, 2000):
        path = tmp_path / f"{context}.safetensors"
        made = observe(model, pieces, context=context).train("vecinfer4")
        save_codebooks(path, "vecinfer4", made, fingerprint_of(model))
        coded = log_probabilities(make_prompt_cache(model, format="vecinfer4", window=16, sink=0, codebooks=path))
        divergences.append((mx.exp(raw) * (raw - coded)).sum(-1)[0, 1000:].mean().item())
    assert 2 * divergences[1] < divergences[0]


@pytest.mark.parametrize("context", [1, 64, 65, 512, 8192, 131072])
def test_so_many_pieces_leave_no_gaps(context):
    n_pieces = pieces_without_gaps(64, context)
    assert 1 <= n_pieces <= 97
    offsets = offsets_of([[0] * 64] * n_pieces, context)
    assert all(0 <= after - before <= max(64, context / 32) for before, after in zip(offsets, offsets[1:]))
    assert offsets[0] == 0 and offsets[-1] == max(0, context - 64)


@pytest.mark.parametrize(
    "n_pieces, context, offsets",
    [(3, 0, [0, 0, 0]), (1, 500, [0]), (3, 96, [0, 0, 0]), (3, 50, [0, 0, 0]), (4, 1000, [0, 33, 267, 904])],
)
def test_pieces_begin_at_positions_spread_over_the_context(model, windows, n_pieces, context, offsets, monkeypatch):
    seen = []
    attention = type(model.layers[0].self_attn)
    called = attention.__call__

    def watched(self, x, mask=None, cache=None):
        seen.append(cache.offset)
        return called(self, x, mask, cache)

    monkeypatch.setattr(attention, "__call__", watched)
    observe(model, (windows * n_pieces)[:n_pieces], context=context)
    assert sorted(set(seen)) == sorted(set(offsets)) and seen[-2:] == [offsets[-1]] * 2


def rewritten(saved, tmp_path, arrays=None, metadata=None):
    """A copy with other arrays and metadata; None for a value drops the entry."""
    old_arrays, old_metadata = mx.load(str(saved), return_metadata=True)
    arrays = {k: v for k, v in {**old_arrays, **(arrays or {})}.items() if v is not None}
    metadata = {k: v for k, v in {**old_metadata, **(metadata or {})}.items() if v is not None}
    path = tmp_path / "changed.safetensors"
    mx.save_safetensors(str(path), arrays, metadata)
    return path


@pytest.mark.parametrize(
    "arrays, metadata, words",
    [
        ({}, {"kvpool": None}, "no file of codebooks"),
        ({}, {"kvpool": "3"}, "version 3, this kvpool reads versions 1 and 2"),
        ({}, {"kvpool": "1"}, "keys.centroids must be"),
        ({}, {"format": "vecinfer1"}, "vecinfer1 has 1.0"),
        ({}, {"format": "int4"}, "int4"),
        ({}, {"architecture": "[]"}, "architecture"),
        ({}, {"architecture": None}, "architecture"),
        ({}, {"keys.hadamard": "yes"}, "keys.hadamard must be 0 or 1, got 'yes'"),
        ({"keys.smooth": None}, {}, "keys.smooth is missing"),
        ({"sketch": None}, {}, "sketch is missing"),
        ({"sketch": mx.zeros((3, 8))}, {}, "sketch must be"),
        ({"sketch": mx.full((2, 8), float("nan"))}, {}, "sketch must be finite"),
        ({"values.scales": mx.ones((4,), mx.float16)}, {}, "values.scales must be"),
        ({"values.scales": mx.ones((3,))}, {}, "values"),
        ({"values.scales": mx.zeros((4,))}, {}, "above 0"),
        ({"keys.mean": mx.full((2, 2, 16), float("inf"))}, {}, "mean must be finite"),
        ({"keys.smooth": mx.zeros((2, 2, 16))}, {}, "smooth must be finite and above 0"),
        ({"keys.codebook_of": mx.full((2, 2), 4, mx.int32)}, {}, "codebook_of must be 0 to 3"),
        ({"keys.centroids": mx.zeros((100,), mx.int8)}, {}, "keys: centroids must be"),
        ({"keys.codes": mx.full((4, 2), 9, mx.int32)}, {}, "9 bits of 9"),
        ({"keys.rotation": mx.zeros((2, 2, 16, 16), mx.int8)}, {}, "row 0 depends"),
        ({"keys.rotation": mx.zeros((2, 2, 16), mx.int8)}, {}, "keys.rotation must be"),
    ],
)
def test_a_corrupted_field_is_named(saved, tmp_path, arrays, metadata, words):
    path = rewritten(saved, tmp_path, arrays, metadata)
    with pytest.raises(ValueError, match=words) as error:
        load_codebooks(path)
    assert str(path) in str(error.value)


def test_files_of_version_1_are_read(saved, tmp_path):
    """They had centroids (n_codebooks, n_codes, channels) and no rotation."""
    old = {f"{name}.centroids": mx.ones((4, 256, 4), mx.int8) for name in ("keys", "values")}
    old |= {f"{name}.codes": None for name in ("keys", "values")} | {"keys.rotation": None}
    codebooks = load_codebooks(rewritten(saved, tmp_path, old, {"kvpool": "1"}))
    assert (codebooks.format, codebooks.average_bits, codebooks.head_dim) == ("vecinfer2", 2, 16)


def test_a_cut_file_and_no_file_are_refused(saved, tmp_path):
    cut = tmp_path / "cut.safetensors"
    for n_bytes in (0, 7, 100, saved.stat().st_size - 1):
        cut.write_bytes(saved.read_bytes()[:n_bytes])
        with pytest.raises(ValueError, match="cut.safetensors"):
            load_codebooks(cut)
    with pytest.raises(FileNotFoundError):
        load_codebooks(tmp_path / "none")


def in_dtype(model, dtype):
    copy = random_model()
    copy.update(tree_map(lambda x: x.astype(dtype), model.parameters()))
    return copy


def test_the_same_weights_match_in_any_type_and_others_do_not(model):
    mine = fingerprint_of(model)
    assert mine.difference(fingerprint_of(in_dtype(model, mx.bfloat16))) is None
    assert mine.difference(fingerprint_of(in_dtype(model, mx.float16))) is None
    quantised = random_model()
    nn.quantize(quantised, group_size=32, bits=8)
    assert mine.difference(fingerprint_of(quantised)) is None
    assert "other weights" in mine.difference(fingerprint_of(random_model(seed=1)))
    assert mine.difference(fingerprint_of(random_model(rope_theta=5000.0))) == "rope_theta is 5000, not 10000"
    assert "num_hidden_layers" in mine.difference(fingerprint_of(random_model(num_hidden_layers=3)))


def test_the_default_model_matches_itself_quantised(default_model):
    model, _, _ = default_model
    mine = fingerprint_of(model)
    layers = [layer.self_attn.k_proj for layer in model.layers]
    for bits in (8, 4):
        sketches = []
        for layer in layers:
            packed = mx.quantize(layer.weight, group_size=64, bits=bits)
            sketches.append(weight_sketch(mx.dequantize(*packed, group_size=64, bits=bits), 8))
        apart = mx.linalg.norm(mx.stack(sketches) - mine.sketch) / mx.linalg.norm(mine.sketch)
        assert apart.item() < {8: 0.02, 4: 0.2}[bits]
    half = mx.stack([weight_sketch(layer.weight.astype(mx.bfloat16), 8) for layer in layers])
    assert (mx.linalg.norm(half - mine.sketch) / mx.linalg.norm(mine.sketch)).item() < 0.01
    mx.random.seed(0)
    other = mx.stack([weight_sketch(layer.weight[mx.random.permutation(192)], 8) for layer in layers])
    assert (mx.linalg.norm(other - mine.sketch) / mx.linalg.norm(mine.sketch)).item() > 0.8


@pytest.mark.parametrize("bits", BITS)
def test_the_default_models_sets_are_found(default_model, bits):
    model, _, _ = default_model
    codebooks = find_codebooks(model, f"vecinfer{bits}")
    assert (codebooks.format, codebooks.n_layers, codebooks.head_dim) == (f"vecinfer{bits}", 30, 64)
    assert find_codebooks(model, f"vecinfer{bits}") is codebooks


def test_a_state_coded_with_a_shipped_set_is_restored_without_it(default_model, tmp_path):
    """In a process that has loaded no codebooks."""
    model, _, _ = default_model
    caches = make_prompt_cache(model, format="vecinfer2", window=0, sink=0)[:1]
    keys = mx.random.normal((1, 3, 96, 64))
    for part in (keys[:, :, :64], keys[:, :, 64:]):
        caches[0].update_and_fetch(part, part)
    file = tmp_path / "prompt.safetensors"
    save_prompt_cache(str(file), caches)
    want = np.array(caches[0].update_and_fetch(keys[:, :, :1], keys[:, :, :1])[0])
    script = (
        "import sys, kvpool, numpy as np, mlx.core as mx; from mlx_lm.models.cache import load_prompt_cache; "
        "cache = load_prompt_cache(sys.argv[1])[0]; key = mx.array(np.load(sys.argv[2])); "
        "np.save(sys.argv[2], np.array(cache.update_and_fetch(key, key)[0]))"
    )
    np.save(tmp_path / "key.npy", np.array(keys[:, :, :1]))
    subprocess.run([sys.executable, "-c", script, file, tmp_path / "key.npy"], check=True)
    assert np.array_equal(np.load(tmp_path / "key.npy"), want)


def test_a_model_without_a_set_is_told_how_to_make_one(model):
    with pytest.raises(ValueError, match="kvpool calibrate MODEL --text FILE --bits 1.5 -o FILE"):
        find_codebooks(model, "vecinfer1.5")
    with pytest.raises(ValueError, match="kvpool calibrate"):
        make_prompt_cache(model, format="vecinfer2")


def test_a_set_of_another_model_is_refused(saved):
    with pytest.raises(ValueError, match="another model: of this one num_attention_heads is 8, not 4"):
        make_prompt_cache(random_model(num_attention_heads=8, head_dim=16), format="vecinfer2", codebooks=saved)
    with pytest.raises(ValueError, match="codebooks are of vecinfer2, but the format is vecinfer3"):
        make_prompt_cache(random_model(), format="vecinfer3", codebooks=saved)


def test_caches_take_a_path_or_a_set(saved, model, windows):
    loaded = load_codebooks(saved)
    tokens = mx.array(windows[0])[None]
    logits = []
    for codebooks in (saved, str(saved), loaded, {"vecinfer2": loaded}):
        caches = make_prompt_cache(model, format="vecinfer2", window=16, sink=0, codebooks=codebooks)
        assert [cache.config.layer for cache in caches] == [0, 1]
        with install():
            model(tokens[:, :64], cache=caches)
            logits.append(np.array(model(tokens[:, 64:], cache=caches)))
    assert all(np.array_equal(logits[0], other) for other in logits[1:])
    with install():
        raw = make_prompt_cache(model)
        model(tokens[:, :64], cache=raw)
        exact = np.array(model(tokens[:, 64:], cache=raw))
    assert 0 < np.abs(exact - logits[0]).max() < 0.5 * np.abs(exact).max()


def test_attach_looks_for_codebooks_once(saved, model):
    attached = attach(random_model(), format=("vecinfer2", "int4"), codebooks=saved)
    first, second = attached.make_cache(), attached.make_cache()
    assert first[0].config.codebooks is not None and first[0].config == second[0].config


def test_calibrate_writes_a_set_that_loads(tmp_path, model):
    gguf = write_gguf(tmp_path / "tiny.gguf", model)
    text, out = tmp_path / "text.txt", tmp_path / "out.safetensors"
    text.write_text("hello world, hello wide world. " * 40)
    run = ["calibrate", gguf, "--text", text, "--tokens", 256, "--window", 64]
    code, said, err = kvpool(*run, "-o", out)
    assert code == 0, err
    assert load_codebooks(out, model).format == "vecinfer2"
    for words in (str(out), "KiB", "layers", "K error", "V error"):
        assert words in said
    assert "positions up to 512\n" in err and "gaps between them that --tokens 1408 would fill" in err
    code, said, err = kvpool(*run, "--context", 100, "-o", tmp_path / "short.safetensors")
    assert code == 0 and "positions up to 100\n" in err and "gaps" not in err
    assert load_codebooks(tmp_path / "short.safetensors").identity != load_codebooks(out).identity
    several = tmp_path / "several.{bits}.safetensors"
    one, two = (str(several).replace("{bits}", bits) for bits in "12")
    for options in ({"KVPOOL_THREADS": "1"}, {"KVPOOL_THREADS": "3"}, {"KVPOOL_KERNELS": "scalar"}):
        code, said, err = kvpool(*run, "--bits", "2", "--bits", "1", "-o", several, env=os.environ | options)
        assert code == 0, err
        assert one in said and load_codebooks(one).format == "vecinfer1"
        assert load_codebooks(two).identity == load_codebooks(out).identity  # the same seed, the same bits


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--bits", "5"], "--bits"),
        (["--tokens", "1"], "--tokens"),
        (["--window", "1"], "--window"),
        (["--sink", "64"], "--sink"),
        (["--context", "-1"], "--context"),
        (["--seed", "-1"], "--seed"),
        (["--restarts", "0"], "--restarts"),
        (["--text", "no such file"], "No such file"),
        (["-o", "/no/such/folder/out"], "folder"),
        (["--tokens", "100000", "--window", "4096"], "need 4096"),
        (["--bits", "1", "--bits", "2"], "{bits}"),
    ],
)
def test_wrong_options_of_calibrate_are_named(tmp_path, model, arguments, words):
    gguf = write_gguf(tmp_path / "tiny.gguf", model)
    text, out = tmp_path / "text.txt", tmp_path / "out.safetensors"
    text.write_text("hello world, hello wide world. " * 40)
    code, said, err = kvpool("calibrate", gguf, "--text", text, "--window", 64, "-o", out, *arguments)
    assert code == 2 and said == "" and words in err and not out.exists()


def test_a_stream_keeps_what_it_is_given():
    made = observed(n_tokens=50).train("vecinfer2")
    names = ("codes", "centroids", "scales", "codebook_of", "smooth", "mean", "rotation")
    copy = VecInferStream(*(getattr(made.keys, name) for name in names))
    assert all(mx.array_equal(getattr(copy, name), getattr(made.keys, name)) for name in names) and copy.hadamard
