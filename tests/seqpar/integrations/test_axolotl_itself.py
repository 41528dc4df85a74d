"""axolotl's own plugin manager, configuration and trainer, with the plugin: gradients are those of one batch."""

import os
import tempfile
import warnings
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import PartialState
from datasets import Dataset
from transformers import TrainingArguments

from seqpar.integrations import say_once
from seqpar.testing.ranks import ranks
from tests.seqpar.integrations.tiny_models import gradients, relative_error, tiny
from tests.seqpar.integrations.trainer_runs import ONE_STEP, Gradients, forget_accelerate, take_cpus_for_accelerators
from tests.seqpar.integrations.trl_runs import Run, made

with warnings.catch_warnings(action="ignore"):
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.core.training_args_base import AxolotlTrainingMixins
    from axolotl.integrations.base import PluginManager
    from axolotl.integrations.config import merge_input_args
    from axolotl.logging_config import AxolotlOrWarnErrorFilter
    from axolotl.utils.dict import DictDefault

    from seqpar.integrations.axolotl import LOSSES, SeqparPlugin
    from seqpar.integrations.trl import apply_seqpar_scores

pytestmark = pytest.mark.filterwarnings("ignore")

NAME = "seqpar.integrations.axolotl.SeqparPlugin"
CONFIGURATION = {
    "base_model": "tiny",
    "datasets": [{"path": "none", "type": "alpaca"}],
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.1,
    "plugins": [NAME],
}


def registered():
    """axolotl's manager of plugins, with ours alone."""
    PluginManager._instance = None
    manager = PluginManager.get_instance()
    manager.register(NAME)
    assert isinstance(manager.plugins[NAME], SeqparPlugin)
    return manager


@pytest.fixture
def manager():
    return registered()


def test_the_options_are_part_of_the_configuration(manager):
    _, config_class = merge_input_args()
    assert config_class(**CONFIGURATION).seqpar_label_smoothing == 0
    options = {"seqpar_label_smoothing": 0.1, "seqpar_chunk_tokens": 4}
    config = config_class(**CONFIGURATION | options)
    assert (config.seqpar_label_smoothing, config.seqpar_chunk_tokens) == (0.1, 4)


@pytest.mark.parametrize("option", [{name: True} for name in LOSSES])
def test_a_second_loss_is_refused(manager, option):
    _, config_class = merge_input_args()
    with pytest.raises(ValueError, match=f"{next(iter(option))} replaces the loss, as the plugin"):
        config_class(**CONFIGURATION | option)


def test_smoothing_is_refused_where_an_objective_has_none(manager):
    _, config_class = merge_input_args()
    with pytest.raises(ValueError, match="seqpar_label_smoothing is for a cross-entropy; rl: dpo has none"):
        config_class(**CONFIGURATION | {"rl": "dpo", "seqpar_label_smoothing": 0.1})


@dataclass
class Arguments(AxolotlTrainingMixins, TrainingArguments):
    """As axolotl's own, which are in a file that needs an older TRL."""


def test_an_objective_gets_the_scores_and_leaves_the_models_loss(manager, tmp_path):
    trainer = made(Run("dpo", "stock"), str(tmp_path))
    options = DictDefault({"seqpar_chunk_tokens": 4, "rl": "dpo"})
    manager.post_trainer_create(options, trainer)
    with pytest.raises(ValueError, match="already"):
        apply_seqpar_scores(trainer)


def examples(count=4):
    g = torch.Generator().manual_seed(0)
    for index in range(count):
        tokens = torch.randint(2, 23, (9,), generator=g)
        labels = tokens.clone()
        labels[: 1 + index] = -100
        yield {"input_ids": tokens.tolist(), "labels": labels.tolist()}


def one_batch(smoothing, count=4):
    """The gradient of all sequences' logits."""
    batches, model = list(examples(count)), tiny("llama").double().train()
    tokens, labels = (torch.tensor([b[name] for b in batches]) for name in ("input_ids", "labels"))
    logits = model(tokens).logits[:, :-1]
    F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=smoothing).backward()
    return gradients(model)


FSDP2 = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    # axolotl forgets another state, and reads it again from the environment
    "accelerator_config": {"use_configured_state": True},
}


def stepped(rank, world, smoothing, layout=None):
    """The gradient of a step over four sequences a rank, two at a time; with the plugin if there is smoothing."""
    forget_accelerate()
    model, kept = tiny("llama").double().train(), Gradients()
    options = {"seqpar_label_smoothing": smoothing, "seqpar_chunk_tokens": 4, "rl": None}
    two = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "sample_packing": False}
    # As `accelerate launch --cpu` sets it
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"ACCELERATE_USE_CPU": "true"}):
        if layout:
            PartialState(cpu=True)
        arguments = Arguments(output_dir=folder, **ONE_STEP | two | (layout or {}))
        if layout:
            assert arguments.device.type == "cpu"
            take_cpus_for_accelerators()
        given = {"train_dataset": Dataset.from_list(list(examples(4 * world))), "callbacks": [kept]}
        trainer = AxolotlTrainer(model=model, args=arguments, **given)
        if smoothing:
            registered().post_trainer_create(DictDefault(options), trainer)
        trainer.train()
    return kept.seen


def test_a_step_of_the_trainer_has_the_gradient_of_the_whole_batch():
    assert relative_error(stepped(0, 1, 0.1), one_batch(0.1)) < 1e-12


@pytest.mark.parametrize("layout", [{}, FSDP2], ids=["ddp", "fsdp2"])
def test_on_two_ranks_it_is_that_of_the_whole_batch_too(layout):
    for found in ranks(2, stepped, 0.1, layout):
        assert relative_error(found, one_batch(0.1, count=8)) < 1e-12


def test_without_the_plugin_accumulation_is_a_mean_of_means():
    assert relative_error(stepped(0, 1, 0.0), one_batch(0.0)) > 0.05


def test_axolotls_log_shows_the_line_that_the_loss_is_ours(caplog, monkeypatch):
    monkeypatch.setattr(say_once, "_said", set())
    stepped(0, 1, 0.1)
    (record,) = (record for record in caplog.records if "seqpar computes the loss in axolotl" in record.getMessage())
    assert AxolotlOrWarnErrorFilter().filter(record)
