"""Every example runs as its first lines say, and what it trains gets better."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.examples.gallery import command_of, last_lines, output_on_page, runs_here, without_numbers
from tests.programs import output_of

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RECIPE = ROOT / "recipes" / "translation" / "__main__.py"
RUNNING = [path for path in EXAMPLES if runs_here(path)]
RISING = {"grpo": "reward", "minimum_risk": "chrF"}
"""Examples whose figure rises, and its name; those of the others are losses, and fall."""


@cache
def output_of_example(name: str) -> str:
    return output_of(command_of(ROOT / "examples" / f"{name}.py"))


def printed(example: Path, name: str) -> list[float]:
    """Run an example and return the figures that it prints after that name."""
    output = output_of_example(example.stem)
    on_page = output_on_page(example) or ""
    assert without_numbers(last_lines(output)) == without_numbers(on_page), "python -m tests.examples.gallery"
    figures = [float(found) for found in re.findall(rf"{name} (\d+\.\d+)", output)]
    assert len(figures) >= 2, output
    return figures


@pytest.mark.parametrize("example", [path for path in RUNNING if path.stem not in RISING], ids=lambda path: path.stem)
@pytest.mark.tutorial
def test_an_example_runs_as_it_says_and_its_loss_falls(example: Path) -> None:
    losses = printed(example, "loss")
    assert losses[-1] < 0.8 * losses[0], losses


@pytest.mark.parametrize("name", RISING)
@pytest.mark.tutorial
def test_an_example_runs_as_it_says_and_its_reward_or_quality_rises(name: str) -> None:
    figures = printed(ROOT / "examples" / f"{name}.py", RISING[name])
    assert figures[-1] > figures[0] + 1 or figures[-1] > 2 * figures[0], figures


@pytest.mark.tutorial
def test_time_steps_over_ranks_have_the_gradient_of_one_process() -> None:
    """At the first step and at the last; of two ranks as the example says, which each have two pieces."""
    apart = [float(each) for each in re.findall(r"one process's by (\S+)", output_of_example("sequence_split"))]
    assert len(apart) == 2
    assert max(apart) < 1e-12


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_sets_the_threads_of_the_cpu_as_the_recipe_does(example: Path) -> None:
    """The variable is read when torch is imported, so that it must be set before anything else is."""
    (setting,) = [line.strip() for line in RECIPE.read_text().splitlines() if "OMP_WAIT_POLICY" in line]
    statements = [ast.unparse(each) for each in ast.parse(example.read_text()).body]
    assert statements[1:3] == ["import os", ast.unparse(ast.parse(setting))]


@pytest.mark.parametrize(
    "page", [*EXAMPLES, *(ROOT / "docs").glob("*.md"), ROOT / "README.md"], ids=lambda path: path.stem
)
def test_nothing_to_copy_from_ends_in_a_line_that_several_ranks_refuse(page: Path) -> None:
    assert ".mean.backward()" not in page.read_text()


def test_there_is_an_example_for_each_way_to_use_it() -> None:
    assert {path.stem for path in EXAMPLES} == {
        "annotated_2018",
        "copy_generator",
        "ddp",
        "distillation",
        "dpo",
        "fairseq_criterion",
        "fsdp2",
        "grpo",
        "hf_fsdp2",
        "hf_trainer",
        "hf_translation_lora",
        "language_model",
        "lightning_module",
        "minimum_risk",
        "own_loop",
        "trl_sft_fsdp2",
        "ray_train",
        "sequence_split",
        "torchtitan_loss",
        "vocabulary_split",
    }
