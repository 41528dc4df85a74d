"""DeepSpeed's own ZeRO-3 engine: a step has the gradients of the whole batch, in float32, with the chunked loss and
with the scores of TRL's trainers.
"""

import os
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import trl

from seqpar.integrations import trl_node
from seqpar.integrations.transformers import apply_seqpar_loss, compute_loss_func
from seqpar.integrations.trl import apply_seqpar_scores
from tests.seqpar.integrations import trl_runs
from tests.seqpar.integrations.tiny_models import gradients, plain_loss, predicted, relative_error, tiny
from tests.seqpar.integrations.trainer_runs import BATCH, collated, sentences

with warnings.catch_warnings(action="ignore"), mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}):
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

pytestmark = pytest.mark.filterwarnings("ignore")

ACCUMULATION = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": ACCUMULATION,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


@contextmanager
def launched(rank, world):
    """What DeepSpeed reads of a process that was launched as this rank."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_SIZE": world, "MASTER_PORT": 29500}
    with mock.patch.dict(os.environ, {key: str(value) for key, value in here.items()} | {"MASTER_ADDR": "127.0.0.1"}):
        yield


def zero_3(rank, world, model):
    """DeepSpeed's engine, and whether it has divided the output embeddings."""
    with launched(rank, world):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG, dist_init_required=True)
    return engine, model.get_output_embeddings().weight.numel() == 0


def stepped(rank, world, name, ours):
    """One step of this rank's micro-batches: whether the weights were divided, and all gradients."""
    model = tiny(name, torch.float32)
    if ours:
        apply_seqpar_loss(model, chunk_tokens=5)
    all_of_them = sentences(model, world * ACCUMULATION * BATCH)
    items = torch.tensor(predicted(model, collated(model, all_of_them)["labels"]))
    engine, divided = zero_3(rank, world, model)
    for index in range(ACCUMULATION):
        first = (index * world + rank) * BATCH
        batch = collated(model, all_of_them[first : first + BATCH])
        # DeepSpeed divides by the steps and by the ranks
        loss = engine(**batch, num_items_in_batch=items).loss * ACCUMULATION * world
        engine.backward(loss)
        if index + 1 < ACCUMULATION:
            engine.step()
    found = {name: safe_get_full_grad(parameter).clone() for name, parameter in model.named_parameters()}
    engine.step()
    return divided, found


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@pytest.mark.parametrize("ours", [True, False])
def test_under_zero_3_a_step_of_two_ranks_has_the_gradients_of_the_whole_batch(name, ours, own_ranks):
    model = tiny(name, torch.float32)
    batch = collated(model, sentences(model, 2 * ACCUMULATION * BATCH))
    (plain_loss(model, batch) / predicted(model, batch["labels"])).backward()
    for divided, got in own_ranks(2, stepped, name, ours):
        assert divided
        assert relative_error(got, gradients(model)) < 1e-5


def refused(rank, world):
    model = tiny("llama", torch.float32)
    compute_loss_func(apply_seqpar_loss(model))
    engine, _ = zero_3(rank, world, model)
    batch = collated(model, sentences(model, BATCH))
    del batch["labels"]
    with pytest.raises(RuntimeError, match=r"ZeRO-3 divides the output embeddings, and has released .* leave that out"):
        engine(**batch)
    return True


def test_a_loss_function_that_is_called_after_the_forward_is_refused(own_ranks):
    assert own_ranks(2, refused) == [True, True]


def step_of_trl(rank, world, run):
    """One step of one of TRL's trainers: how often the scores were computed, and all gradients."""
    found, own = {}, deepspeed.DeepSpeedEngine.step

    def step(engine):
        if engine.is_gradient_accumulation_boundary():
            trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
            found.update({name: safe_get_full_grad(parameter).clone() for name, parameter in trained.items()})
        return own(engine)

    with (
        launched(rank, world),
        mock.patch.object(deepspeed.DeepSpeedEngine, "step", step),
        mock.patch.object(trl_node, "token_scores", wraps=trl_node.token_scores) as scores,
    ):
        trl_runs.trained(rank, world, run)
    return scores.call_count, found


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("sft", {"model": "llama-tied", "accumulation": 2}),
        ("sft", {"way": "scores", "lora": {"target_modules": ["q_proj", "lm_head"]}}),
        ("dpo", {"model": "llama-tied"}),
        ("dpo", {"lora": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}}),
        ("kto", {}),
        ("grpo", {}),
        ("rloo", {"way": "scores"}),
    ],
)
def test_under_zero_3_a_step_of_trls_trainers_on_two_ranks_is_that_of_the_whole_batch(kind, changes, own_ranks):
    run = trl_runs.Run(kind, **({"way": "callback", "dtype": torch.float32, "layout": "zero3"} | changes))
    plain = trl_runs.trained(0, 1, run._replace(way="plain", layout="whole"))
    for calls, got in own_ranks(2, step_of_trl, run):
        assert calls >= run.accumulation
        assert relative_error(got, plain.gradients) < 1e-5


def test_distillation_is_refused_under_deepspeed_by_name():
    with mock.patch.object(trl.DistillationTrainer, "is_deepspeed_enabled", True, create=True):
        trainer = object.__new__(trl.DistillationTrainer)
        trainer.args = mock.Mock(use_liger_kernel=False, torch_compile=False)
        trainer.compute_metrics = trainer.preprocess_logits_for_metrics = None
        trainer.is_fsdp_enabled = False
        with pytest.raises(ValueError, match=r"DistillationTrainer with DeepSpeed: the divergence is not tested"):
            apply_seqpar_scores(trainer)
