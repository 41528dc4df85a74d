"""Name the likely cause of a wrong training step over several ranks, by computing the plain step with each mistake.

Numbers are compared, and mistakes that no layout is needed for are named, by `seqpar.testing`.

Shape suffixes: N tokens of all ranks that count, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.layout_cases import IGNORED, SHAPE, Answer, Case, Model, gradients
from seqpar.testing.causes import CAUSES
from seqpar.testing.evidence import Evidence, close, ratio, spelt

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Step:
    """A wrong step of one group of ranks, and the gradients of the plain one with a mistake."""

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
        return gradients(self.case.summed(model, batches) * self.case.loss_scale, model)

    def weighted(self, weight: Callable[[int, int, int], float]) -> list[Gradients]:
        """Return every rank's gradients where `weight(place, micro_batch, own)` says what is added up."""
        found: list[Gradients] = []
        for own in (rank // self.case.inner for rank in range(len(self.got))):
            total = {name: torch.zeros_like(g) for name, g in self.right.gradients.items()}
            for place, part in enumerate(self.parts):
                for index, gradient in enumerate(part):
                    for name in total:
                        total[name] += weight(place, index, own) * gradient[name]
            found.append(total)
        return found

    def times(self, found: Sequence[Gradients]) -> float | None:
        """Return r if the gradients of all ranks are r times these, with the same r; else None."""
        named = [{f"{name}, rank {k}": g for name, g in one.items()} for k, one in enumerate(found)]
        given = {f"{name}, rank {k}": g for k, one in enumerate(self.got) for name, g in one.gradients.items()}
        plain = {name: g for one in named for name, g in one.items()}
        if any(given[name].any() for name, g in plain.items() if not g.any()):
            return None
        nothing = torch.zeros(())
        return Evidence((nothing, given), (nothing, plain)).ratio()

    def evidence(self) -> Evidence:
        """Return the numbers of the first rank whose gradients are wrong, as the proof kit asks for them."""
        ranks = [
            k for k, one in enumerate(self.got) if Step(self.case, 0, [one], self.right).times([self.right[1]]) != 1
        ]
        rank = next(iter(ranks), 0)
        place, rows = rank // self.case.inner, SHAPE[0] * SHAPE[1] * len(self.case.tokens[0])
        counts = [(sum(part), rows) for part in self.case.tokens]
        of_ranks = [
            {n: torch.stack([g[n] for g in part]).sum(0) / self.case.count for n in self.right.gradients}
            for part in self.parts
        ]
        return Evidence(
            (torch.tensor(self.got[rank].loss), self.got[rank].gradients),
            (torch.tensor(self.right.loss), self.right.gradients),
            uses={name: [("step", g[name]) for g in of_ranks] for name in self.right.gradients},
            tokens=counts[place][0],
            rows=rows,
            divisor=self.case.count,
            rank=place,
            counts=counts,
        )

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


def cause_of(step: Step) -> str:
    """Return the name of the first mistake whose numbers are those of the ranks."""
    value = step.case.reduction == "sum" and not all(close(a.loss, step.right.loss) for a in step.got)
    of_right = step.times([step.right.gradients] * len(step.got))
    gradient = of_right is None or not close(of_right, 1)
    causes = [_of_the_value(step) if value else iter(()), _of_the_gradient(step, of_right) if gradient else iter(())]
    name = next((name for each in causes for name in each), "none of the usual ones")
    only = ""
    if value != gradient:
        only = "; only the value is wrong" if value else "; the value is right, only the gradient is wrong"
    return name + only


def _of_the_value(step: Step) -> Iterator[str]:
    """Yield the mistakes with the ranks' losses."""
    if not all(math.isfinite(a.loss) for a in step.got):
        yield f"{NOT_FINITE}, or no loss at all"
    for mistake in SPLITTINGS if step.case.row.splits_classes else ():
        if all(close(a.loss, b.loss) for a, b in zip(step.got, step.split(mistake), strict=True)):
            yield mistake.name


def _of_the_gradient(step: Step, times: float | None) -> Iterator[str]:
    """Yield the mistakes with the gradients of the ranks, the most specific first; `times` the right ones, if any."""
    if not all(g.isfinite().all() for a in step.got for g in a.gradients.values()):
        yield NOT_FINITE
    if times:
        yield from _scale(step.case, times)
    for mistake in SPLITTINGS if step.case.row.splits_classes else ():
        of_mistake = step.times([answer.gradients for answer in step.split(mistake)])
        if of_mistake and close(of_mistake, 1):
            yield mistake.name
    each = [[max(1, count) for count in part] for part in step.case.tokens]
    own = [max(1, sum(part)) for part in step.case.tokens]
    near = step.case.near
    of_row = [max(1, sum(map(sum, step.case.tokens[p - p % near :][:near]))) for p in range(len(own))]
    of_batches = "mean of means: each micro-batch is divided by its own tokens, not by those of the step"
    of_ranks = "mean of means: each rank divides by its own tokens, not by those of all"
    alone = "not reduced over ranks: each rank keeps the gradient of its own tokens"
    weights: list[tuple[str, Callable[[int, int, int], float]]] = [
        (alone, lambda p, m, k: p == k),
        (alone, lambda p, m, k: (p == k) / own[p]),
        (alone, lambda p, m, k: (p == k) / each[p][m]),
        (of_ranks, lambda p, m, k: 1 / own[p]),
        ("mean of means: ranks divide by the tokens of their row of the mesh", lambda p, m, k: 1 / of_row[p]),
        (of_batches, lambda p, m, k: 1 / each[p][m]),
        ("only the gradient of the last micro-batch is kept", lambda p, m, k: m == len(each[p]) - 1),
        ("only the gradient of the first micro-batch is kept", lambda p, m, k: m == 0),
    ]
    # One multiple of the right gradients is no choice among them
    if times is None:
        yield from (name for name, weight in weights if step.times(step.weighted(weight)))
        yield from _elsewhere(step)
    evidence = step.evidence()
    yield from filter(None, (cause.detect(evidence) for cause in CAUSES))


def _scale(case: Case, times: float) -> Iterator[str]:
    """Yield the mistake that multiplies all gradients by this number."""
    n, lost = case.count, sum(map(sum, case.tokens))
    ranks, batches = len(case.tokens), len(case.tokens[0])
    rows = SHAPE[0] * SHAPE[1] * batches
    named: dict[str, list[float]] = {
        "divided by the tokens of the rank that is lost, too": [n / lost] if lost > n else [],
        "divided by ranks twice": [1 / r for r in (ranks, case.inner, case.groups) if r > 1],
        "multiplied by the number of ranks once too often": [r for r in (ranks, case.inner) if r > 1],
        "divided by the number of micro-batches as well as by the tokens": [1 / batches, 1 / (batches * ranks)],
        "not divided by the tokens": [n, n / ranks, n / batches, n / (ranks * batches)],
        "divided by all rows, including padding": [n / (rows * ranks), n / rows],
        "the loss scale is missing": [1 / case.loss_scale],
        "the loss scale is applied twice": [case.loss_scale],
    }
    said = f"all gradients are {spelt(times)} times the right ones"
    yield from (f"{name}: {said}" for name, values in named.items() if any(close(times, value) for value in values))


def _of_some(step: Step) -> Iterator[str]:
    """Yield the mistake by which the gradients of some parameters are multiplied, and no others."""
    times = {}
    for name, right in step.right.gradients.items():
        if right.any():
            each = [ratio(answer.gradients[name], right) for answer in step.got]
            times[name] = each[0] if each[0] and all(one and close(one, each[0]) for one in each) else None
    off = {name: r for name, r in times.items() if r is None or not close(r, 1)}
    first = next(iter(off.values()), None)
    if first and len(off) < len(times) and all(r and close(r, first) for r in off.values()):
        said = "reduced twice" if first > 1 else "divided by ranks twice"
        yield f"a gradient is {said}: that of {', '.join(off)} is {spelt(first)} times the right one, and no other"


def _of_the_router(step: Step) -> Iterator[str]:
    """Yield the mistake by which the router's loss is another one."""
    case = step.case
    for times in (0, case.near, 1 / case.near, len(case.tokens), 1 / len(case.tokens), case.row.outer):
        model = case.model(step.group)
        loss = case.summed(model, step.batches, times) / case.count
        of_times = step.times([gradients(loss * case.loss_scale, model)] * len(step.got))
        if of_times and close(of_times, 1):
            yield f"the router's auxiliary loss is {spelt(times)} times the right one"


def _of_own_time(step: Step) -> Iterator[str]:
    """Yield the mistake of ranks that keep, below the generator, the gradient of their own time steps."""
    found = []
    for rank in range(len(step.got)):
        model = step.case.model(step.group)
        losses = []
        for tokens, target in step.batches:
            parts = [*model(tokens).tensor_split(step.case.inner, 1)]
            parts = [part if k == rank % step.case.inner else part.detach() for k, part in enumerate(parts)]
            losses.append(step.case.loss(model.head(torch.cat(parts, 1)), target))
        found.append(gradients(torch.stack(losses).sum() * step.case.loss_scale / step.case.count, model))
    of_time = step.times(found)
    if of_time and close(of_time, 1):
        yield "not reduced over ranks: below the generator each rank keeps the gradient of its own time steps"


def _elsewhere(step: Step) -> Iterator[str]:
    """Yield the mistakes of ties, of shards and of shifts."""
    yield from _of_some(step)
    if step.case.row.inner == "experts":
        yield from _of_the_router(step)
    if step.case.row.inner == "time and classes":
        yield from _of_own_time(step)
    if step.case.tied:
        model = step.case.model(step.group)
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        uses = step.summed(step.batches, model)
        for use in ("embed.weight", "head.weight"):
            if step.times([{"embed.weight": uses[use]}] * len(step.got)):
                yield f"a missed tie: the shared weight has the gradient of its use in {use.split('.')[0]} alone"
    right = step.right.gradients.get("head.weight")
    if step.case.row.wrap == "fsdp2" and step.case.inner == 1 and right is not None:
        alone = step.weighted(lambda p, m, k: (p == k) / step.case.count)
        rows = torch.arange(len(right)).chunk(len(alone))
        own = torch.cat([alone[k]["head.weight"][r] for k, r in enumerate(rows)])
        if step.times([{"head.weight": own}] * len(step.got)):
            yield "not reduced over ranks: each rank's rows of head.weight have the gradient of its own tokens"
    shifted = [(tokens, F.pad(target[:, 1:], (0, 1), value=IGNORED)) for tokens, target in step.batches]
    if step.times([step.summed(shifted)] * len(step.got)):
        yield "targets shifted twice"
