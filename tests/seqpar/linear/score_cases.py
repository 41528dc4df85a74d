"""Cases of per-token scores, and the plain scores to compare them with."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import seqpar
from seqpar.testing import plain_rank
from tests.seqpar.linear.linear_loss import LinearCase, linear_cases, plain_logits


@dataclass(frozen=True)
class ScoreCase:
    """One call of `token_scores`, with everything that may be asked for."""

    linear: LinearCase
    per_token_temperature: bool
    top_k: int | None
    given: int | None
    """How many ids are given for each token; None gives no ids."""
    masked: int
    """How many classes a bias of -inf excludes."""

    def tensors(self) -> dict[str, Tensor]:
        """hidden, weight, bias, target."""
        drop = ("class_weight", "token_weight")
        tensors = {name: t for name, t in self.linear.tensors().items() if name not in drop}
        if self.masked and "bias" in tensors:
            masked = self._masked_classes()
            tensors["bias"] = tensors["bias"].detach().index_fill(0, masked, -torch.inf)
            tensors["bias"].requires_grad_("bias" not in self.linear.frozen)
            moved = torch.isin(tensors["target"], masked) & (tensors["target"] != self.linear.padding)
            tensors["target"] = tensors["target"].where(~moved, self._first_kept())
        return tensors

    def _first_kept(self) -> int:
        """The classes that are not masked begin here: the masked ones are the first of all, or the last."""
        return self.masked if self.linear.seed % 2 else 0

    def _masked_classes(self) -> Tensor:
        start = (self._first_kept() - self.masked) % self.linear.vocab_size
        return torch.arange(start, start + self.masked)

    def masked_class(self) -> int:
        return int(self._masked_classes()[0])

    @property
    def options(self) -> dict:
        random = torch.Generator().manual_seed(self.linear.seed + 1)
        options = {name: self.linear.options[name] for name in ("ignore_index", "softcap", "temperature")}
        if self.per_token_temperature:
            options["temperature"] = 0.3 + torch.rand(self.linear.lead, dtype=torch.float64, generator=random)
        if self.given is not None:
            shape = (*self.linear.lead, self.given)
            # Masked classes have log-probability -inf, which is right but has no gradient to compare
            kept = self._first_kept() + torch.arange(self.linear.vocab_size - self.masked)
            options["ids"] = kept[torch.randint(len(kept), shape, generator=random)]
        return options | {"top_k": self.top_k, "entropy": True, "rank": True}


@st.composite
def score_cases(draw: st.DrawFn) -> ScoreCase:
    linear = draw(linear_cases())
    return ScoreCase(
        linear=linear,
        per_token_temperature=draw(st.booleans()),
        top_k=draw(st.one_of(st.none(), st.integers(1, linear.vocab_size))),
        given=draw(st.sampled_from([None, 0, 1, 3])),
        masked=draw(st.sampled_from([0, 0, 1])),
    )


def plain_scores(
    hidden,
    weight,
    target,
    bias=None,
    *,
    ignore_index,
    softcap,
    temperature,
    entropy=False,
    top_k=None,
    ids=None,
    rank=False,
) -> seqpar.TokenScores:
    """The scores by torch alone, from all logits at once."""
    if isinstance(temperature, Tensor):
        kept = target != ignore_index
        temperature = temperature.where(kept, 1.0).flatten().unsqueeze(1)
    log_p = (plain_logits(hidden, weight, bias, softcap, 1.0) / temperature).log_softmax(-1)
    log_p = log_p.reshape(*target.shape, -1)
    kept = target != ignore_index
    k = kept.unsqueeze(-1)
    log_prob = log_p.gather(-1, target.where(kept, 0).unsqueeze(-1)).squeeze(-1).where(kept, 0.0)
    # The limit of p log p at p = 0 is 0
    terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p.where(log_p != -torch.inf, 0.0))
    found = seqpar.TokenScores(log_prob, entropy=(-terms.sum(-1)).where(kept, 0.0))
    if top_k is not None:
        best = log_p.detach().sort(dim=-1, descending=True, stable=True)
        found = found._replace(top_log_probs=best.values[..., :top_k].where(k, 0.0))
        found = found._replace(top_ids=best.indices[..., :top_k].where(k, -1))
    if ids is not None:
        found = found._replace(log_probs_at=log_p.gather(-1, ids.where(k, 0)).where(k, 0.0))
    if rank:
        gold = target.where(kept, 0).unsqueeze(-1)
        product = plain_logits(hidden, weight, bias).reshape(log_p.shape)
        # Classes that tie before softcap and temperature tie after them; others that are as near may change places
        near = ((log_p - log_p.gather(-1, gold)).abs() < 1e-12) & (product != product.gather(-1, gold))
        place = plain_rank(log_p.detach(), gold.squeeze(-1))
        found = found._replace(rank=place.where(~near.any(-1), ANY_RANK).where(kept, -1))
    return found


ANY_RANK = -2
"""The plain rank where rounding may decide about it."""


def assert_ranks(found: Tensor, plain: Tensor) -> None:
    assert found.dtype == torch.int64
    assert torch.equal(found.where(plain != ANY_RANK, ANY_RANK), plain)


def weighted(scores: seqpar.TokenScores, seed: int, used: str = "all") -> Tensor:
    """A loss that uses some of the scores, each of every token with a factor of its own."""
    random = torch.Generator().manual_seed(seed)

    def factors(t):
        return torch.randn(t.shape, dtype=torch.float64, generator=random).to(t.device)

    if getattr(scores, used, 0) is None:
        used = "all"
    total = scores.log_prob.new_zeros(())
    for name in ("log_prob", "entropy", "log_probs_at"):
        score = getattr(scores, name)
        if score is not None:
            weighted_score = (score * factors(score)).sum()
            total = total + weighted_score if used in ("all", name) else total
    return total


def assert_scores(found: seqpar.TokenScores, plain: seqpar.TokenScores, ignored: Tensor) -> None:
    """Each score is the plain one, and 0, or class -1, where the target is ignored."""
    for name, score in found._asdict().items():
        expected = getattr(plain, name)
        assert (score is None) == (expected is None), name
        if score is None:
            continue
        assert score.shape == expected.shape
        if name == "top_ids":
            _assert_same_classes(score, expected, plain.top_log_probs)
            assert (score[ignored] == -1).all()
        elif name == "rank":
            assert_ranks(score, expected)
        else:
            torch.testing.assert_close(score, expected, rtol=1e-12, atol=1e-12)
            assert (score[ignored] == 0).all()


def _assert_same_classes(ids, expected, log_probs):
    """Classes whose log-probabilities differ by rounding alone may change places."""
    near = torch.zeros_like(ids, dtype=torch.bool)
    close = (log_probs.diff(dim=-1).abs() < 1e-12) & (log_probs.diff(dim=-1) != 0)
    near[..., 1:] |= close
    near[..., :-1] |= close
    if not near.any():
        assert torch.equal(ids, expected)
