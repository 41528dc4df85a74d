"""Losses that are functions of a token's own scores, and their plain values from all logits at once."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.seqpar.linear.linear_loss import plain_logits
from tests.seqpar.linear.score_cases import ScoreCase, score_cases


def surrogate(scores, old, advantage, ids_weight):
    """PPO's, with an entropy bonus."""
    ratio = (scores.log_prob - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) - 0.1 * scores.entropy


def dft(scores, old, advantage, ids_weight):
    return -scores.log_prob.exp().detach() * scores.log_prob


def focal(scores, old, advantage, ids_weight):
    return -((1 - scores.log_prob.exp()) ** 2) * scores.log_prob


def unlikelihood(scores, old, advantage, ids_weight):
    """Of the given classes, each with a weight of its own; without any, of none."""
    if scores.log_probs_at is None:
        return -scores.log_prob * advantage
    return -scores.log_prob - (ids_weight * (-0.9 * scores.log_probs_at.exp()).log1p()).sum(-1)


def confident(scores, old, advantage, ids_weight):
    """A confidence penalty and a z-loss; the target's own probability is in no term."""
    return advantage * (0.3 * scores.entropy.square() + 1e-2 * scores.lse.square()) + old.sin()


def label_free(scores, old, advantage, ids_weight):
    return (scores.lse - old).tanh()


LOSSES = {f.__name__: f for f in (surrogate, dft, focal, unlikelihood, confident, label_free)}


@dataclass(frozen=True)
class ScoredCase:
    """One loss of one batch."""

    scores: ScoreCase
    loss: str
    needing: frozenset[str]
    """The per-token tensors that need a gradient."""
    chunk_tokens: int | None
    loss_scale: float

    def tensors(self) -> dict[str, Tensor]:
        """hidden, weight, bias, target, and the per-token tensors."""
        linear = self.scores.linear
        random = torch.Generator().manual_seed(linear.seed + 7)
        shape = (*linear.lead, self.scores.given or 0)
        per_token = {
            "old": torch.randn(linear.lead, dtype=torch.float64, generator=random) - 2,
            "advantage": torch.randn(linear.lead, dtype=torch.float64, generator=random),
            "ids_weight": torch.rand(shape, dtype=torch.float64, generator=random),
        }
        return self.scores.tensors() | {n: t.requires_grad_(n in self.needing) for n, t in per_token.items()}

    @property
    def options(self) -> dict:
        """What changes the scores."""
        options = self.scores.options
        ids = options.get("ids")
        return {
            **{name: options[name] for name in ("ignore_index", "softcap", "temperature")},
            "ids": ids if ids is not None and ids.size(-1) else None,
        }

    @property
    def entropy(self) -> bool:
        """Whether the loss takes it."""
        return self.loss in ("surrogate", "confident")

    @property
    def own_options(self) -> dict:
        """The keywords of `scored_loss` that are no tensors."""
        own = {"entropy": self.entropy, "chunk_tokens": self.chunk_tokens, "loss_scale": self.loss_scale}
        return self.options | own


PER_TOKEN = ("old", "advantage", "ids_weight")


@st.composite
def scored_cases(draw: st.DrawFn) -> ScoredCase:
    return ScoredCase(
        scores=draw(score_cases()),
        loss=draw(st.sampled_from(list(LOSSES))),
        needing=draw(st.frozensets(st.sampled_from(PER_TOKEN))),
        chunk_tokens=draw(st.sampled_from([None, 1, 2, 3, 7])),
        loss_scale=draw(st.sampled_from([1.0, 2.0**16, 1 / 7])),
    )


def plain_scored(loss, tensors, *, ignore_index, softcap, temperature, ids, entropy) -> Tensor:
    """The summed loss by torch alone."""
    from seqpar.rows.scores import Scores

    kept = tensors["target"].flatten() != ignore_index
    if isinstance(temperature, Tensor):
        temperature = temperature.flatten().unsqueeze(1)[kept]
    logits = plain_logits(tensors["hidden"], tensors["weight"], tensors.get("bias"), softcap, 1.0)[kept] / temperature
    log_p = logits.log_softmax(-1)
    # The limit of p log p at p = 0 is 0
    terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p.where(log_p != -torch.inf, 0.0))
    scores = Scores(
        log_p.gather(1, tensors["target"].flatten()[kept].unsqueeze(1)).squeeze(1),
        logits.logsumexp(-1),
        entropy=-terms.sum(-1) if entropy else None,
        log_probs_at=None if ids is None else log_p.gather(1, ids.flatten(0, -2)[kept]),
    )
    lead = tensors["target"].dim()
    return LOSSES[loss](scores, **{name: tensors[name].flatten(0, lead - 1)[kept] for name in PER_TOKEN}).sum()
