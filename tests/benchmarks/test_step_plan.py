"""What docs/scaling.md says of the plan of a step is what its code prints and draws."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import step_plan as benchmark
from seqpar.step_plan import main, step_plan

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


def test_the_page_has_what_the_command_prints(capsys):
    command, said = re.search(r"\$ python -m seqpar\.step_plan (.*)\n((?:.*\n)*?)```", PAGE).groups()
    main(shlex.split(command))
    assert capsys.readouterr().out == said


def test_without_interleaving_the_pipeline_is_as_slow_as_the_page_says():
    run = benchmark.PUBLISHED[1]
    alone = run._replace(training=replace(run.training, interleave=1))
    rate = benchmark.rate(alone)
    said = [step_plan(alone.training, rate, n, "pipeline").tokens_per_second / run.per_unit for n in (2304, 4608)]
    assert "without interleaving the plan predicts {:.0f}% and {:.0f}%".format(*said) in " ".join(PAGE.split())
