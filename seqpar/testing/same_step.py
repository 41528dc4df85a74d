"""Compare one step of any trainer, in each layout, with the step of a single process that has the whole batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from operator import attrgetter

import torch
from torch import Tensor

from seqpar.core.checks import check_function, check_number
from seqpar.testing.causes import likely_cause
from seqpar.testing.evidence import NEVER, SAME, Evidence, Repeated
from seqpar.testing.gradients import ROUNDING, RTOL, difference, is_shown, size_of
from seqpar.testing.precision import TWICE, error, spell_error
from seqpar.testing.share_causes import parts_of_step
from seqpar.testing.step_run import Layout, Ran, Run, Trainer, alone, run

__tracebackhide__ = True  # pytest shows the call that failed, and the sentence
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FROZEN = 1e-9
"""The relative difference up to which losses of different sentences and weights count as the same."""
MOST_TOKENS = 10_000
"""The largest number of tokens in a step that is inferred from the shares of its sentences."""
TIMES = 10
"""A parameter may be off after the step by this many times sqrt(rtol) of its update, plus this many roundings."""
AFTER = "after the step"
UNMOVED = "is not changed by the step"
DIGITS = 4
"""The number of decimals to which some trainers round the loss that they report."""


def assert_same_step(
    make_trainer: Callable[[Layout], Trainer],
    layouts: Sequence[Layout],
    *,
    rtol: float = RTOL,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Assert that a trainer's step is, in each layout, the step of one process with all its sentences at once.

    Plain equivalent: train for one step in each layout with the same model and sentences, and compare the reported
    loss, every gradient, the optimizer's state, and every parameter after the step. Any trainer will do. Gradients are
    read at `torch.optim.Optimizer.step`; if none is seen there, updates are compared instead. Gradients are compared
    as they are before `torch.nn.utils` clips them, because clipping would hide a factor.

        def make_trainer(layout):
            model = ...                                       # in layout.dtype; torch's seed is the same in every call
            trainer = Trainer(model, ..., train_dataset=layout.step(sentences),
                              batch_size=len(layout.step(sentences)) // layout.parts)
            return model, lambda: trainer.train_one_step()    # returns the loss as reported

        assert_same_step(make_trainer, [Layout(accumulation=4), Layout(ranks=2), Layout(ranks=2, kind="fsdp2")])

    Args:
        make_trainer: builds model and trainer for a layout, and returns the model and a function that trains it for one
            step and returns the reported loss, or None in ranks that report none. Both run in new processes, over gloo
            on the CPU; with several ranks `torch.distributed` is already initialised. Switch off dropout.
        layouts: what to compare. Ranks may take different sentences, or all the same (`kind="tensor parallel"`), as
            in your trainer. Use sentences of different lengths: with equal ones a mean of means is right.
        rtol: the largest difference allowed in float64, relative to the largest entry of the reference. Decoder-only
            models of transformers cast their logits to float32: 1e-5 for them.
        dtype: `layout.dtype`. In a dtype other than float64, a step may be at most twice as far from one process's
            step in float64 as one process's step in this dtype is.

    Raises:
        AssertionError: a step that differs; the message names the likely cause, what differs and by how much, the first
            module that does, and the call that shows it. Also a step that trains nothing: all gradients 0, unchanged
            parameters, or a loss that is the same whatever the weights and the sentences are. Also gradients whose norm
            is the same whatever the weights and the sentences are, as after clipping by your own code.
        ValueError, TypeError: invalid arguments, or a trainer that does more or less than one step.

    Example:
        >>> from seqpar.testing import Layout, assert_same_step
        >>> sentences = [torch.randint(9, (n, 2)) for n in (2, 5, 3, 7)]  # (input, target) of n tokens each
        >>> def make_trainer(layout):
        ...     model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).to(layout.dtype)
        ...     optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ...     def step():
        ...         batches = [torch.cat(batch) for batch in layout.micro_batches(sentences)]
        ...         losses = [F.cross_entropy(model(b[:, 0]), b[:, 1]) / len(batches) for b in batches]
        ...         sum(losses).backward()
        ...         optimizer.step()
        ...         return sum(losses)
        ...     return model, step
        >>> assert_same_step(make_trainer, [Layout(accumulation=2)])
        Traceback (most recent call last):
            ...
        AssertionError: Likely cause: mean of means: each micro-batch is divided by its own tokens...
    """
    check_number(rtol, "rtol", at_least=0)
    check_function(make_trainer, "make_trainer")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(map(str, DTYPES))}")
    _check_layouts(layouts)
    plain = Layout(dtype=dtype)
    shaken = (Run(one, other_weights=True) for one in (plain, alone(plain, 0)))
    (reference,), *others = run(make_trainer, Run(plain), *shaken)
    _refuse_untrained(plain, [reference])
    alike = [reference, *(ran for (ran,) in others)]
    _refuse_frozen(alike)
    _refuse_normalised(alike)
    truth = reference
    if dtype != torch.float64:
        ((truth,),) = run(make_trainer, Run(Layout()))
    for layout in layouts:
        layout = replace(layout, dtype=dtype)
        (ranks,) = run(make_trainer, Run(layout))
        _refuse_untrained(layout, ranks)
        trial = _Trial(make_trainer, layout, ranks, reference, truth, rtol)
        if differences := trial.differences():
            raise AssertionError(trial.message(differences))


def _check_layouts(layouts: object) -> None:
    """Raise TypeError or ValueError unless this is a sequence of at least one layout."""
    if not isinstance(layouts, Sequence) or not all(isinstance(one, Layout) for one in layouts):
        raise TypeError(f"layouts is {layouts!r:.80}; it must be a list such as [Layout(accumulation=4)]")
    if not layouts:
        raise ValueError("layouts is empty; name at least one, such as Layout(accumulation=4)")


def _refuse_untrained(layout: Layout, ranks: Sequence[Ran]) -> None:
    """Raise AssertionError if a step trains nothing, ValueError if it reports no loss."""
    if all(one.loss is None for one in ranks):
        raise ValueError(f"{layout}: the step returned no loss; return the loss that the trainer reports")
    moved = {name for one in ranks for name, p in one.after.items() if not torch.equal(p, one.before[name])}
    gradients = [g for one in ranks for g in one.gradients.values()]
    if gradients and not any(g.any() for g in gradients):
        raise AssertionError(f"{layout}: nothing is trained: every gradient is 0")
    if not moved:
        seen = "there are gradients; is the first step's learning rate 0, as in a warm-up?"
        if not gradients:
            seen = "no optimizer had a gradient; does the function train for a step?"
        raise AssertionError(f"{layout}: nothing is trained: no parameter changes; {seen}")


def _refuse_frozen(runs: Sequence[Ran]) -> None:
    """Raise AssertionError if the loss is the same with different weights, and for one sentence as for all.

    A loss of 0 is exempt: GRPO's is 0 in its first step, where the advantages add up to 0.
    """
    losses = [float(one.loss) for one in runs]
    if abs(losses[0]) > SAME and all(math.isclose(loss, losses[0], rel_tol=FROZEN) for loss in losses):
        raise AssertionError(
            f"nothing is trained: the loss is {losses[0]:.6g} with other weights as well, for one sentence as for all; "
            "is what the model returns used, and is it the loss that is reported?"
        )


def _refuse_normalised(runs: Sequence[Ran]) -> None:
    """Raise AssertionError if gradients have the same norm with different weights, and for one sentence as for all."""
    norms = [math.hypot(*(float(g.double().norm()) for g in one.gradients.values())) for one in runs]
    is_alike = all(math.isclose(norm, norms[0], rel_tol=FROZEN) for norm in norms)
    if runs[0].sentences > 1 and norms[0] > 0 and is_alike:
        raise AssertionError(
            f"the gradients have the norm {norms[0]:.6g} with other weights as well, for one sentence as for all: they "
            "are clipped or normalised by other means than those of torch.nn.utils, which would hide a factor; leave "
            "that out here"
        )


@dataclass
class _Trial:
    """A layout's step, compared with that of one process."""

    make_trainer: Callable[[Layout], Trainer]
    layout: Layout
    ranks: Sequence[Ran]
    reference: Ran
    """One process's step in the same dtype."""
    truth: Ran
    """One process's step in float64."""
    rtol: float

    def differences(self) -> dict[str, tuple[int, str]]:
        """Return, by parameter name, the rank in which it differs and how; the loss has the name ""."""
        found: dict[str, tuple[int, str]] = {}
        for rank, one in enumerate(self.ranks):
            if one.loss is not None and (off := self._loss_off(float(one.loss))):
                found.setdefault("", (rank, off))
        compared: dict[str, Callable[[Ran], Mapping[str, Tensor]]] = {"the update of ": _updates}
        if self.truth.gradients:
            compared = {"the gradient of ": attrgetter("gradients"), "the ": attrgetter("state")}
        for kind, of in compared.items():
            for what, rank, off in self._tensors_off(kind, of):
                # "exp_avg of head.weight" belongs to a parameter
                found.setdefault(what.rpartition(" of ")[2], (rank, off))
        for name, rank, off in self._weights_off():
            found.setdefault(name, (rank, off))
        return found

    def _tensors_off(self, kind: str, of: Callable[[Ran], Mapping[str, Tensor]]) -> Iterator[tuple[str, int, str]]:
        """Yield what differs, in which rank, and how, in the model's order."""
        right, plainly = of(self.truth), of(self.reference)
        # The largest number in all gradients, or in all "exp_avg of ..."
        largest: dict[str, float] = {}
        for what, tensor in right.items():
            alike = what.rpartition(" of ")[0]
            largest[alike] = max(size_of(tensor), largest.get(alike, 0.0))
        for what, expected in right.items():
            got = {rank: of(one)[what] for rank, one in enumerate(self.ranks) if what in of(one)}
            # A pipeline rank has only its own layers
            if not got and expected.any():
                yield what, 0, f"{kind}{what} is missing in every rank"
            size = largest[what.rpartition(" of ")[0]]
            off = {r: self._off(f"{kind}{what}", t, expected, plainly.get(what), size) for r, t in got.items()}
            yield from [(what, rank, said) for rank, said in off.items() if said][:1]

    def _weights_off(self) -> Iterator[tuple[str, int, str]]:
        """Yield the parameters that differ after the step, in which rank, and how, in the model's order."""
        for name in self.truth.after:
            there = [(rank, one) for rank, one in enumerate(self.ranks) if name in one.after]
            for rank, one in there:
                if off := self._weight_off(name, one, there[0][1]):
                    if torch.equal(one.after[name], one.before[name]):
                        off = UNMOVED
                    yield name, rank, f"{name} {off}"
                    break

    @cached_property
    def _largest_gradient(self) -> float:
        return max((size_of(gradient) for gradient in self.truth.gradients.values()), default=0.0)

    @cached_property
    def _largest_update(self) -> float:
        return max((size_of(update) for update in _updates(self.truth).values()), default=0.0)

    def _weight_off(self, name: str, one: Ran, first: Ran) -> str:
        """Say how a parameter differs after the step, or return ""; `first` is the first rank that has it."""
        mine, grad, other = (ran.gradients.get(name) for ran in (one, self.truth, first))
        if self.truth.gradients and grad is None and mine is not None and mine.any():
            return f"has a gradient and differs {AFTER}, and in one process it has none"
        mine_after, first_after = one.after[name], first.after[name]
        # In low precision little else can be checked: steps with the same gradient are the same
        is_same_gradient = mine is None or other is None or torch.equal(mine, other)
        is_comparable = self.truth is not self.reference and mine_after.shape == first_after.shape
        if is_comparable and is_same_gradient and not torch.equal(mine_after, first_after):
            return f"differs from that of the first rank {AFTER}"
        # A frozen parameter may have an integer dtype
        got, right, before, plain = (
            p.double()
            for p in (mine_after, self.truth.after[name], self.truth.before[name], self.reference.after[name])
        )
        # A plain slice of a larger parameter cannot be compared
        if got.shape != right.shape:
            return ""
        dtype = mine_after.dtype
        eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        # Relative to the update: in low precision its gradient has that precision's rounding
        share = TIMES * max(math.sqrt(self.rtol), eps if self.truth is not self.reference else 0.0)
        noise = torch.zeros_like(right, dtype=torch.bool)
        if grad is not None:
            # Adam divides a gradient by its size, so the noise of a gradient near 0 becomes large
            least = share / TIMES * self._largest_gradient
            noise = (grad.abs() <= least) & ((grad != 0) | (mine is not None) & (grad != mine))
        update = size_of(right - before)
        rounding = TIMES * eps * size_of(right) + TWICE * size_of(plain - right)
        # Noise may move a parameter either way
        allowed = torch.where(noise, TWICE * self._largest_update, share * update) + rounding
        apart = (got - right).abs()
        # Not `any(apart > ...)`, which is false for nan
        if (apart <= allowed).all():
            return ""
        return f"is off by {apart.max().item():.3g} {AFTER}, whose update is {update:.3g} large"

    def _off(self, what: str, got: Tensor, right: Tensor, plainly: Tensor | None, largest: float) -> str:
        """Say how a tensor differs; return "" if it does not."""
        if self.truth is self.reference or got.shape != right.shape:
            return difference(what, got, right, self.rtol, ROUNDING * largest)
        eps = torch.finfo(self.layout.dtype).eps
        # What is 0 in exact arithmetic is rounding noise in every dtype
        if size_of(right) <= ROUNDING * largest and size_of(got) <= eps * largest:
            return ""
        off, own = (error(t if t is None else t.double(), right.double()) for t in (got, plainly))
        if off <= max(TWICE * own, TWICE * eps):
            return ""
        return f"{spell_error(what, got.double(), right)}, where one process in this dtype is off by {own:.2g}"

    def _loss_off(self, loss: float) -> str:
        """Say how a reported loss differs; return "" if it does not."""
        right, plainly = float(self.truth.loss), float(self.reference.loss)
        allowed = max(self.rtol * abs(right), *(_unit(n) * (2 + self.layout.parts) for n in (loss, plainly)))
        if self.truth is not self.reference:
            eps = torch.finfo(self.layout.dtype).eps * abs(right)
            allowed = max(allowed, TWICE * abs(plainly - right), TWICE * eps)
        # Not `> allowed`, which is false for nan
        if abs(loss - right) <= allowed:
            return ""
        return f"the loss is reported as {loss:.8g} where {right:.8g} is right"

    def message(self, differences: Mapping[str, tuple[int, str]]) -> str:
        """Return the likely cause, what differs, the first module that differs, and the call that shows it."""
        order = [name for name in self.truth.after if name in differences]
        rank, off = differences[""] if "" in differences and not order else differences[order[0]]
        said = [f"{self.layout}: {off}" + f", in rank {rank}" * (self.layout.ranks > 1)]
        if "" in differences and order:
            said.append(differences[""][1])
        if order:
            module = order[0].rpartition(".")[0] or "the model itself"
            said.append(
                f"the first module that differs is {module}, and {len(order)} of {len(self.truth.after)} parameters do"
            )
        cause = f"{self._cause(rank, off)}\n" if is_shown() else ""
        return f"{cause}{'; '.join(said)}\n{self._call()}"

    def _cause(self, rank: int, off: str) -> str:
        """Return the likely cause."""
        if off.endswith(UNMOVED):
            return "Likely cause: no optimizer steps it there, because loss and gradients are right"
        if AFTER in off:
            return (
                "Likely cause: clipping, or what changes the weights beside the optimizer, such as a decay or an "
                "average, because loss, gradients and the optimizer's state are right"
            )
        if not off.startswith(("the loss", "the gradient", "the update")):
            return "Likely cause: other settings of the optimizer, or clipping, because loss and gradients are right"
        return likely_cause(self._evidence(rank))

    def _call(self) -> str:
        """Return the lines of code that reproduce this failure alone."""
        given = {"ranks": self.layout.ranks, "accumulation": self.layout.accumulation, "kind": self.layout.kind}
        layout = ", ".join(f"{name}={value!r}" for name, value in given.items() if value != getattr(Layout(), name))
        options = f", dtype={self.layout.dtype}" * (self.layout.dtype != torch.float64)
        options += f", rtol={self.rtol:g}" * (self.rtol != RTOL)
        name, module = (getattr(self.make_trainer, word, "make_trainer") for word in ("__qualname__", "__module__"))
        lines = [
            "    from seqpar.testing import Layout, assert_same_step",
            f"    from {module} import {name}",
            f"    assert_same_step({name}, [Layout({layout})]{options})",
        ]
        if getattr(sys.modules.get(module), name, None) is not self.make_trainer or module == "__main__":
            del lines[1]
        return "\n".join(lines)

    def _evidence(self, rank: int) -> Evidence:
        """Return a rank's numbers, from which the cause is inferred."""
        got, right = (_result(one) for one in (self.ranks[rank], self.truth))
        if self.ranks[rank].loss is None:
            got = (right[0] if "" not in self.differences() else got[0], got[1])
        *means, other = self._other_runs()
        parts, weights = parts_of_step(right[1], [mean.gradients for mean in means])
        again = NEVER
        # Both in the same dtype, because rounding is not randomness
        if not math.isclose(float(other.loss), float(self.reference.loss), rel_tol=SAME, abs_tol=SAME):
            again = Repeated([float(other.loss)], [float(self.truth.loss)])
        first = [self.ranks[0].gradients, self.ranks[rank].gradients, self.ranks[-1].gradients]
        return Evidence(
            got,
            right,
            rank=rank,
            counts=[(0, 0)] * self.layout.ranks * (self.layout.ranks > 1),
            again=again,
            parts=parts,
            weights=weights,
            divisor=math.lcm(*(Fraction(weight).limit_denominator(MOST_TOKENS).denominator for weight in weights)),
            micro_batches=self.layout.parts,
            ranks_differ=any(_differ(one, other) for one in first for other in first),
            dtype=self.layout.dtype,
        )

    def _other_runs(self) -> list[Ran]:
        """Return one process's steps with each sentence alone, then one with different random numbers."""
        sentences = range(self.truth.sentences)
        runs = [Run(alone(Layout(), sentence)) for sentence in sentences]
        plain = Layout(dtype=self.layout.dtype)
        return [ran for (ran,) in run(self.make_trainer, *runs, Run(plain, other_random_numbers=True))]


def _updates(ran: Ran) -> dict[str, Tensor]:
    """Return by how much each parameter changes; in float64 for integer parameters."""
    dtypes = {name: after.dtype if after.is_floating_point() else torch.float64 for name, after in ran.after.items()}
    return {name: ran.after[name].to(dtype) - ran.before[name].to(dtype) for name, dtype in dtypes.items()}


def _result(ran: Ran) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the loss and the gradients (the updates if no optimizer was seen) in float64."""
    found = ran.gradients or _updates(ran)
    loss = math.nan if ran.loss is None else float(ran.loss)
    return torch.tensor(loss, dtype=torch.float64), {name: g.double() for name, g in found.items()}


def _differ(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether two ranks have different gradients for a parameter that both hold in full."""
    return any(not torch.allclose(one[n], other[n], rtol=SAME, atol=0) for n in one if n in other)


def _unit(loss: float) -> float:
    """Return the unit in the last place of a loss that its trainer keeps in float32 or rounds to a few decimals."""
    if round(loss, DIGITS) == loss:
        return 10.0**-DIGITS
    if float(torch.tensor(loss, dtype=torch.float32)) == loss:
        return torch.finfo(torch.float32).eps * abs(loss)
    return 0.0
