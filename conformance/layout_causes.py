"""Name the likely cause of a wrong training step over several ranks, from mistakes that `seqpar.testing` tries out.

Shape suffixes: N tokens of all ranks that count, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.layout_cases import IGNORED, SHAPE, Answer, Batch, Case, Model, gradients
from seqpar.testing.causes import likely_cause
from seqpar.testing.evidence import Evidence, Result, close, spell
from seqpar.testing.precision import EXACT, error

Gradients = dict[str, Tensor]
Mistakes = Iterator[tuple[str, Callable[[], Result]]]
"""Sentences that describe a mistake, and functions that compute the answer of a rank that makes it."""


def cause_of(case: Case, group: int, got: Sequence[Answer], right: Answer) -> str:
    """Return the name of the mistake that gives the numbers of the first wrong rank."""
    # With the mean differentiated, no loss is returned
    losses = [right.loss if case.reduction == "mean" else answer.loss for answer in got]
    off = [[error(answer.gradients[name], g) for name, g in right.gradients.items()] for answer in got]
    wrong = [k for k, each in enumerate(off) if not max(each) <= EXACT]
    wrong += [k for k, loss in enumerate(losses) if not close(loss / right.loss, 1)]
    rank = next(iter(wrong), 0)
    loss, found = losses[rank], got[rank].gradients
    if not math.isfinite(loss):
        return f"{NOT_FINITE}, or no loss at all; only the value is wrong"
    if not all(g.isfinite().all() for g in found.values()):
        return f"{NOT_FINITE}; the value is right, only the gradient is wrong"
    ranks_differ = any(
        error(answer.gradients[name], g) > EXACT for answer in got for name, g in got[0].gradients.items()
    )
    step = Step(case, group, rank, right, ranks_differ)
    parts = [_scaled(step.summed(part), 1 / case.count) for part in case.parts(group)]
    rows = SHAPE[0] * SHAPE[1] * len(case.tokens[0])
    # Among ranks with the same tokens the first stands for all
    firsts = [k // case.inner if k % case.inner == 0 else None for k in range(len(got))]
    nothing = _scaled(right.gradients, 0)
    evidence = Evidence(
        (torch.tensor(loss, dtype=torch.float64), found),
        (torch.tensor(right.loss, dtype=torch.float64), right.gradients),
        uses={n: [("step", (nothing if k is None else parts[k])[n]) for k in firsts] for n in right.gradients},
        tokens=sum(case.tokens[step.place]),
        rows=rows,
        divisor=case.count,
        rank=rank,
        counts=[(0, 0) if k is None else (sum(case.tokens[k]), rows) for k in firsts],
        imagined=[*_mistakes(step)],
    )
    return likely_cause(evidence).splitlines()[0].removeprefix("Likely cause: ")


class Step(NamedTuple):
    """A step of one group of ranks, and the one of its ranks whose numbers are wrong."""

    case: Case
    group: int
    rank: int
    right: Answer
    ranks_differ: bool

    @property
    def place(self) -> int:
        """Return the rank's place among those with different tokens."""
        return self.rank // self.case.inner

    @property
    def batches(self) -> list[Batch]:
        """Return the micro-batches of all ranks."""
        return [batch for part in self.case.parts(self.group) for batch in part]

    def model(self) -> Model:
        """Return the model as it is before the step."""
        return self.case.model(self.group)

    def summed(self, batches: Sequence[Batch]) -> Gradients:
        """Return the gradient of the summed loss of these micro-batches."""
        model = self.model()
        return gradients(self.case.summed(model, batches) * self.case.loss_scale, model)

    def result(self, model: Model, total: Tensor) -> tuple[Tensor, Gradients]:
        """Return the answer of a model whose summed loss is `total`."""
        loss = total / self.case.count
        return loss.detach(), gradients(loss * self.case.loss_scale, model)

    def mean_of(self, batches: Sequence[Batch]) -> Result:
        """Return the right answer except for the gradient, which is that of these micro-batches' mean loss."""
        count = sum(int((target != IGNORED).sum()) for _, target in batches)
        return self.with_gradients(_scaled(self.summed(batches), 1 / max(1, count)))

    def with_gradients(self, found: Gradients) -> Result:
        """Return the right answer except for these gradients."""
        return torch.tensor(self.right.loss, dtype=torch.float64), self.right.gradients | found

    def weighted(self, weight: Callable[[int, int], float]) -> Result:
        """Return the answer if micro-batches are summed with the weights `weight(place, micro_batch)`."""
        total = {name: torch.zeros_like(g) for name, g in self.right.gradients.items()}
        for place, part in enumerate(self.case.parts(self.group)):
            for number, batch in enumerate(part):
                if factor := weight(place, number):
                    for name, gradient in self.summed([batch]).items():
                        total[name] += factor * gradient
        return self.with_gradients(total)

    def scaled(self, times: float) -> Result:
        """Return the answer with all gradients multiplied."""
        return self.with_gradients(_scaled(self.right.gradients, times))


def _scaled(found: Gradients, times: float) -> Gradients:
    """Return gradients times a number."""
    return {name: gradient * times for name, gradient in found.items()}


NOT_FINITE = "a number that is not finite, such as 0 / 0 tokens"


def _mistakes(step: Step) -> Mistakes:
    """Yield the mistakes that a layout can have, the most specific first, after the right step, which has no name."""
    yield "", lambda: step.with_gradients({})
    for name, values in factors(step.case).items():
        for times in filter(lambda times: times != 1, values):
            yield f"{name}: all gradients are {spell(times)} times the right ones", partial(step.scaled, times)
    if step.case.row.splits_classes:
        nothing = torch.zeros(1, step.case.vocab_size), torch.zeros(1, dtype=torch.int64)
        for mistake, (name, _) in enumerate(splittings(step.case, 0, *nothing)):
            yield name, partial(_split, step, mistake)
    for name, weight in _weights(step):
        yield name, partial(step.weighted, weight)
    yield from _elsewhere(step)
    yield "targets shifted twice", partial(_shifted, step)


def _elsewhere(step: Step) -> Mistakes:
    """Yield the mistakes that concern routers, time steps, ties and shards."""
    if step.case.row.inner == "experts":
        yield from _of_the_router(step)
    if step.case.row.inner == "time and classes":
        alone = "not reduced over ranks: {} each rank keeps the gradient of its own time steps"
        yield alone.format("below the generator"), partial(_own_time, step)
        for name in step.right.gradients:
            yield alone.format(f"of {name}"), partial(_own_time, step, name)
    if len(step.case.tokens) > 1:
        yield "not reduced over ranks: each rank reports the loss of its own tokens", partial(_own_loss, step)
        for what in ("activations", "padding"):
            yield f"a collective over the wrong group: {what} of another rank", partial(_of_another, step, what)
    if step.case.stage_count > 2:
        said = "layers of another stage: their numbers within a stage are taken for those in the model"
        yield said, partial(_first_layer, step)
    for use in ("embed", "head") if step.case.tied else ():
        said = f"a missed tie: the shared weight has the gradient of its use in {use} alone"
        yield said, partial(_untied, step, f"{use}.weight")
    if step.case.row.wrap == "fsdp2" and step.case.inner == 1 and "head.weight" in step.right.gradients:
        for times in (1, len(step.case.tokens)):
            said = "not reduced over ranks: each rank's rows of head.weight have the gradient of its own tokens"
            yield said, partial(_own_rows, step, times)


def factors(case: Case) -> dict[str, list[float]]:
    """Return the factors by which each mistake with a divisor multiplies all gradients."""
    n, lost = case.count, sum(map(sum, case.tokens))
    ranks, batches = len(case.tokens), len(case.tokens[0])
    rows = SHAPE[0] * SHAPE[1] * batches
    return {
        "divided by the tokens of the rank that is lost, too": [n / lost],
        "divided by ranks twice": [1 / ranks, 1 / case.inner, 1 / case.groups],
        "multiplied by the number of ranks once too often": [ranks, case.inner],
        "divided by the number of micro-batches as well as by the tokens": [1 / batches, 1 / (batches * ranks)],
        "not divided by the tokens": [n, n / ranks, n / batches, n / (ranks * batches)],
        "divided by all rows, including padding": [n / (rows * ranks), n / rows],
        "the loss scale is missing": [1 / case.loss_scale],
        "the loss scale is applied twice": [case.loss_scale],
    }


def _weights(step: Step) -> Iterator[tuple[str, Callable[[int, int], float]]]:
    """Yield the mistakes that give micro-batches weights other than 1 / all tokens."""
    case, mine = step.case, step.place
    each = [[max(1, count) for count in part] for part in case.tokens]
    own = [max(1, sum(part)) for part in case.tokens]
    of_row = [max(1, sum(map(sum, case.tokens[p - p % case.near :][: case.near]))) for p in range(len(own))]
    alone = "not reduced over ranks: each rank keeps the gradient of its own tokens"
    of_ranks = "mean of means: each rank divides by its own tokens, not by those of all"
    of_batches = "mean of means: each micro-batch is divided by its own tokens, not by those of the step"
    if step.ranks_differ:
        yield alone, lambda p, m: (p == mine) * len(own) / case.count
        yield alone, lambda p, m: (p == mine) / own[p]
        yield alone, lambda p, m: (p == mine) / each[p][m]
    yield of_ranks, lambda p, m: 1 / own[p] / len(own)
    rows = "mean of means: ranks divide by the tokens of their row of the mesh"
    yield rows, lambda p, m: 1 / of_row[p] / case.row.outer
    yield of_batches, lambda p, m: 1 / each[p][m] / (len(own) * len(each[p]))
    # As of a loss that is normalised by its own targets, such as the next but one, and weighted by the usual ones
    shifted = [sum(int((t[:, 1:] != IGNORED).sum()) for _, t in part) for part in case.parts(step.group)]
    ratios = "each rank's loss is scaled by a ratio of its own counts, not by that of the step's"
    yield ratios, lambda p, m: own[p] / max(1, shifted[p]) / case.count
    for which, kept in (("last", len(each[0]) - 1), ("first", 0)):
        said = f"only the gradient of the {which} micro-batch is kept"
        yield said, lambda p, m, k=kept: (m == k) / case.count  # type: ignore[misc]


def _of_the_router(step: Step) -> Mistakes:
    """Yield the mistakes that change the router's loss."""
    case = step.case

    def answer(times: float) -> Result:
        model = step.model()
        return step.with_gradients(step.result(model, case.summed(model, step.batches, times))[1])

    for times in (0, case.near, 1 / case.near, len(case.tokens), 1 / len(case.tokens), case.row.outer):
        yield f"the router's auxiliary loss is {spell(times)} times the right one", partial(answer, times)


def _own_loss(step: Step) -> Result:
    """Return the answer of a rank that reports the mean over its own tokens."""
    part = step.case.parts(step.group)[step.place]
    own = step.case.summed(step.model(), part).detach() / max(1, sum(step.case.tokens[step.place]))
    return own, step.right.gradients


def _of_another(step: Step, what: str) -> Result:
    """Return the answer if each rank uses the next rank's activations, or its padding, instead of its own."""
    parts, batches = step.case.parts(step.group), []
    for part, others in zip(parts, [*parts[1:], parts[0]], strict=True):
        for (tokens, target), (their_tokens, their_target) in zip(part, others, strict=True):
            if what == "activations":
                batches.append((their_tokens, target))
            else:
                batches.append((tokens, target.where(their_target != IGNORED, IGNORED)))
    return step.mean_of(batches)


def _first_layer(step: Step) -> Result:
    """Return the answer if every stage has the first layer's weights."""
    model = step.model()
    for layer in model.layers:
        layer.load_state_dict(model.layers[0].state_dict())
    return step.result(model, step.case.summed(model, step.batches))


def _own_time(step: Step, name: str = "") -> Result:
    """Return the answer of a rank that keeps the gradient from its own time steps, for one parameter or for all."""
    model, losses = step.model(), []
    for tokens, target in step.batches:
        parts = [*model(tokens).tensor_split(step.case.inner, 1)]
        parts = [part if k == step.rank % step.case.inner else part.detach() for k, part in enumerate(parts)]
        losses.append(step.case.loss(model.head(torch.cat(parts, 1)), target))
    _, found = step.result(model, torch.stack(losses).sum())
    return step.with_gradients({name: found[name]} if name else found)


def _untied(step: Step, use: str) -> Result:
    """Return the answer if the shared weight has the gradient of only one of its uses."""
    model = step.model()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    _, found = step.result(model, step.case.summed(model, step.batches))
    return step.with_gradients({"embed.weight": found[use]})


def _own_rows(step: Step, times: float) -> Result:
    """Return the answer if each rank's rows of the generator have the gradient of only this rank's tokens."""
    parts = [step.summed(part)["head.weight"] for part in step.case.parts(step.group)]
    rows = torch.arange(len(parts[0])).chunk(len(parts))
    own = torch.cat([part[r] for part, r in zip(parts, rows, strict=True)])
    return step.with_gradients({"head.weight": own * times / step.case.count})


def _shifted(step: Step) -> Result:
    """Return the answer if the targets, which are already the next tokens, are shifted once more."""
    return step.mean_of([(tokens, F.pad(target[:, 1:], (0, 1), value=IGNORED)) for tokens, target in step.batches])


def _split(step: Step, mistake: int) -> Result:
    """Return the answer of a rank that makes a mistake with a split vocabulary; the generator's rows are joined."""
    case, answers = step.case, []
    for number in range(case.inner):
        model = step.model()
        logits_NV = torch.cat([model.head(model(tokens)).flatten(0, 1) for tokens, _ in step.batches])
        target_N = torch.cat([target.flatten() for _, target in step.batches])
        kept = target_N != IGNORED
        losses_N = splittings(case, number, logits_NV[kept], target_N[kept])[mistake][1]
        answers.append(step.result(model, losses_N.sum()))
    value, found = answers[step.rank % case.inner]
    if mistake == SUMMED:
        found = {n: torch.stack([of[n] for _, of in answers]).sum(0) for n in found}
    name = "embed.weight" if case.tied else "head.weight"
    if name in found:
        rows = [slice(*case.rows_of(number)) for number in range(case.inner)]
        found[name] = torch.cat([of[name][r] for (_, of), r in zip(answers, rows, strict=True)])
    return value, found


MISSING = "gradient of one rank's classes missing"
REACHES = f"{MISSING}: a token reaches only the classes of the rank that has its target"
LOG_RANKS = "off by log(ranks): gathered logits are taken for shards, which adds the log of their number to the loss"
SUMMED = 2
"""The index of the mistake in which the hidden gradient is summed over the vocabulary's ranks, as it should be."""


def splittings(case: Case, number: int, logits_NV: Tensor, target_N: Tensor) -> list[tuple[str, Tensor]]:
    """Return the mistakes that a rank can make with a split vocabulary, and the losses with each of them."""
    first, end = case.rows_of(number)
    mine_V = (torch.arange(case.vocab_size) >= first) & (torch.arange(case.vocab_size) < end)
    owned_N = mine_V[target_N]
    eps, mine_NV, missing = case.label_smoothing, logits_NV[:, mine_V], -case.vocab_size % case.inner
    # A share eps v / (v - 1) over v local classes is intended for those other than the target
    sizes = [v / (v - 1) for v in (end - first, case.vocab_size) if v > 1]

    def losses(of: Tensor = logits_NV, share: float = eps, **other: Tensor) -> Tensor:
        picked = other.get("picked", of.gather(1, target_N.unsqueeze(1)).squeeze(1))
        return other.get("lse", of.logsumexp(1)) - (1 - share) * picked - share * other.get("mean", of.mean(1))

    of_part_N = losses(logits_NV.where(mine_V, logits_NV.detach()))
    picked_N = logits_NV.gather(1, target_N.unsqueeze(1)).squeeze(1)
    uneven = "uneven parts: each rank's classes are taken to begin at its number times its own number of classes"
    return [
        (LOG_RANKS, losses() + math.log(case.inner)),
        (f"{MISSING}: the hidden gradient is not summed over the vocabulary's ranks", of_part_N),
        (REACHES, of_part_N * owned_N),
        (REACHES, of_part_N * owned_N),
        ("the softmax has no gradient: only the target's logit has one", losses(lse=logits_NV.detach().logsumexp(1))),
        ("the softmax is over one rank's classes", losses(lse=mine_NV.logsumexp(1))),
        ("the target's logit counts only on the rank that has it", losses(picked=picked_N * owned_N)),
        (uneven, losses(picked=_found_unevenly(case, logits_NV, target_N))),
        ("padded classes are counted in the softmax", losses(F.pad(logits_NV, (0, missing)))),
        ("smoothing spread over the local classes", losses(mean=mine_NV.mean(1))),
        ("smoothing spread over the local classes", losses(share=eps * sizes[0] / sizes[-1], mean=mine_NV.mean(1))),
        ("label smoothing is left out", losses(share=0)),
    ]


def _found_unevenly(case: Case, logits_NV: Tensor, target_N: Tensor) -> Tensor:
    """Return the targets' logits if each rank's classes begin at its number times the number of its own classes."""
    picked_N = torch.zeros_like(logits_NV[:, 0])
    for number in range(case.inner):
        first, end = case.rows_of(number)
        local_N = target_N - number * (end - first)
        here_N = (local_N >= 0) & (local_N < end - first)
        rows_N1 = (first + local_N).where(here_N, 0).unsqueeze(1)
        picked_N = picked_N + logits_NV.gather(1, rows_N1).squeeze(1) * here_N
    return picked_N
