"""axolotl's own plugin manager, configuration and trainer, with the plugin: gradients are those of one batch."""

import tempfile
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import TrainingArguments

from seqpar.integrations import say_once
from tests.seqpar.integrations.tiny_models import gradients, relative_error, tiny
from tests.seqpar.integrations.trainer_runs import ONE_STEP, Gradients
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


def examples():
    g = torch.Generator().manual_seed(0)
    for index in range(4):
        tokens = torch.randint(2, 23, (7,), generator=g)
        labels = tokens.clone()
        labels[: 1 + index] = -100
        yield {"input_ids": tokens.tolist(), "labels": labels.tolist()}


def one_batch(smoothing):
    """The gradient of all four sequences' logits."""
    batches, model = list(examples()), tiny("llama").double().train()
    tokens, labels = (torch.tensor([b[name] for b in batches]) for name in ("input_ids", "labels"))
    logits = model(tokens).logits[:, :-1]
    F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=smoothing).backward()
    return gradients(model)


def stepped(smoothing):
    """The gradient of a step over the four sequences, two at a time; with the plugin if there is smoothing."""
    model, kept = tiny("llama").double().train(), Gradients()
    options = {"seqpar_label_smoothing": smoothing, "seqpar_chunk_tokens": 4, "rl": None}
    two = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "sample_packing": False}
    with tempfile.TemporaryDirectory() as folder:
        arguments = Arguments(output_dir=folder, **ONE_STEP | two)
        given = {"train_dataset": Dataset.from_list(list(examples())), "callbacks": [kept]}
        trainer = AxolotlTrainer(model=model, args=arguments, **given)
        if smoothing:
            registered().post_trainer_create(DictDefault(options), trainer)
        trainer.train()
    return kept.seen


def test_a_step_of_the_trainer_has_the_gradient_of_the_whole_batch():
    assert relative_error(stepped(0.1), one_batch(0.1)) < 1e-12


def test_without_the_plugin_accumulation_is_a_mean_of_means():
    assert relative_error(stepped(0.0), one_batch(0.0)) > 0.05


def test_axolotls_log_shows_the_line_that_the_loss_is_ours(caplog, monkeypatch):
    monkeypatch.setattr(say_once, "_said", set())
    stepped(0.1)
    (record,) = (record for record in caplog.records if "seqpar computes the loss in axolotl" in record.getMessage())
    assert AxolotlOrWarnErrorFilter().filter(record)
