"""Name the likely cause of a wrong training step over several ranks, by computing the plain step with each mistake.

Shape suffixes: N tokens of all ranks that count, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.layout_cases import IGNORED, SHAPE, SPLIT, Answer, Case, Model, gradients
from seqpar.testing.evidence import ratio, spelt
from seqpar.testing.precision import error
from seqpar.testing.rank_causes import contributes_nothing

SAME = 1e-5
"""The relative difference up to which numbers count as equal: mistakes are recognised in float32, too."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """A wrong step of one group of ranks."""

    case: Case
    group: int
    got: Sequence[Answer]
    """The answer of each rank."""
    right: Answer

    @functools.cached_property
    def parts(self) -> list[list[dict[str, Tensor]]]:
        """Return the gradient of every micro-batch's summed loss, of each rank that has other tokens."""
        return [[self.summed([batch]) for batch in part] for part in self.case.parts(self.group)]

    @functools.cached_property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return the micro-batches of all ranks."""
        return [batch for part in self.case.parts(self.group) for batch in part]

    def summed(self, batches: Sequence[tuple[Tensor, Tensor]], model: Model | None = None) -> dict[str, Tensor]:
        """Return the gradient of the summed loss of these micro-batches."""
        model = model or self.case.model(self.group)
        losses = [self.case.loss(model.head(model(tokens)), target) for tokens, target in batches]
        return gradients(torch.stack(losses).sum() * self.case.loss_scale, model)

    def weighted(self, weight: Callable[[int, int, int], float]) -> list[dict[str, Tensor]]:
        """Return every rank's gradients where `weight(place, micro_batch, own)` says what is added up."""
        found = []
        for own in (rank // self.case.inner for rank in range(len(self.got))):
            total = {name: torch.zeros_like(g) for name, g in self.right.gradients.items()}
            for place, part in enumerate(self.parts):
                for index, gradient in enumerate(part):
                    for name in total:
                        total[name] += weight(place, index, own) * gradient[name]
            found.append(total)
        return found

    def ratios(self, found: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float | None]]:
        """Return by what each rank's gradients are multiples of these; None where they are none."""
        return [
            {name: _ratio(a.gradients[name], g) for name, g in one.items() if a.gradients[name].any() or g.any()}
            for a, one in zip(self.got, found, strict=True)
        ]

    def is_multiple(self, found: Sequence[Mapping[str, Tensor]]) -> bool:
        """Return whether each rank's gradients are one multiple of these."""
        return all(_one(each.values()) for each in self.ratios(found))

    def is_same(self, found: Sequence[Mapping[str, Tensor]]) -> bool:
        """Return whether each rank has these gradients."""
        return all(r is not None and _close(r, 1) for each in self.ratios(found) for r in each.values())

    def split(self, mistake: Splitting) -> list[Answer]:
        """Return every rank's answer if the ranks of a split vocabulary made this mistake."""
        places = [self._split(mistake, place) for place in range(self.case.inner)]
        name = "embed.weight" if self.case.tied else "head.weight"
        answers = []
        for place in places:
            found = dict(place.gradients)
            if mistake.is_summed:
                found = {n: torch.stack([p.gradients[n] for p in places]).sum(0) for n in found}
            if name in found:
                rows = [slice(*self.case.rows_of(i)) for i in range(len(places))]
                found[name] = torch.cat([p.gradients[name][r] for p, r in zip(places, rows, strict=True)])
            answers.append(Answer(place.loss, found))
        return [answers[rank % self.case.inner] for rank in range(len(self.got))]

    def _split(self, mistake: Splitting, place: int) -> Answer:
        """Return the answer of one rank, over the tokens of all."""
        model = self.case.model(self.group)
        logits_NV = torch.cat([model.head(model(tokens)).flatten(0, 1) for tokens, _ in self.batches])
        target_N = torch.cat([target.flatten() for _, target in self.batches])
        kept = target_N != IGNORED
        mean = mistake.loss(Place(self.case, place, logits_NV[kept], target_N[kept])) / self.case.count
        return Answer(float(mean.detach()), gradients(mean * self.case.loss_scale, model))


class Place(NamedTuple):
    """What a rank of a split vocabulary computes its loss from."""

    case: Case
    number: int
    logits_NV: Tensor
    target_N: Tensor

    @property
    def mine(self) -> Tensor:
        """Return which classes this rank has."""
        first, end = self.case.rows_of(self.number)
        classes_V = torch.arange(self.logits_NV.size(1))
        return (classes_V >= first) & (classes_V < end)

    @property
    def owned(self) -> Tensor:
        """Return whether each target is one of this rank's classes."""
        return self.mine[self.target_N]

    @property
    def part(self) -> Place:
        """Return the same with a gradient only in this rank's classes."""
        return self._replace(logits_NV=self.logits_NV.where(self.mine, self.logits_NV.detach()))

    @property
    def lse(self) -> Tensor:
        """Return each token's log-sum-exp."""
        return self.logits_NV.logsumexp(1)

    @property
    def picked(self) -> Tensor:
        """Return the targets' logits."""
        return self.logits_NV.gather(1, self.target_N.unsqueeze(1)).squeeze(1)

    @property
    def usual(self) -> Tensor:
        """Return the right losses."""
        return self.losses(self.lse, self.picked)

    def losses(self, lse: Tensor, picked: Tensor) -> Tensor:
        """Return the losses with another log-sum-exp or another logit of the target."""
        smooth = self.case.label_smoothing
        return lse - (1 - smooth) * picked - smooth * self.logits_NV.mean(1)

    def smoothed(self, share: float) -> Tensor:
        """Return the losses where that share is spread over this rank's classes."""
        return self.lse - (1 - share) * self.picked - share * self.logits_NV[:, self.mine].mean(1)

    def padded(self) -> Tensor:
        """Return the losses with classes whose logits are 0, up to a vocabulary that the ranks divide."""
        extra = -self.case.vocab_size % self.case.inner
        return self._replace(logits_NV=F.pad(self.logits_NV, (0, extra))).usual

    def found_unevenly(self) -> Tensor:
        """Return the losses where each rank's classes begin at its number times how many it has itself."""
        picked = torch.zeros_like(self.lse)
        for number in range(self.case.inner):
            first, end = self.case.rows_of(number)
            local = self.target_N - number * (end - first)
            here = (local >= 0) & (local < end - first)
            rows = (first + local).where(here, 0).unsqueeze(1)
            picked = picked + self.logits_NV.gather(1, rows).squeeze(1) * here
        return self.losses(self.lse, picked)

    def for_others(self, eps: float) -> float:
        """Return eps v / (v - 1), the share of v local classes that is meant for those other than the target."""
        sizes = [v / (v - 1) for v in (int(self.mine.sum()), self.case.vocab_size) if v > 1]
        return eps * sizes[0] / sizes[-1]


class Splitting(NamedTuple):
    """A mistake on a split vocabulary."""

    name: str
    loss: Callable[[Place], Tensor]
    """Returns the summed loss of one rank."""
    is_summed: bool = False
    """Whether the gradient of what is below the generator is added up over these ranks."""


NOT_FINITE = "a number that is not finite, such as 0 / 0 tokens"
MISSING = "gradient of one rank's classes missing"
REACHES = f"{MISSING}: a token reaches only the classes of the rank that has its target"
LOCAL_SMOOTHING = "smoothing spread over the local classes"
SPLITTINGS = (
    Splitting(
        "off by log(ranks): gathered logits are taken for shards, which adds the log of their number to the loss",
        lambda p: (p.usual + math.log(p.case.inner)).sum(),
    ),
    Splitting(
        f"{MISSING}: the hidden gradient is not summed over the vocabulary's ranks", lambda p: p.part.usual.sum()
    ),
    Splitting(REACHES, lambda p: (p.part.usual * p.owned).sum(), is_summed=True),
    Splitting(REACHES, lambda p: (p.part.usual * p.owned).sum()),
    Splitting(
        "the softmax has no gradient: only the target's logit has one",
        lambda p: p.losses(p.lse.detach(), p.picked).sum(),
    ),
    Splitting(
        "the softmax is over one rank's classes",
        lambda p: p.losses(p.logits_NV[:, p.mine].logsumexp(1), p.picked).sum(),
    ),
    Splitting(
        "the target's logit counts only on the rank that has it", lambda p: p.losses(p.lse, p.picked * p.owned).sum()
    ),
    Splitting(
        "uneven parts: each rank's classes are taken to begin at its number times its own number of classes",
        lambda p: p.found_unevenly().sum(),
    ),
    Splitting("padded classes are counted in the softmax", lambda p: p.padded().sum()),
    Splitting(LOCAL_SMOOTHING, lambda p: p.smoothed(p.case.label_smoothing).sum()),
    Splitting(LOCAL_SMOOTHING, lambda p: p.smoothed(p.for_others(p.case.label_smoothing)).sum()),
    Splitting("label smoothing is left out", lambda p: p.smoothed(0).sum()),
)


def likely_cause(e: Evidence) -> str:
    """Return the name of the first mistake whose numbers are those of the ranks."""
    value = e.case.reduction == "sum" and not all(_close(a.loss, e.right.loss) for a in e.got)
    gradient = not e.is_same([e.right.gradients] * len(e.got))
    causes = [_of_the_value(e) if value else iter(()), _of_the_gradient(e) if gradient else iter(())]
    name = next((name for each in causes for name in each), "none of the usual ones")
    only = ""
    if value != gradient:
        only = "; only the value is wrong" if value else "; the value is right, only the gradient is wrong"
    return name + only


def _of_the_value(e: Evidence) -> Iterator[str]:
    """Yield the mistakes with the ranks' losses."""
    if not all(math.isfinite(a.loss) for a in e.got):
        yield f"{NOT_FINITE}, or no loss at all"
    for mistake in SPLITTINGS if e.case.layout in SPLIT else ():
        if all(_close(a.loss, b.loss) for a, b in zip(e.got, e.split(mistake), strict=True)):
            yield mistake.name


def _of_the_gradient(e: Evidence) -> Iterator[str]:
    """Yield the mistakes with the ranks' gradients, the most specific first."""
    if not all(g.isfinite().all() for a in e.got for g in a.gradients.values()):
        yield NOT_FINITE
    ratios = e.ratios([e.right.gradients] * len(e.got))
    if times := _one(r for each in ratios for r in each.values()):
        yield _scale(e.case, times)
    for mistake in SPLITTINGS if e.case.layout in SPLIT else ():
        if e.is_same([answer.gradients for answer in e.split(mistake)]):
            yield mistake.name
    own = [max(1, sum(part)) for part in e.case.tokens]
    each = [[max(1, count) for count in part] for part in e.case.tokens]
    of_ranks = "mean of means: each rank divides by its own tokens, not by those of all"
    of_batches = "mean of means: each micro-batch is divided by its own tokens, not by those of the step"
    alone = "not reduced over ranks: each rank keeps the gradient of its own tokens"
    weights: list[tuple[str, Callable[[int, int, int], float]]] = [
        (alone, lambda p, m, k: p == k),
        (alone, lambda p, m, k: (p == k) / each[p][m]),
        (of_ranks, lambda p, m, k: 1 / own[p]),
        (of_batches, lambda p, m, k: 1 / each[p][m]),
        ("only the gradient of the last micro-batch is kept", lambda p, m, k: m == len(each[p]) - 1),
        ("only the gradient of the first micro-batch is kept", lambda p, m, k: m == 0),
        *((contributes_nothing(lost), functools.partial(_without, lost)) for lost in _some_of(len(own))),
    ]
    yield from (name for name, weight in weights if e.is_multiple(e.weighted(weight)))
    yield from _elsewhere(e)
    lost = sorted({name for one in ratios for name, r in one.items() if r == 0})
    if lost:
        yield f"no gradient at all of {', '.join(lost)}"
    if None not in {r for one in ratios for r in one.values()}:
        said = ", ".join(f"{name} {spelt(r or 0)}" for name, r in ratios[0].items())
        yield f"reduced twice, or not at all: the gradients are multiples of the right ones: {said}"
    apart = [n for n, g in e.got[0].gradients.items() if any(error(a.gradients[n], g) > SAME for a in e.got)]
    if apart:
        yield f"the ranks have different gradients of {', '.join(apart)}"


def _some_of(ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield every choice of ranks that leaves one, few ranks first."""
    for count in range(1, ranks):
        yield from itertools.combinations(range(ranks), count)


def _without(lost: Sequence[int], place: int, index: int, own: int) -> float:
    """Return the weight of a micro-batch where some ranks contribute nothing."""
    return place not in lost


def _scale(case: Case, times: float) -> str:
    """Return the mistake that multiplies all gradients by this number."""
    n, ranks, batches = case.count, len(case.tokens), len(case.tokens[0])
    rows = SHAPE[0] * SHAPE[1] * batches
    named: dict[str, list[float]] = {
        "divided by ranks twice": [1 / r for r in (ranks, case.inner) if r > 1],
        "multiplied by the number of ranks once too often": [r for r in (ranks, case.inner) if r > 1],
        "divided by the number of micro-batches as well as by the tokens": [1 / batches, 1 / (batches * ranks)],
        "not divided by the tokens": [n, n / ranks, n / batches, n / (ranks * batches)],
        "divided by all rows, including padding": [n / (rows * ranks), n / rows],
        "the wrong sign": [-1],
        "the loss scale is missing": [1 / case.loss_scale],
        "the loss scale is applied twice": [case.loss_scale],
    }
    said = f"all gradients are {spelt(times)} times the right ones"
    for name, values in named.items():
        if any(_close(times, value) for value in values):
            return f"{name}: {said}"
    return said


def _elsewhere(e: Evidence) -> Iterator[str]:
    """Yield the mistakes of ties, of shards and of shifts."""
    if e.case.tied:
        model = e.case.model(e.group)
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        uses = e.summed(e.batches, model)
        for use in ("embed.weight", "head.weight"):
            if e.is_multiple([{"embed.weight": uses[use]}] * len(e.got)):
                yield f"a missed tie: the shared weight has the gradient of its use in {use.split('.')[0]} alone"
    right = e.right.gradients.get("head.weight")
    if e.case.layout == "FSDP2" and right is not None:
        alone = e.weighted(lambda p, m, k: (p == k) / e.case.count)
        rows = torch.arange(len(right)).chunk(len(alone))
        own = torch.cat([alone[k]["head.weight"][r] for k, r in enumerate(rows)])
        if e.is_multiple([{"head.weight": own}] * len(e.got)):
            yield "not reduced over ranks: each rank's rows of head.weight have the gradient of its own tokens"
    shifted = [(tokens, F.pad(target[:, 1:], (0, 1), value=IGNORED)) for tokens, target in e.batches]
    if e.is_multiple([e.summed(shifted)] * len(e.got)):
        yield "targets shifted twice"


def _ratio(got: Tensor, plain: Tensor) -> float | None:
    """Return r if the one is r times the other; None if it is no multiple."""
    if not plain.any() or not got.isfinite().all():
        return None
    if not got.any():
        return 0.0
    times = ratio(got, plain)
    if times is None and (got - plain).norm() <= SAME * plain.norm():
        return 1.0
    return times


def _one(ratios: Iterable[float | None]) -> float | None:
    """Return the ratio that all are; None if they differ."""
    first, *others = [*ratios] or [None]
    if first and all(r is not None and _close(r, first) for r in others):
        return first
    return None


def _close(a: float, b: float) -> bool:
    """Return whether two numbers are the same."""
    return math.isclose(a, b, rel_tol=SAME)
