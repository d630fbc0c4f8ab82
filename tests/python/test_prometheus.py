"""P12 of shared/faults.md: whatever a pool is called, a Prometheus parser reads the page."""

from __future__ import annotations

import math
import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvpool import AllocationStats, BlockPoolAllocator, PoolConfig, render_prometheus
from prometheus_client.parser import text_string_to_metric_families

METRICS = {
    "blocks_in_use": ("gauge", lambda s: s.blocks_in_use()),
    "blocks_total": ("gauge", lambda s: s.n_blocks),
    "fragmentation": ("gauge", lambda s: s.fragmentation()),
    "peak_blocks_in_use": ("gauge", lambda s: s.peak_blocks_in_use),
    "allocations_total": ("counter", lambda s: s.n_allocations),
    "frees_total": ("counter", lambda s: s.n_frees),
    "reused_total": ("counter", lambda s: s.n_reused),
    "exhausted_total": ("counter", lambda s: s.n_exhausted),
    "grown_total": ("counter", lambda s: s.n_grown),
    "retired_total": ("counter", lambda s: s.n_retired),
}
NASTY = [
    'a"b\\c\nd',
    "",
    " ",
    "\\",
    "\\n",
    '\\"',
    '"} 1\nkvpool_block_pool_blocks_total{pool="forged"} 99',
    "# HELP a b",
    "/models/LLaMA 3 {q4}, v=1.gguf",
    "模型 🧠 é\u2028\u0085\r\t\x00\x7f",
]

counts = st.integers(0, 10**15 - 1)
stats = st.builds(
    lambda n_frees, in_use, n_blocks, fragmented, rest: AllocationStats(
        n_blocks, n_frees + in_use, n_frees, *rest, _fragmented_count=min(fragmented, n_blocks)
    ),
    st.integers(0, 10**12),
    st.integers(0, 10**12),
    counts,
    counts,
    st.tuples(counts, counts, counts, counts, counts),
)
names = st.text(st.characters(codec="utf-8")) | st.text('"\\\n{},= #n')
prefixes = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]*", fullmatch=True)


def parse(page, prefix):
    """{metric: {labels: value}}; checks what holds for every page."""
    lines = page.split("\n")
    assert page.endswith("\n") and lines.pop() == ""
    for metric, (kind, _) in METRICS.items():
        assert sum(line.startswith(f"# HELP {prefix}_{metric} ") for line in lines) == 1
        assert lines.count(f"# TYPE {prefix}_{metric} {kind}") == 1
    assert sum(line.startswith("#") for line in lines) == 2 * len(METRICS)
    read = {}
    for family in text_string_to_metric_families(page):
        assert family.documentation
        for sample in family.samples:
            metric = sample.name.removeprefix(f"{prefix}_")
            assert family.type == METRICS[metric][0]
            assert math.isfinite(sample.value)
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in read.setdefault(metric, {})
            read[metric][labels] = sample.value
    assert len(lines) == 2 * len(METRICS) + sum(len(samples) for samples in read.values())
    return read


def assert_reads_as(page, prefix, pools):
    """``pools`` is {labels: stats}."""
    read = parse(page, prefix)
    for metric, (_, value) in METRICS.items():
        samples = read.get(metric, {})
        assert samples.keys() == pools.keys()
        for labels, stats in pools.items():
            assert samples[labels] == pytest.approx(value(stats), rel=1e-14, abs=0), metric


def used_pool(n_blocks):
    pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=n_blocks))
    pool.allocate("k", 40, 1)
    pool.free(pool.allocate("v", 17, 2))
    pool.shrink("v", n_blocks // 2 - 1)
    with pytest.raises(RuntimeError):
        pool.allocate("k", 16 * n_blocks, 3)
    return pool


def test_one_pool_reads_as_its_stats():
    stats = used_pool(8).stats
    assert_reads_as(stats.to_prometheus(), "veloxquant_block_pool", {(): stats})
    assert "veloxquant_block_pool_fragmentation 0.142857142857143\n" in stats.to_prometheus()
    assert "\nveloxquant_block_pool_allocations_total 5\n" in stats.to_prometheus()
    assert stats.to_prometheus() == stats.snapshot().to_prometheus(prefix="veloxquant_block_pool")


def test_no_value_is_missing_or_not_finite_in_a_pool_of_nothing():
    stats = AllocationStats(0)
    read = parse(stats.to_prometheus("p"), "p")
    assert read == {metric: {(): 0.0} for metric in METRICS}


@settings(deadline=None)
@given(stats, prefixes)
def test_any_prefix_and_any_counts_read_back(stats, prefix):
    assert_reads_as(stats.to_prometheus(prefix), prefix, {(): stats})


@pytest.mark.parametrize("prefix", ["", "1a", "a-b", "a b", "a\n", "\na", "é", "aé", 'a"', "a{}", "a\x00", "a."])
def test_a_prefix_that_is_no_metric_name_is_refused(prefix):
    for render in (lambda: AllocationStats(1).to_prometheus(prefix), lambda: render_prometheus({}, prefix)):
        with pytest.raises(ValueError, match="prefix must match"):
            render()


@settings(deadline=None)
@given(st.characters(codec="utf-8").filter(lambda c: c not in string.ascii_letters + string.digits + "_:"))
def test_a_prefix_with_any_other_character_is_refused(character):
    with pytest.raises(ValueError, match="prefix must match"):
        AllocationStats(1).to_prometheus(f"a{character}b")


def test_pools_of_nasty_names_share_one_page():
    pools = {name: used_pool(8 + 2 * index) for index, name in enumerate(NASTY)}
    page = render_prometheus({name: pool.stats for name, pool in pools.items()})
    assert_reads_as(page, "kvpool_block_pool", {(("pool", name),): pool.stats for name, pool in pools.items()})
    assert 'kvpool_block_pool_blocks_total{pool="a\\"b\\\\c\\nd"} 7\n' in page


@settings(deadline=None)
@given(st.dictionaries(names, stats, max_size=5), prefixes)
@example({name: AllocationStats(index + 1) for index, name in enumerate(NASTY)}, "p")
def test_pools_of_any_name_share_one_page(pools, prefix):
    page = render_prometheus(pools, prefix=prefix)
    assert_reads_as(page, prefix, {(("pool", name),): stats for name, stats in pools.items()})


def test_a_page_shows_the_pools_as_they_are_when_it_is_made():
    pool = BlockPoolAllocator(PoolConfig(n_blocks=8))
    pools = {"live": pool.stats, "then": pool.stats.snapshot()}
    pool.allocate("k", 40, 1)
    in_use = parse(render_prometheus(pools, "p"), "p")["blocks_in_use"]
    assert in_use == {(("pool", "live"),): 3.0, (("pool", "then"),): 0.0}


def test_a_name_that_utf8_cannot_spell_is_refused():
    with pytest.raises(TypeError, match="names in pools must be text"):
        render_prometheus({"\ud800": AllocationStats(1)})
