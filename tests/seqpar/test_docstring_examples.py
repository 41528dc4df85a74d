"""Every public name has an example in its docstring that runs and prints what it says."""

import doctest
import re
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqpar
from seqpar.testing.forks import autograd_works_in_a_fork

PAGE = Path(__file__).parents[2] / "docs" / "api" / "integrations.md"
SHOWN = re.findall(r"automodule:: (\S+)\n +:members:(.*)", PAGE.read_text())
"""The modules of the page, and the names that it shows of each."""
NAMES = [f"{p}.{n}" for p in ("seqpar", "seqpar.objectives", "seqpar.testing") for n in import_module(p).__all__]
MODULES = [import_module(f"seqpar.{m}") for m in ("memory_plan", "testing.ranks", "testing.strategies")]
MODULES += [import_module(f"planning.{m}") for m in ("step_plan", "__main__")]
NO_EXAMPLE = {"main", "close_all"}
"""A command, which the pages show, and what a process calls at its end."""
NAMES += [
    f"{module.__name__}.{name}"
    for module in MODULES
    for name, member in vars(module).items()
    if isfunction(member) or (isclass(member) and not issubclass(member, (Exception, dict)))
    if member.__module__ == module.__name__ and not name.startswith("_") and name not in NO_EXAMPLE
]
INTEGRATIONS = [f"{module}.{name}" for module, names in SHOWN for name in names.strip().split(", ")]
ASSUMED = {"torch": torch, "nn": nn, "F": F, "seqpar": seqpar}
"""What the pages in docs/api say that the examples assume."""
GIVEN = {
    "seqpar.integrations.transformers.SeqparLoss": "for_a_trainer",
    "seqpar.integrations.trl.SeqparScores": "for_sft",
    "seqpar.integrations.trl.apply_seqpar_scores": "for_dpo",
    "seqpar.integrations.trl.AppliedScores": "for_sft",
    "seqpar.integrations.trl.allow_head_adapter": "for_sft",
    "seqpar.integrations.trl_distillation.AppliedDistillation": "for_distillation",
    "seqpar.integrations.accumulate.accumulate_step": "no_accelerator",
    "seqpar.integrations.opennmt.apply_seqpar_loss": "opennmt_trainer",
}
"""The fixtures of examples that begin inside another project's training."""


def what_a_trl_trainer_takes(config_class, kind, folder, **options):
    from tests.seqpar.integrations.tiny_models import tiny
    from tests.seqpar.integrations.trainer_runs import ONE_STEP
    from tests.seqpar.integrations.trl_runs import examples, words

    options |= {"per_device_train_batch_size": 2, "bf16": False, "gradient_checkpointing": False}
    model, reference = (tiny("llama", torch.float32, bos_token_id=2, eos_token_id=3) for _ in range(2))
    return {
        "model": model,
        "reference": reference,
        "arguments": config_class(str(folder), **options, **ONE_STEP),
        "dataset": examples(kind, 2),
        "tokenizer": words(),
    }


@pytest.fixture
def silent(monkeypatch):
    """A Trainer without a progress bar prints its logs, whose times differ."""
    from transformers import PrinterCallback

    monkeypatch.setattr(PrinterCallback, "on_log", lambda *args, **keywords: None)


def of_trl(kind, config, **options):
    """A fixture of what a TRL trainer takes that learns from examples of this kind."""

    @pytest.fixture
    def given(tmp_path, silent):
        import trl

        return what_a_trl_trainer_takes(getattr(trl, config), kind, tmp_path, **options)

    return given


for_dpo, for_sft = of_trl("dpo", "DPOConfig"), of_trl("sft", "SFTConfig")
for_distillation = of_trl("distillation", "DistillationConfig", max_completion_length=5)


@pytest.fixture
def for_a_trainer(tmp_path, silent):
    from transformers import TrainingArguments

    from tests.seqpar.integrations.tiny_models import tiny
    from tests.seqpar.integrations.trainer_runs import ONE_STEP, collated, sentences

    model = tiny("llama", torch.float32)
    arguments = TrainingArguments(str(tmp_path), remove_unused_columns=False, **ONE_STEP)
    dataset = sentences(model, 2)
    return {"model": model, "arguments": arguments, "dataset": dataset, "collate": lambda rows: collated(model, rows)}


@pytest.fixture
def no_accelerator():
    """Earlier tests of this process may have made one with other settings."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    return {}


@pytest.fixture
def opennmt_trainer():
    from tests.seqpar.integrations.test_opennmt import Trainer, batch_of

    return {"trainer": Trainer(), "batch": batch_of(0)}


def failures(docstring, name, given):
    """What doctest says of the examples of a docstring; AssertionError if there are none."""
    test = doctest.DocTestParser().get_doctest(docstring, ASSUMED | given, name, None, None)
    assert test.examples, f"the docstring of {name} has no example (>>>)"
    said = []
    torch.manual_seed(0)
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    return "".join(said)


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_public_name_prints_what_it_says(name):
    if name == "seqpar.testing.assert_same_step" and not autograd_works_in_a_fork():
        # As after torch.compile in a build for CUDA; and the example's functions are in no module, for a new process
        pytest.skip("needs a fork that can run autograd")
    module, _, attribute = name.rpartition(".")
    said = failures(getattr(import_module(module), attribute).__doc__, name, {})
    assert not said, said


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", INTEGRATIONS)
def test_the_example_of_an_integration_prints_what_it_says(name, request):
    module, _, attribute = name.rpartition(".")
    try:
        documented = getattr(import_module(module), attribute)
    except ModuleNotFoundError as missing:
        if missing.name.startswith("seqpar"):
            raise
        pytest.skip(f"needs {missing.name}")
    given = request.getfixturevalue(GIVEN[name]) if name in GIVEN else {}
    said = failures(documented.__doc__, name, given)
    assert not said, said
