"""TRL's trainers with `apply_seqpar_scores`: losses, metrics and gradients of the model's own logits, all of them.

The comparison is in float64, to 1e-12; TRL's own log-probabilities have float32's precision and are compared to 1e-6.
"""

import math
from contextlib import closing

import pytest
import torch

from seqpar.testing.ranks import Pool
from tests.seqpar.integrations.tiny_models import relative_error
from tests.seqpar.integrations.trl_runs import Run, policy, trained

pytestmark = [
    pytest.mark.hf_models,  # real trainers, which take too long for every run
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

SCORES = ["sft", "dpo", "kto", "grpo", "rloo"]
KINDS = [*SCORES, "distillation"]
TRUNK = {"target_modules": ["q_proj", "up_proj"]}
HEAD = {"target_modules": ["q_proj", "lm_head"]}
COPY = TRUNK | {"modules_to_save": ["lm_head"]}


def same(got, expected, error):
    """The gradients, losses and metrics are the same, and there is something to compare."""
    assert len(got.losses) == len(expected.losses)
    assert got.losses == pytest.approx(expected.losses, rel=error, abs=error)
    assert max(gradient.abs().max() for gradient in expected.gradients.values()) > 1e-3
    assert len(got.metrics) == len(expected.metrics) >= 2
    for ours, theirs in zip(got.metrics, expected.metrics, strict=True):
        assert ours.keys() == theirs.keys()
        # The Trainer adds up losses in float32
        assert ours == pytest.approx(theirs, rel=max(error, 1e-7), abs=max(error, 1e-9))
        assert all(math.isfinite(value) for value in ours.values())
    assert relative_error(got.gradients, expected.gradients) < error


def check(run, error=1e-12):
    same(trained(0, 1, run._replace(way="scores")), trained(0, 1, run._replace(way="plain")), error)


CHECKPOINTED = {"lora": TRUNK, "options": {"gradient_checkpointing": True}, "accumulation": 2}
MIXTRAL = {"router_aux_loss_coef": 0.1, "experts_implementation": "eager"}
RUNS = {
    "two steps": [Run(kind, "", steps=2) for kind in KINDS],
    "an adapter on the projection": [Run(kind, "", lora=HEAD) for kind in SCORES],
    "a trained copy of the projection": [Run("dpo", "", lora=COPY)],
    "accumulated and checkpointed": [Run(kind, "", **CHECKPOINTED) for kind in KINDS],
    "batches without padding, and dft": [
        Run("sft", "", options=options, accumulation=2)
        for options in (
            {"packing": True, "max_length": 12},
            {"padding_free": True, "max_length": None},
            {"loss_type": "dft"},
        )
    ],
    "options of DPO": [
        Run("dpo", "", options=options)
        for options in (
            {"use_weighting": True},
            {"precompute_ref_log_probs": True},
            {"loss_type": ["sigmoid", "sft", "bco_pair"], "ld_alpha": 0.5},
        )
    ],
    "options of GRPO": [
        Run("grpo", "", options=options, steps=2)
        for options in (
            {"entropy_coef": 0.1, "top_entropy_quantile": 0.5},
            {"num_iterations": 2, "loss_type": "grpo", "importance_sampling_level": "sequence"},
        )
    ],
    "divergences of Kullback and Leibler": [
        Run("distillation", "", options={"beta": beta, "temperature": 1.3}) for beta in (0.0, 1.0)
    ],
    "softcaps, factors and router losses": [
        Run("dpo", "", "gemma2"),
        Run("kto", "", "cohere"),
        Run("grpo", "", "granite"),
        Run("distillation", "", "granite"),
        Run("sft", "", "mixtral", changes=MIXTRAL),
    ],
}


@pytest.mark.parametrize(
    "run", [pytest.param(run, id=f"{name}: {run.kind}") for name, runs in RUNS.items() for run in runs]
)
def test_a_step_is_that_of_the_models_own_logits(run):
    check(run)


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_callback_a_step_is_that_of_the_models_own_logits(kind):
    run = Run(kind, "callback")
    same(trained(0, 1, run), trained(0, 1, run._replace(way="plain")), 1e-12)


@pytest.mark.parametrize("kind", ["sft", "dpo", "distillation"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_with_the_callback_a_step_of_two_ranks_is_that_of_one(two_ranks, kind, layout):
    run = Run(kind, "callback", layout=layout)
    expected = trained(0, 1, run._replace(way="plain", layout="whole"))
    for got in two_ranks.call(trained, run):
        assert relative_error(got.gradients, expected.gradients) < 1e-12


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto"])
@pytest.mark.parametrize("model", ["llama", "llama-tied"])
def test_with_classes_that_a_tensor_parallel_plan_splits_a_step_of_two_ranks_is_that_of_one(
    two_ranks, tmp_path, kind, model
):
    changes = {"num_key_value_heads": 2}
    run = Run(kind, "scores", model, changes=changes, layout="split", folder=str(tmp_path))
    policy(run).save_pretrained(tmp_path)
    expected = trained(0, 1, run._replace(way="plain", layout="whole", ranks=1))
    for got in two_ranks.call(trained, run):
        assert relative_error(got.gradients, expected.gradients) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [{}, TRUNK], ids=["full", "lora"])
def test_in_float32_a_step_is_trls_own(kind, lora):
    run = Run(kind, "scores", dtype=torch.float32, lora=lora)
    same(trained(0, 1, run), trained(0, 1, run._replace(way="stock")), 5e-6)


def test_grpo_with_a_projection_in_float32_is_trls_own():
    run = Run("grpo", "scores", dtype=torch.bfloat16, options={"cast_lm_head_to_fp32": True})
    got, expected = trained(0, 1, run), trained(0, 1, run._replace(way="stock"))
    assert got.metrics[0]["entropy"] == pytest.approx(expected.metrics[0]["entropy"], rel=1e-6)
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert relative_error(got.gradients, expected.gradients) < 1e-2


@pytest.mark.parametrize("kind", ["sft", "dpo", "distillation"])
def test_an_evaluation_is_that_of_the_models_own_logits(kind):
    run = Run(kind, "scores", options={"eval_strategy": "steps", "eval_steps": 1})
    check(run)
    assert any("eval_loss" in entry for entry in trained(0, 1, run).metrics)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_under_autocast_a_step_is_trls_own_in_the_precision_of_bfloat16(kind):
    run = Run(kind, "scores", dtype=torch.float32, options={"bf16": True})
    got, expected = trained(0, 1, run), trained(0, 1, run._replace(way="stock"))
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert relative_error(got.gradients, expected.gradients) < 2e-2


@pytest.mark.parametrize(("kind", "lora"), [*((kind, {}) for kind in KINDS), *((kind, HEAD) for kind in SCORES)])
def test_on_two_ranks_a_step_is_that_of_the_models_own_logits(two_ranks, kind, lora):
    run = Run(kind, "scores", lora=lora)
    scores = two_ranks.call(trained, run)
    plain = two_ranks.call(trained, run._replace(way="plain"))
    for got, expected in zip(scores, plain, strict=True):
        # Metrics are logged by the first rank alone
        assert got.losses == pytest.approx(expected.losses, rel=1e-12)
        assert relative_error(got.gradients, expected.gradients) < 1e-12
    assert scores[0].metrics[0] == pytest.approx(plain[0].metrics[0], rel=1e-7, abs=1e-9)
    assert relative_error(scores[0].gradients, scores[1].gradients) == 0


def whole(run):
    """What one process with the batches of both ranks computes from the model's own logits, all of them."""
    return trained(0, 1, run._replace(layout="whole", way="plain"))


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        *((kind, {}) for kind in KINDS),
        ("sft", TRUNK),
        ("sft", HEAD),
        ("dpo", HEAD),
        ("dpo", COPY),
        ("distillation", TRUNK),
        ("distillation", COPY),
    ],
)
def test_on_two_ranks_accumulated_steps_are_those_of_one_process_with_the_whole_batch(two_ranks, layout, kind, lora):
    run = Run(kind, "scores", lora=lora, accumulation=2, layout=layout)
    got = same_as_whole(two_ranks.call, run)
    # Else the gradient of one rank's tokens could be that of all
    assert got[0].losses != pytest.approx(got[1].losses, rel=1e-3) or (kind, lora) in [("dpo", HEAD), ("dpo", COPY)]


def same_as_whole(call, run):
    """What the ranks have computed, together the loss and gradients of one process."""
    got, expected = call(trained, run), whole(run)
    losses = [sum(ranks) / len(got) for ranks in zip(*(each.losses for each in got), strict=True)]
    # Micro-batches may have gone to other ranks; their sum is the step's loss
    assert sum(losses) == pytest.approx(sum(expected.losses), rel=1e-12, abs=1e-12)
    for each in got:
        assert relative_error(each.gradients, expected.gradients) < 1e-12
    return got


def test_on_four_ranks_a_step_is_that_of_one_process_with_the_whole_batch():
    with closing(Pool(4)) as four_ranks:
        for layout in ("ddp", "fsdp2"):  # which leaves state behind, too
            for kind in KINDS:
                got = same_as_whole(four_ranks.call, Run(kind, "scores", layout=layout, ranks=4))
                # The first loss of RLOO is 0 on every rank
                assert kind == "rloo" or len({each.losses[0] for each in got}) > 1


def test_without_the_scores_trl_loses_gradients_of_a_trained_copy_of_the_projection_under_fsdp2(two_ranks):
    run = Run("sft", "stock", lora=COPY, layout="fsdp2")
    got, expected = two_ranks.call(trained, run)[0].gradients, whole(run).gradients
    wrong = {name for name in expected if relative_error({name: got[name]}, {name: expected[name]}) > 0.1}
    assert {name.split(".")[-2] for name in wrong} == {"default"}


def test_under_fsdp2_in_bfloat16_the_scores_are_not_rounded_to_its_output_dtype(two_ranks):
    run = Run("dpo", "scores", dtype=torch.float32, options={"bf16": True}, layout="fsdp2")
    ours, theirs = (two_ranks.call(trained, run._replace(way=way))[0] for way in ("scores", "stock"))
    rounded = [torch.tensor(each.losses).bfloat16().tolist() == each.losses for each in (ours, theirs)]
    assert rounded == [False, True]
    assert ours.losses == pytest.approx(theirs.losses, rel=2e-2)
