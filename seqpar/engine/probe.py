"""Ask on a few rows whether a pair may be computed chunk by chunk, on copies, with gradients taken at factor one.

That gives the plain loss and its gradient if and only if the pair

- treats each row alone: its scores, by value and by gradient (d scores_i / d hidden_j must be 0 for i != j, which is
  exact in every dtype, in every mode and with dropout), and its loss, in the company of other rows and without;
- has a backward that is linear, and writes nowhere else;
- keeps nothing between calls that it reads again. Buffers may add up over rows, as a histogram of predictions does; one
  that is replaced is lost with the copy, and a moving average or a power iteration would run once for each chunk;
- is what was matched, where a closed form stands in for it;
- ignores exactly the target that it says.

What is random, for example by dropout, is asked again in evaluation mode. Nothing here finds mixing of distant rows
only, nor what rarely acts. The probe is made again when another code may run (`Situation`): in another mode or dtype,
as batch normalisation mixes rows in training only, and after hooks, submodules, buffers, flags or the number of
hidden's dimensions have changed; other numbers are not noticed.

Shape suffixes: K probed rows, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from seqpar.core.checks import refuse_reentrant
from seqpar.core.chunks import CPU_BUDGET, recording
from seqpar.core.graphs import graph_of_its_own
from seqpar.core.row_independence import (
    Answer,
    Change,
    ask,
    ask_alone,
    change_in_company,
    largest_difference,
    rounding_of,
)
from seqpar.core.token_loss import TokenLoss
from seqpar.engine.at_fault import first_scores
from seqpar.engine.effects import OF_A_COPY, Held, graphs_held, random_states_kept
from seqpar.engine.formula_match import FormulaMatch, check_class_weight
from seqpar.engine.module_calls import parts_of
from seqpar.engine.pair import counts_itself, criterion_loss
from seqpar.engine.shards import Shard, check_targets
from seqpar.engine.situation import LogitFacts, Situation
from seqpar.engine.trial import Outcome, Trial
from seqpar.linear.cross_entropy import linear_cross_entropy
from seqpar.linear.leaves import product_dtype
from seqpar.multi_device.replicas import bind
from seqpar.rows.criteria import ignored_target

PROBE_ROWS = 4
"""Two sequences of two time steps."""

REPEATS = 16
"""How often the same rows must give the same result before a module counts as deterministic."""

MOST_COMPANY = 128
"""The most rows in whose company a criterion is asked for each row: a hundredth, that it may leave out, is one."""

COMPANY_BYTES = CPU_BUDGET
"""The most bytes of these rows' scores; of a large vocabulary there are fewer."""

HALVES = "the gradient of a half of the rows plus that of the other"

CLOSE = 1e-3
"""The relative difference of a buffer's sum that rounding may make, in any dtype."""

MOST_SITUATIONS = 256
"""How many situations are remembered: more than there are lengths of sources, over which a copy generator attends; but
one with a hook that is made anew for each step never comes back."""


def logit_facts(
    known: dict[Situation, LogitFacts],
    situation: Situation,
    found: LogitFacts | None,
    original: nn.ModuleDict,
    heads: Sequence[nn.ModuleDict],
    shards: Sequence[Shard],
) -> LogitFacts:
    """Return the facts about these inputs, those found already or a probe's, after checking every target.

    Args:
        known: the facts found so far; new ones are added.
        found: what `facts_in` returned.
        original: generator and criterion.
        heads: the replicas of both, one per shard.

    Raises:
        IndexError: a target outside the vocabulary.
        TypeError, ValueError: a generator or criterion that violates a requirement.
        RuntimeError: the facts are not known and a CUDA graph is being captured.
    """
    hidden = shards[0].hidden
    if recording(hidden.device):
        found = _facts_while_recording(known, situation)
    if found is not None and found.criterion_is_checked:
        check_targets(shards, found.vocab_size)
        return found
    # One shard is enough, because all replicas run the same code; the first may have nothing but padding
    for head, shard in zip(heads, shards, strict=True):
        index_K = _spread(shard.counted.flatten())
        if len(index_K):
            probe = _Probe((head, original), shard, index_K, situation)
            facts = probe.facts(lambda size: check_targets(shards, size))
            known[situation] = facts
            for earliest in list(known)[:-MOST_SITUATIONS]:
                known.pop(earliest, None)
            return facts
    # Every target is ignored, so there is nothing to project and the size of the vocabulary does not matter
    return LogitFacts(vocab_size=1, dtype=hidden.dtype, criterion_is_checked=False)


def _facts_while_recording(known: Mapping[Situation, LogitFacts], situation: Situation) -> LogitFacts:
    """Return the facts found in any mode or dtype: no number can be read while a CUDA graph is captured."""
    for earlier, facts in known.items():
        if earlier.shapes == situation.shapes and facts.criterion_is_checked:
            return facts
    raise RuntimeError(
        "the first call of the engine is being captured in a CUDA graph, but it has to read some logits; call the "
        "engine once before the capture (torch.cuda.graph needs a warm-up in any case)"
    )


def _spread(counted_N: Tensor) -> Tensor:
    """Return `PROBE_ROWS` rows that are not ignored, spread over the batch.

    Some are repeated if there are fewer; if every row is ignored, the result is empty.
    """
    indices_K = counted_N.nonzero().squeeze(1)
    if not len(indices_K):
        return indices_K
    return indices_K[torch.arange(PROBE_ROWS, device=indices_K.device) * len(indices_K) // PROBE_ROWS]


def gives_formula(
    heads: tuple[nn.ModuleDict, nn.ModuleDict], match: FormulaMatch, shard: Shard, wanted: bool
) -> bool | None:
    """Return whether a pair, called on a few rows, gives the loss and the gradient of its closed form.

    It does not where others have replaced `F.cross_entropy`, `F.linear` or a forward. None if there are no rows.
    """
    index_K = _spread(shard.counted.flatten())
    if not len(index_K):
        return None
    trial = Trial(heads, shard, index_K, wanted)
    with trial.kept():
        copy = trial.copy()
        called = trial.call(copy)
        here = match.of_replica(copy)
        hidden = trial.rows[0].detach().requires_grad_(wanted)
        linear = here.projection
        total = linear_cross_entropy(
            hidden,
            linear.weight.detach(),
            trial.target_K,
            bias=None if linear.bias is None else linear.bias.detach(),
            ignore_index=match.ignore_index,
            label_smoothing=match.label_smoothing,
            smoothing_convention=match.smoothing_convention,
            class_weight=here.class_weight,
        ).total
        pairs = [(called.total, total)]
        if wanted and "hidden" in called.gradients:
            pairs.append((called.gradients["hidden"], torch.autograd.grad(total, hidden)[0]))
        rounding = max(called.rounding, rounding_of(total, product_dtype(hidden)))
        return all(largest_difference(a, b) <= rounding for a, b in pairs)


class _Probe(Trial):
    """The questions about a pair, asked on some rows."""

    def __init__(
        self, heads: tuple[nn.ModuleDict, nn.ModuleDict], shard: Shard, index_K: Tensor, situation: Situation
    ) -> None:
        super().__init__(heads, shard, index_K, situation.wants_gradients)
        self.is_scaled = situation.is_scaled
        counted_K = shard.target[shard.counted]
        # Of the targets padding is the most common one, or the last
        self.common = {int(counted_K.mode().values), int(counted_K[-1])}

    def facts(self, check_classes: Callable[[int], None]) -> LogitFacts:
        """Return the facts about the logits; what the caller has does not change, the random states included.

        Args:
            check_classes: raises if a target is outside a vocabulary of that size. It is called before the criterion
                is, which on an accelerator would fail with a device-side assertion.
        """
        with self.kept(), torch.no_grad():
            logits_KV, keeps_nothing = self._first_call(check_classes)
        # Dropout in the probe must not advance the random state: the loss would depend on whether a call was the first
        with self.kept(), torch.no_grad(), torch.set_grad_enabled(self.wanted), graph_of_its_own():
            is_checked = self._criterion_adds_up(logits_KV)
        with self.kept(), torch.no_grad():
            self._check_ignored(logits_KV)
        with self.kept(), torch.no_grad():
            adds_up = self._buffers_add_up()
        with self.kept():
            mixed = self._mixed_by_gradient()
        with self.kept():
            mixed = mixed or self._mixed_by_value()
        if mixed:
            raise ValueError(
                f"the generator mixes rows: {mixed}{_usual_culprit(self.head['generator'])}. It is called on a few "
                "tokens at a time, so a token's scores must depend only on that token; compute anything that mixes "
                "tokens before the engine, and pass the result as hidden or as a per-token keyword"
            )
        self._keeps_no_state()
        self._backward_is_linear()
        return LogitFacts(logits_KV.size(-1), logits_KV.dtype, is_checked, keeps_nothing, adds_up)

    def _first_call(self, check_classes: Callable[[int], None]) -> tuple[Tensor, bool]:
        """Return the scores of the rows, and whether the call has set no attribute; raise for what does not fit."""
        copy = self.copy()

        def scores(shape: tuple[int, ...], rows: Sequence[Tensor]) -> Tensor:
            return self.scores(copy, shape, rows)

        shape = self.shape(PROBE_ROWS)
        logits_KV = first_scores(copy["generator"], scores, shape, self.rows, self.names, self.target_shape)
        check_classes(logits_KV.size(-1))
        check_class_weight(self.head["criterion"], logits_KV.size(-1))
        # Refuses a number that is not a tensor
        criterion_loss(copy["criterion"], logits_KV, self.target_K, self.of_criterion)
        return logits_KV, _has_same_attributes(copy, self.head)

    def _criterion_adds_up(self, logits_KV: Tensor) -> bool:
        """Raise ValueError unless the loss is a sum over rows; return False if these rows cannot show it.

        That is so if the loss is 0 or not finite. A criterion whose losses are random in evaluation mode as well cannot
        be asked, and passes.
        """
        criterion, rows = _widened(self.copy()["criterion"], self._criterion_rows(logits_KV), self.of_criterion)
        rows[0].requires_grad_(self.wanted)
        least = product_dtype(rows[0])

        def total(rows: Sequence[Tensor]) -> Tensor:
            return _loss_of_rows(criterion, rows, self.of_criterion).total.sum()

        # Once as it is, and if it is random, for example by dropout, once more without that
        for _ in range(2):
            alone = ask_alone(total, rows, least)
            for company_K in _companies(len(rows[1]), rows[0]):
                some = [t[company_K] for t in rows]
                together = ask(total, some, least)
                if not together.values.isfinite() or not any(t.any() for t in (together.values, *together.gradients)):
                    return False
                change = change_in_company(together, alone, company_K)
                if change.is_rounding:
                    continue
                again = (ask(total, some, least) for _ in range(REPEATS))
                if all(change_in_company(together, other).is_rounding for other in again):
                    raise ValueError(_not_a_sum(together, alone, company_K, change))
                break
            else:
                return True
            criterion.eval()
        return True

    def _criterion_rows(self, logits_KV: Tensor) -> list[Tensor]:
        """Return different rows for the criterion, of which some have the same target: it may join just those.

        The others are between two rows each, and nearer to 0: of a batch of one token they differ as well.
        """
        nearer_1 = torch.linspace(0.9, 0.5, PROBE_ROWS - 1, device=logits_KV.device).to(logits_KV).unsqueeze(1)
        between_KV = (logits_KV[1:] + logits_KV[:-1]) / 2 * nearer_1
        targets_K = [self.target_K, self.target_K[:1].expand(len(between_KV))]
        others = [torch.cat([t, t[: len(between_KV)]]) for t in self.of_criterion.values()]
        return [torch.cat([logits_KV, between_KV]), torch.cat(targets_K), *others]

    def _check_ignored(self, logits_KV: Tensor) -> None:
        """Raise ValueError unless the criterion ignores the target that it says, and no other that is common here."""
        rows = [logits_KV, self.target_K, *self.of_criterion.values()]
        criterion, (logits_KV, *_) = _widened(self.copy()["criterion"], rows, self.of_criterion)
        named = ignored_target(criterion)
        classes = logits_KV.size(1)
        lowest_K1 = logits_KV.where(logits_KV.isfinite(), torch.inf).argmin(1, keepdim=True)

        def is_ignored(target: int) -> bool | None:
            """Return whether loss and gradient are 0 though the target has the least score; None if not finite."""
            class_K1 = torch.full_like(lowest_K1, target)
            # The numbers stay those of the row, which may be probabilities
            swapped_KV = logits_KV.scatter(1, class_K1, logits_KV.gather(1, lowest_K1))
            swapped_KV.scatter_(1, lowest_K1, logits_KV.gather(1, class_K1))
            with torch.set_grad_enabled(self.wanted), graph_of_its_own():
                answer = ask(
                    lambda rows: criterion_loss(criterion, rows[0], class_K1.squeeze(1), self.of_criterion).total.sum(),
                    [swapped_KV.requires_grad_(self.wanted)],
                )
            if not answer.values.isfinite():
                return None
            return not any(t.any() for t in (answer.values, *answer.gradients))

        if named is not None and 0 <= named < classes and is_ignored(named) is False:
            raise ValueError(
                f"the criterion's ignore_index is {named}, but its loss of target {named} is not 0; rows with that "
                "target are left out, so set the attribute to the target that it ignores, or to -100"
            )
        usual = {0, 1, 2, 3, *self.target_K.tolist(), *self.common} - {named}
        ignored = {target: is_ignored(target) for target in sorted(usual) if 0 <= target < classes}
        silent = [target for target, is_so in ignored.items() if is_so]
        # Where nothing has a loss there is no padding either
        if silent and False in ignored.values() and not self._counts_none(criterion, logits_KV, silent[0]):
            raise ValueError(
                f"the criterion ignores target {silent[0]} but has no ignore_index: its loss and gradient are 0, and "
                f"its rows would be counted as tokens; set criterion.ignore_index = {silent[0]}"
            )

    def _counts_none(self, criterion: nn.Module, logits_KV: Tensor, target: int) -> bool:
        """Return whether the criterion itself counts no tokens with this target."""
        loss = criterion_loss(criterion, logits_KV, torch.full_like(self.target_K, target), self.of_criterion)
        return counts_itself(criterion) and not loss.tokens

    def _buffers_add_up(self) -> bool:
        """Return whether calls change buffers; raise unless by sums over rows that the scores do not depend on."""
        called = self.copy()
        before = _buffers_of(called)
        if not before:
            return False
        self._called(called, slice(0, PROBE_ROWS))
        # With other weights, as after a step of training. With these the power iteration of spectral_norm may have
        # converged, and would look like a sum that the scores do not depend on
        moved = {id(p): p.detach() * (1 + torch.rand_like(p)) for p in self.head.parameters() if p.requires_grad}
        whole, in_halves = self.copy(moved), self.copy(moved)
        tensors = _buffers_of(whole)
        rows = slice(0, PROBE_ROWS)
        scores = self._called(whole, rows)
        at_once = _buffers_of(whole)
        after = _buffers_of(called)
        changed = [
            name
            for name, old in before.items()
            if not (old.is_same(after.get(name)) and tensors[name].is_same(at_once.get(name)))
        ]
        if not changed:
            return False
        again = self._called(whole, rows)
        for some in (slice(0, PROBE_ROWS // 2), slice(PROBE_ROWS // 2, PROBE_ROWS)):
            self._called(in_halves, some)
        added = _buffers_of(in_halves)
        repeated = self._is_repeated(scores, again)
        for name in changed:
            kept = name in at_once and at_once[name].tensor is tensors[name].tensor
            if kept and _close(at_once[name].numbers, added[name].numbers) and repeated:
                continue
            raise ValueError(
                f"the buffer {name} changes when the {name.split('.')[0]} is called, which happens once for each chunk "
                "and on copies, so that it would depend on the chunks: set the module to evaluation mode (.eval()), or "
                "compute what changes before the engine"
            )
        return True

    def _is_repeated(self, scores: Tensor, again: Tensor) -> bool:
        """Return whether both calls gave the same scores; up to rounding, where no two calls give the same numbers."""
        if torch.equal(scores, again):
            return True
        first, second = (self._called(self.copy(), slice(0, PROBE_ROWS)) for _ in range(2))
        return not torch.equal(first, second) and _close(scores, again)

    def _called(self, copy: nn.ModuleDict, some: slice) -> Tensor:
        """Call both modules with some rows, always with the same random numbers; return the scores."""
        rows = [t[some] for t in self.rows]
        with random_states_kept(self.target_K.device, Held(self.head).generators):
            logits_KV = self.scores(copy, self.shape(len(rows[0])), rows)
            own = {name: t[some] for name, t in self.of_criterion.items()}
            criterion_loss(copy["criterion"], logits_KV, self.target_K[some], own)
        return logits_KV

    def _mixed_by_value(self) -> str:
        """Return how much the scores of the same rows change with other rows and their order, in words; "" if not."""
        copy = self.copy()
        scores = functools.partial(self.scores, copy)
        shape = self.shape(PROBE_ROWS)
        # As so many sequences of one time step
        others = (2 * PROBE_ROWS,) if self.lead == 1 else (*(1,) * (self.lead - 2), 2 * PROBE_ROWS, 1)
        rounding = self._rounding_of_scores(copy)
        with torch.no_grad():
            for _ in range(2):
                whole_KV = scores(shape, self.rows)
                halves_KV = torch.cat([scores(self.shape(len(half[0])), half) for half in _halves(self.rows)])
                twice_KV, turned_KV = scores(others, _beside_themselves(self.rows)).chunk(2)
                same = (halves_KV, twice_KV, turned_KV.flip(0))
                different = max(largest_difference(logits_KV, whole_KV) for logits_KV in same)
                if different <= rounding:
                    return ""
                if _repeats(lambda: scores(shape, self.rows), whole_KV, rounding):
                    return (
                        "a token's scores change with the other tokens and their order, by "
                        f"{different:.2g} of the largest"
                    )
                # The scores are random, for example by dropout: ask the generator without that
                copy.eval()
        return ""

    def _mixed_by_gradient(self) -> str:
        """Return which other rows the scores of the first and the last row have a gradient in, in words; "" for none.

        With two or more leading dimensions the four rows are two sequences of two time steps: row k is sequence k // 2
        at time k % 2. So seen from either corner, a row at distance 1 is another time step, at distance 2 another
        sequence.
        """
        if not self.wanted:
            return ""
        scores = functools.partial(self.scores, self.copy())
        shape = (PROBE_ROWS,) if self.lead == 1 else (*(1,) * (self.lead - 2), 2, PROBE_ROWS // 2)
        distances: set[int] = set()
        for own in (0, PROBE_ROWS - 1):
            with torch.enable_grad(), graph_of_its_own():
                hidden = self.rows[0].detach().requires_grad_()
                # A copy, because a generator may change its input in place, and autograd forbids that for a leaf
                logits_KV = scores(shape, (hidden.clone(), *self.rows[1:]))
                if not logits_KV.requires_grad:
                    return ""
                refuse_reentrant(logits_KV)
                # A random weighting of the row's scores: with equal weights a softmax would have the gradient 0
                upstream = torch.zeros_like(logits_KV)
                upstream[own] = torch.rand_like(logits_KV[own]) + 1
                (grad,) = torch.autograd.grad(logits_KV, hidden, upstream)
            # For each row k, the largest entry of d (weighted scores of row `own`) / d hidden_k
            size_K = grad.flatten(1).abs().amax(1)
            # Anything above the rounding of the row's own gradient comes from mixing; a nan is not evidence of it
            least = torch.finfo(grad.dtype).eps * size_K[own]
            has_gradient_K = (size_K > least) & size_K.isfinite()
            distances |= {abs(own - k) for k in has_gradient_K.nonzero().flatten().tolist()}
        distances.discard(0)
        if not distances:
            return ""
        if self.lead == 1:
            return "a row's scores have a gradient in other rows"
        names = {1: "other time steps", 2: "other sequences", 3: "other time steps of other sequences"}
        return f"a token's scores have a gradient in {' and in '.join(names[d] for d in sorted(distances))}"

    def _rounding_of_scores(self, copy: nn.ModuleDict) -> float:
        """Return what rounding may make of the scores of the same rows beside other rows."""
        with torch.set_grad_enabled(self.wanted), graph_of_its_own():
            hidden = self.rows[0].clone().requires_grad_(self.wanted)
            # A copy, because it may be changed in place
            scores = self.scores(copy, self.shape(PROBE_ROWS), (hidden * 1, *self.rows[1:]))
            # Without a graph it may compute in bfloat16 inside
            return rounding_of(scores, torch.bfloat16)

    def _observed(self, calls: int) -> tuple[Outcome | None, Held]:
        """Return what so many calls of one copy with the same rows and random numbers give, and what it then holds."""
        outcome = None
        with self.kept():
            copy = self.copy()
            for _ in range(calls):
                with random_states_kept(self.target_K.device, Held(copy).generators):
                    outcome = self.call(copy)
            return outcome, Held(copy, *self.originals)

    def _keeps_no_state(self) -> None:
        """Raise ValueError if the pair changes what it reads again, or keeps a graph: the copies of chunks lose both.

        What is written and never read, such as attention that is kept for a picture, is the same after a second call
        with the same rows.
        """
        _, before = self._observed(0)
        outcome, first = self._observed(1)
        assert outcome is not None
        if outcome.written:
            raise ValueError(
                f"backward writes into {outcome.written[0]}, which would happen for each chunk and before the loss is "
                "divided: return the gradient instead (without a fused gradient accumulation)"
            )
        if graphs := [name for name in graphs_held(first) if not self._is_made_by_a_hook(name)]:
            raise ValueError(
                f"{graphs[0]} holds a tensor with a graph after a call, which would be one chunk's, on a copy: add it "
                "to the loss that the criterion returns, or compute it beside the engine"
            )
        if not before.changed(first):
            return
        second, settled = self._observed(2)
        fresh, again = self._observed(1)
        assert second is not None
        assert fresh is not None
        # What differs between two first calls is random, such as a time
        evolving = sorted(set(first.changed(settled)) - set(first.changed(again)))
        depends = not _is_same_outcome(outcome, second) and _is_same_outcome(outcome, fresh)
        if evolving or depends:
            name = evolving[0] if evolving else before.changed(first)[0]
            raise ValueError(
                f"{name} changes with every call and is not a buffer that adds up; the pair is called once for each "
                "chunk, on copies, so that it would depend on the chunks or be lost: change it outside, once a step, "
                "or register it as a buffer if it is a sum over rows"
            )

    def _is_made_by_a_hook(self, name: str) -> bool:
        """Return whether a hook makes this attribute from parameters before each call, as that of weight_norm does."""
        owner, _, attribute = name.rpartition(".")
        module = self.head.get_submodule(owner)
        made = (
            getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in module._forward_pre_hooks.values()
        )
        return attribute in made

    def _backward_is_linear(self) -> None:
        """Raise ValueError unless gradients are linear in the factor of the loss, and those of all rows a sum.

        With a `loss_scale` the factor is known, and need not be tried.
        """
        if not self.wanted:
            return
        for training in (True, False):
            with self.kept():
                copy = self.copy()
                if not training:
                    # Random, for example by dropout: ask without that
                    copy.eval()
                different = self._nonlinear(copy)
                if not different or (different.startswith(HALVES) and not training and self._is_random(copy)):
                    return
                if different.startswith(HALVES) and training and self._is_random(copy):
                    continue
            raise ValueError(
                f"backward through the pair is not linear: {different}. Gradients are taken for each chunk, and "
                "multiplied by the factor of the loss afterwards: clip or normalise the gradient outside (a hook on "
                "hidden); if the factor alone matters, pass it as loss_scale (1 / tokens of the step)"
            )

    def _nonlinear(self, copy: nn.ModuleDict) -> str:
        """Return which gradient is not what it must be, in words; "" if all are."""

        def gradients(some: slice = slice(None), factor: float = 1.0) -> dict[str, Tensor]:
            with self.kept():
                outcome = self.call(copy, some, factor)
            roundings.append(outcome.rounding)
            return outcome.gradients

        roundings: list[float] = []
        whole = gradients()
        if not self.is_scaled:
            for factor in (0.125, -1.0):
                other = gradients(factor=factor)
                for name, grad in whole.items():
                    by = largest_difference(other[name] / factor, grad) if name in other else 1.0
                    if by > max(roundings):
                        return (
                            f"the gradient of {name} of {factor:g} x loss is off by {by:.2g} from {factor:g} x gradient"
                        )
        half = PROBE_ROWS // 2
        halves = [gradients(some) for some in (slice(0, half), slice(half, PROBE_ROWS))]
        for name, grad in whole.items():
            parts = [part[name] for part in halves if name in part]
            if not parts:
                continue
            joined = (
                torch.cat(parts) if name in ("hidden", *self.names, *self.of_criterion) else torch.stack(parts).sum(0)
            )
            by = largest_difference(joined, grad)
            if by > max(roundings):
                return f"{HALVES} is off by {by:.2g} from that of all rows, for {name}"
        return ""

    def _is_random(self, copy: nn.ModuleDict) -> bool:
        """Return whether the pair gives other numbers when it is called again with other random numbers."""
        first = self.call(copy)
        return not all(_is_same_outcome(first, self.call(copy)) for _ in range(REPEATS))


def _is_same_outcome(a: Outcome, b: Outcome) -> bool:
    """Return whether two calls gave the same scores, loss and gradients, up to rounding."""
    pairs = [(a.scores, b.scores), (a.total, b.total)]
    pairs += [(grad, b.gradients[name]) for name, grad in a.gradients.items() if name in b.gradients]
    return all(x.shape == y.shape and largest_difference(x, y) <= a.rounding for x, y in pairs)


def _has_same_attributes(called: nn.Module, original: nn.Module) -> bool:
    """Return whether the modules of a copy that was called have the original's attributes still, object by object."""
    copies = parts_of(called).modules
    originals = parts_of(original).modules
    return len(copies) == len(originals) and all(map(_has_attributes_of, copies, originals))


def _has_attributes_of(copy: nn.Module, module: nn.Module) -> bool:
    """Return whether a structural copy has the attributes of the module, and no others."""
    own = vars(copy)
    others = {name: value for name, value in vars(module).items() if name not in OF_A_COPY}
    return own.keys() - OF_A_COPY == others.keys() and all(own[name] is value for name, value in others.items())


def _usual_culprit(generator: nn.Module) -> str:
    """Return which batch normalisation takes statistics over the batch, in words; "" if none does."""
    norms = [module for module in generator.modules() if isinstance(module, _BatchNorm)]
    names = sorted({type(norm).__name__ for norm in norms if norm.training or norm.running_mean is None})
    return f" ({', '.join(names)} takes statistics over the batch)" if names else ""


def _companies(rows: int, logits_KV: Tensor) -> list[Tensor]:
    """Return the companies in which so many different rows are asked: each of them once, and each many times.

    In the one no quantile is a row's own; in the other there are enough for a share of the rows.
    """
    place_K = torch.arange(MOST_COMPANY, device=logits_KV.device)
    many = min(MOST_COMPANY, max(2 * rows, COMPANY_BYTES // (4 * logits_KV.size(1))))
    return [place_K[:rows], place_K[:many] % rows]


def _loss_of_rows(criterion: nn.Module, rows: Sequence[Tensor], names: Iterable[str]) -> TokenLoss:
    """Return the criterion's loss of scores, targets, and its keywords of these names."""
    logits_KV, target_K, *extra = rows
    return criterion_loss(criterion, logits_KV, target_K, dict(zip(names, extra, strict=True)))


def _widened(criterion: nn.Module, rows: list[Tensor], names: Iterable[str]) -> tuple[nn.Module, list[Tensor]]:
    """Return the criterion and its rows in float32 where they are narrower, if it takes that.

    There rounding is far below what a criterion may do to rows.
    """
    if rows[0].dtype.itemsize >= 4:
        return criterion, rows
    wide = [rows[0].float(), *rows[1:]]
    tensors = [*criterion.parameters(), *criterion.buffers()]
    copy = bind(criterion, {id(t): t.detach().float() for t in tensors if t.is_floating_point()})
    # A tensor that is neither a parameter nor a buffer keeps its dtype
    with contextlib.suppress(Exception):
        _loss_of_rows(copy, wide, names)
        return copy, wide
    return criterion, rows


BESIDE = "a loss that joins rows (CTC, contrastive, the hardest of a batch) is a second term beside the engine's"


def _not_a_sum(together: Answer, alone: Answer, company: Tensor, change: Change) -> str:
    """Return what is wrong with a criterion that gives rows something else in company, in words."""
    size = len(company)
    separately = alone.values[company].sum()
    # The most likely mistake has a message of its own
    if largest_difference(together.values * size, separately) <= together.rounding:
        wrong = "it takes a mean; the criterion must sum (reduction='sum'): divide once, by the tokens of the step"
    elif change.value <= change.rounding:
        wrong = f"but {change}, so it does not add up; it must return a sum of one term per row; {BESIDE}"
    else:
        wrong = f"it does not add up; it must return a sum of one term per row that depends on that row alone; {BESIDE}"
    return (
        f"the criterion gives {float(together.values):.6g} for {size} rows and {float(separately):.6g} as the sum over "
        f"each of them alone, so {wrong}"
    ).replace(", so but ", ", but ")


def _halves(rows: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return the first and the second half of the rows."""
    return list(zip(*(t.chunk(2) for t in rows), strict=True))


def _beside_themselves(rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows, and behind them the same rows in the opposite order."""
    return [torch.cat([t, t.flip(0)]) for t in rows]


def _repeats(function: Callable[[], Tensor], first: Tensor, noise: float) -> bool:
    """Return whether the function gives the same again and again, up to a relative difference of `noise`.

    In bfloat16 two random numbers may be equal by chance.
    """
    return all(largest_difference(function(), first) <= noise for _ in range(REPEATS))


class Buffer(NamedTuple):
    """A buffer of a module, and a copy of its numbers."""

    tensor: Tensor
    numbers: Tensor

    def is_same(self, other: Buffer | None) -> bool:
        """Return whether it is the same tensor, with the same numbers; nan is the same as nan."""
        if other is None or other.tensor is not self.tensor or other.numbers.shape != self.numbers.shape:
            return False
        a, b = self.numbers, other.numbers
        return a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def _buffers_of(head: nn.Module) -> dict[str, Buffer]:
    """Return all buffers but those of batch normalisation, whose fault in training mode is that it mixes rows."""
    owners = ((name, module) for name, module in head.named_modules() if not isinstance(module, _BatchNorm))
    named = ((f"{owner}.{name}", b) for owner, module in owners for name, b in module.named_buffers(recurse=False))
    return {name: Buffer(b, b.clone()) for name, b in named}


def _close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape and, up to rounding, the same numbers."""
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=CLOSE, atol=0, equal_nan=True)
