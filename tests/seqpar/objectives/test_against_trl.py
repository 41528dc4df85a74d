"""TRL's own losses, called on given log-probabilities, are the same numbers with the same gradients."""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

from seqpar.objectives import (
    clipped_surrogate,
    cpo,
    dpo,
    gamma_weights,
    kl_estimate,
    kto,
    masked_weights,
    orpo,
    padded_segments,
    per_constant,
    per_item,
    per_sequence,
    per_token,
    sequence_lengths,
    sequence_log_ratio,
    sequence_means,
    sequence_sums,
    simpo,
    soft_surrogate,
    spread_to_tokens,
    token_log_ratio,
    truncated_weights,
    weighted_policy_gradient,
)
from seqpar.testing import assert_same_results
from tests.seqpar.objectives.batches import graded, numbers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that these two may change without notice
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

B, T = 4, 5
MASK = torch.arange(T) < torch.tensor([5, 2, 3, 1]).unsqueeze(1)
IDS = padded_segments(MASK)


def same_for(t):
    return t


ACCELERATOR = SimpleNamespace(
    device="cpu",
    num_processes=1,
    sync_gradients=False,
    gather=same_for,
    gather_for_metrics=same_for,
    reduce=lambda t, reduction: t,
)


def trainer(**settings):
    """What the trainers' methods read of `self`."""
    return SimpleNamespace(
        accelerator=ACCELERATOR,
        model=SimpleNamespace(training=False),
        aux_loss_enabled=False,
        _total_train_tokens=0,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        **settings,
    )


def scores(seed):
    """Log-probabilities (B, T), 0 where they do not count, as models return them."""
    drawn = numbers(seed, B, T).detach()
    return (-drawn.abs()).where(MASK, 0.0).requires_grad_()


def model_with(log_probs):
    """A model that has these log-probabilities, and none where there is no label."""
    log_probs = log_probs.where(MASK, 0.0)
    outputs = SimpleNamespace(
        log_probs=log_probs, entropy=torch.zeros(B, T), mean_logits=torch.zeros(B, T), is_top1=torch.zeros(B, T) > 0
    )
    return lambda **_: outputs


def completions():
    """Input ids with one token of prompt before the responses."""
    completion_mask = torch.cat([torch.zeros(B, 1, dtype=torch.bool), MASK], 1)
    return {
        "input_ids": torch.ones(B, T + 1, dtype=torch.int64),
        "completion_mask": completion_mask.long(),
        "attention_mask": torch.ones(B, T + 1, dtype=torch.int64),
    }


def assert_same(ours, theirs, log_prob):
    leaves = {"log_prob": log_prob}
    assert_same_results(graded(ours, leaves), graded(theirs, leaves))


@pytest.mark.parametrize(("variant", "smoothing"), [("sigmoid", 0.0), ("hinge", 0.0), ("ipo", 0.0), ("robust", 0.2)])
def test_dpo_and_its_variants_are_trls(variant, smoothing):
    log_prob, reference = scores(1), scores(2).detach()
    ratio = token_log_ratio(log_prob, reference, MASK)
    of = sequence_means if variant == "ipo" else sequence_sums
    chosen, rejected = of(ratio, IDS, B).chunk(2)
    ours = per_item(dpo(chosen, rejected, beta=0.3, variant=variant, label_smoothing=smoothing)).mean
    ref_chosen, ref_rejected = reference.sum(1).chunk(2)
    self = trainer(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[variant],
        loss_weights=[1.0],
        label_smoothing=smoothing,
        beta=0.3,
        use_weighting=False,
    )
    inputs = {**completions(), "ref_chosen_logps": ref_chosen, "ref_rejected_logps": ref_rejected}
    assert_same(ours, DPOTrainer._compute_loss(self, model_with(log_prob), inputs, False), log_prob)


@pytest.mark.unswitched
@pytest.mark.parametrize("point", [0.4, -0.4])
def test_kto_is_trls(point):
    log_prob, reference = scores(1), scores(2).detach()
    wanted = torch.tensor([True, False, True, True])
    unpaired = torch.full((B,), point, dtype=torch.float64)
    ratio = sequence_sums(token_log_ratio(log_prob, reference, MASK), IDS, B)
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.7}
    losses = kto(ratio, wanted, beta=0.3, reference_point=per_item(unpaired).mean, **weights)
    self = trainer(
        loss_type="kto",
        calculate_KL=True,
        precompute_ref_logps=True,
        beta=0.3,
        _compute_kl_logps=lambda model, batch: unpaired,
        **weights,
    )
    inputs = {
        **completions(),
        "label": wanted,
        "ref_logps": reference.sum(1),
        "ref_KL_logps": torch.zeros_like(unpaired),
    }
    theirs = KTOTrainer._compute_loss(self, model_with(log_prob), inputs, False)
    assert_same(per_item(losses).mean, theirs, log_prob)


def test_simpo_conservative_dpo_and_the_preference_of_cpo_are_trls():
    log_prob = scores(1)
    self = trainer(alpha=0.0, beta=2.0, label_smoothing=0.0, simpo_gamma=0.6, loss_type="simpo")
    means = sequence_means(log_prob, IDS, B).chunk(2)
    assert_same(simpo(*means, beta=2.0, gamma=0.6).sum(), CPOTrainer.cpo_loss(self, *means)[0].sum(), log_prob)
    self.loss_type = "sigmoid"
    sums = sequence_sums(log_prob, IDS, B).chunk(2)
    theirs = CPOTrainer.cpo_loss(self, *sums)[0].sum()
    assert_same(cpo(*sums, beta=2.0, nll_weight=0.0).sum(), theirs, log_prob)
    self.label_smoothing = 0.2
    theirs = CPOTrainer.cpo_loss(self, *sums)[0].sum()
    assert_same(dpo(*sums, beta=2.0, label_smoothing=0.2).sum(), theirs, log_prob)


def test_the_odds_ratio_of_orpo_is_trls():
    """TRL computes it in float32."""
    log_prob = scores(1)
    chosen, rejected = sequence_means(log_prob, IDS, B).chunk(2)
    ours = orpo(chosen, rejected, weight=0.3) + chosen
    theirs = -ORPOTrainer.odds_ratio_loss(trainer(beta=0.3), chosen, rejected)[0]
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=1e-7)


def orpo_batch(is_encoder_decoder):
    """Two pairs of a prompt of one token and responses of 3, 1, 2 and 4; TRL's decoder-only ids contain the prompt."""
    ids = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(0))
    response = torch.arange(5) < torch.tensor([3, 1, 2, 4]).unsqueeze(1) + 1
    attended = response.clone()
    response[:, 0] = is_encoder_decoder
    labels = ids.where(response, -100)
    columns = {"input_ids": ids, "attention_mask": attended.long(), "labels": labels}
    # Of a model with an encoder TRL reads the shape of the prompt as well
    batch = {"prompt_input_ids": ids[:2], "prompt_attention_mask": attended[:2].long()}
    for name, both in columns.items():
        batch |= {f"{which}_{name}": half for which, half in zip(("chosen", "rejected"), both.chunk(2), strict=True)}
    return batch, ids, response, attended


@pytest.mark.unswitched  # TRL's own step makes tensors on the CPU
@pytest.mark.parametrize("is_encoder_decoder", [False, True])
def test_the_loss_of_orpo_with_the_likelihood_over_all_chosen_tokens_is_trls(is_encoder_decoder):
    batch, ids, response, attended = orpo_batch(is_encoder_decoder)
    logits = numbers(2, 4, 5, 7)
    self = trainer(beta=0.3, is_encoder_decoder=is_encoder_decoder, padding_value=0, label_pad_token_id=-100)
    self.concatenated_inputs = ORPOTrainer.concatenated_inputs
    self.get_batch_logps = ORPOTrainer.get_batch_logps
    self._shift_right = lambda labels: labels
    self.odds_ratio_loss = lambda *logps: ORPOTrainer.odds_ratio_loss(self, *logps)
    self.concatenated_forward = lambda *given: ORPOTrainer.concatenated_forward(self, *given)
    theirs, _ = ORPOTrainer.get_batch_loss_metrics(self, lambda *_, **__: SimpleNamespace(logits=logits), batch)

    counted = response if is_encoder_decoder else attended
    if not is_encoder_decoder:
        logits, ids, response, counted = logits[:, :-1], ids[:, 1:], response[:, 1:], counted[:, 1:]
    log_prob = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    means = sequence_means(log_prob, padded_segments(response), 4).chunk(2)
    nll = -sequence_sums(log_prob, padded_segments(counted), 4)[:2] * 2 / counted[:2].sum()
    ours = per_item(orpo(*means, weight=0.3, chosen_nll=nll)).mean
    # TRL computes the odds in float32
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=0)


GRPO = {
    "_entropy_bonus_enabled": False,
    "args": SimpleNamespace(delta=5.0, use_bias_correction_kl=False),
    "beta": 0.1,
    "current_gradient_accumulation_steps": 1,
    "epsilon_high": 0.28,
    "epsilon_low": 0.2,
    "importance_sampling_level": "token",
    "max_completion_length": 7,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
}


def trl_grpo(log_prob, inputs, **settings):
    self = trainer(**{**GRPO, **settings})
    self._get_per_token_logps_and_entropies = lambda *_, **__: (log_prob, torch.zeros(B, T), None)
    ids = torch.ones(B, T, dtype=torch.int64)
    prompt = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1]}
    completion = {"completion_ids": ids, "completion_mask": MASK.long(), "num_items_in_batch": MASK.sum()}
    return GRPOTrainer._compute_loss(self, None, {**prompt, **completion, **inputs})


@pytest.mark.parametrize("sampler", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_grpo_and_its_descendants_are_trls(loss_type, sampler):
    log_prob, old, reference = scores(1), scores(2).detach(), scores(3).detach()
    advantages = numbers(4, B).detach()
    weights = truncated_weights(token_log_ratio(old, scores(5), MASK), max_weight=2.0)
    losses = clipped_surrogate(
        token_log_ratio(log_prob, old, MASK),
        spread_to_tokens(advantages, IDS),
        eps_low=0.2,
        eps_high=0.28,
        max_ratio=5.0,
    )
    if sampler:
        losses = losses * weights
    losses = losses + 0.1 * kl_estimate(token_log_ratio(log_prob, reference, MASK), "k3")
    ours = {
        "grpo": per_sequence(losses, IDS, B),
        "bnpo": per_token(losses, MASK),
        "dapo": per_token(losses, MASK),
        "dr_grpo": per_constant(losses, MASK, 7 * B),
    }[loss_type]
    inputs = {
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "advantages": advantages,
        "importance_sampling_ratio": weights,
    }
    assert_same(ours.mean, trl_grpo(log_prob, inputs, loss_type=loss_type, use_vllm=sampler), log_prob)


def test_gspo_is_trls():
    log_prob, old, advantages = scores(1), scores(2).detach(), numbers(4, B).detach()
    losses = clipped_surrogate(
        sequence_log_ratio(log_prob, old, IDS, B), advantages, eps_low=0.2, eps_high=0.28, max_ratio=5.0
    )
    inputs = {"old_per_token_logps": old, "advantages": advantages}
    settings = {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.0}
    assert_same(per_item(losses).mean, trl_grpo(log_prob, inputs, **settings), log_prob)


# TRL keeps its two temperatures in float32, which holds these
NEWER = {
    "sapo_temperature_pos": 0.75, "sapo_temperature_neg": 1.25, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "delta": None, "use_bias_correction_kl": False,
    "steps_per_generation": 1,
}  # fmt: skip


@pytest.mark.parametrize("loss_type", ["sapo", "cispo", "vespo", "luspo"])
def test_the_objectives_of_2026_are_trls(loss_type):
    log_prob, old, advantages = scores(1), scores(2).detach(), numbers(4, B).detach()
    ratio, spread = token_log_ratio(log_prob, old, MASK), spread_to_tokens(advantages, IDS)
    phi = gamma_weights(sequence_sums(ratio, IDS, B), advantages)
    of_sequences = clipped_surrogate(sequence_log_ratio(log_prob, old, IDS, B), advantages, eps_low=0.2, eps_high=0.28)
    ours = {
        "sapo": lambda: per_sequence(
            soft_surrogate(ratio, spread, temperature=0.75, negative_temperature=1.25), IDS, B
        ),
        "cispo": lambda: per_token(
            weighted_policy_gradient(log_prob, truncated_weights(ratio, max_weight=1.3), spread), MASK
        ),
        "vespo": lambda: per_token(weighted_policy_gradient(log_prob, spread_to_tokens(phi, IDS), spread), MASK),
        "luspo": lambda: per_item(of_sequences * sequence_lengths(IDS, B)),
    }[loss_type]()
    settings = {"args": SimpleNamespace(**NEWER), "beta": 0.0, "loss_type": loss_type}
    settings["importance_sampling_level"] = "sequence" if loss_type == "luspo" else "token"
    settings |= {"epsilon_high": 1.3} if loss_type == "cispo" else {}
    settings |= {"get_gamma_weights": GRPOTrainer.get_gamma_weights}
    inputs = {"old_per_token_logps": old, "advantages": advantages}
    assert_same(ours.mean, trl_grpo(log_prob, inputs, **settings), log_prob)


def test_icepops_mask_is_the_papers():
    log_ratio = numbers(3, 40)
    kept = [k if 0.5 <= k <= 2.0 else 0.0 for k in log_ratio.detach().exp().tolist()]
    for weight in (0.5, 2.0):  # both ends are included
        at = torch.tensor([weight], dtype=torch.float64).log()
        assert masked_weights(at, min_weight=weight, max_weight=weight).tolist() == [weight]
    weights = masked_weights(log_ratio, min_weight=0.5, max_weight=2.0)
    assert 0 < kept.count(0.0) < 40
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor(kept, dtype=torch.float64), rtol=1e-12, atol=0)
