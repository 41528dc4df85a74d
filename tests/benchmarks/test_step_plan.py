"""What docs/scaling.md says of the plans of a step is what their code prints and draws, and what is timed runs."""

import importlib
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import step_plan as benchmark
from planning.links import Link
from planning.step_plan import pays_from, step_plan
from seqpar.testing.ranks import ranks

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "scaling.md").read_text()


@pytest.mark.parametrize("run", benchmark.PUBLISHED, ids=lambda run: run.name)
def test_published_trainings_are_predicted_within_a_tenth_from_their_smallest_size(run):
    rate = benchmark.rate(run)
    for devices, figure in run.measured.items():
        said = step_plan(run.training, rate, devices, run.layout).tokens_per_second / run.per_unit
        assert said == pytest.approx(figure, rel=1e-9 if devices == min(run.measured) else 0.1), devices


def test_the_page_has_the_table_that_the_benchmark_prints():
    assert benchmark.published_table() in PAGE


def test_the_page_has_the_picture_that_the_benchmark_draws(tmp_path):
    benchmark.draw(tmp_path / "scaling.svg")
    assert (tmp_path / "scaling.svg").read_text() == (ROOT / "docs" / "scaling.svg").read_text()


PRINTED = re.findall(r"\$ python -m (seqpar\.memory_plan|planning) (.*)\n((?:.*\n)*?)```", PAGE)
"""A plan's module, its arguments and what it says, for each command of the page."""


def test_the_page_has_the_tokens_from_which_two_devices_pay():
    rows = re.findall(r"\| (NVLink 4|PCIe \d) \| (\d+) \| ([\d,]+) \| ([\d,]+) \|", PAGE)
    assert len(rows) == 3
    for _, bandwidth, *said in rows:
        link = Link.of(0, float(bandwidth))
        for tokens, prefetch in zip(said, (False, True), strict=True):
            found = pays_from(700e12, link, prefetch=prefetch)
            assert int(tokens.replace(",", "")) == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize(("module", "arguments", "said"), PRINTED, ids=[module for module, _, _ in PRINTED])
def test_the_page_has_what_the_command_prints(module, arguments, said, capsys):
    main = importlib.import_module("planning.__main__" if module == "planning" else module).main
    main(shlex.split(arguments))
    assert capsys.readouterr().out == said


def test_without_interleaving_the_pipeline_is_as_slow_as_the_page_says():
    run = benchmark.PUBLISHED[1]
    alone = run._replace(training=replace(run.training, interleave=1))
    rate = benchmark.rate(alone)
    said = [step_plan(alone.training, rate, n, "pipeline").tokens_per_second / run.per_unit for n in (2304, 4608)]
    assert "without interleaving the plan predicts {:.0f}% and {:.0f}%".format(*said) in " ".join(PAGE.split())


@pytest.mark.parametrize("what", ["alone 2", "ddp 2", "fsdp 2", "vocab 4", *(f"{x} 4096" for x in benchmark.KINDS)])
def test_every_step_and_collective_that_is_timed_runs_in_two_ranks(what):
    sizes = benchmark.Sizes(width=16, layers=1, vocab=64, length=8)
    assert min(ranks(2, benchmark.timed, what, sizes)) > 0


def test_a_links_bandwidth_is_what_two_sizes_differ_by():
    small, large = benchmark.SMALL_BYTES, benchmark.LARGE_BYTES
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    delays = {"all_reduce": 0.5, "all_gather": 0.25, "reduce_scatter": 0.125}
    seconds = {f"{x} {n}": delays[x] + passes[x] * n * 3 / 4 / 100 for x in passes for n in (small, large)}
    link, starts = benchmark.links_of(seconds, 4)
    assert link.hop == 0
    for bandwidths in link[1:]:
        assert bandwidths == pytest.approx((100,))
    moved = small * 3 / 4 / 100
    # A sum is two passes; FSDP2 gathers twice for each time that it reduces
    assert starts["ddp"] == starts["vocab"] == pytest.approx(1e6 * (0.5 + 2 * moved))
    assert starts["fsdp"] == pytest.approx(1e6 * ((2 * 0.25 + 0.125) / 3 + moved))
