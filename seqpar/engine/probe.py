"""Probe the generator and the criterion on a few rows: whole, in halves, and beside themselves in another order.

Chunking is exact only if a token's scores depend on that token alone, and if the criterion is a sum over tokens. The
probe finds this out, and the size of the vocabulary, on rows that are not ignored. The caller's modules do not change:
it works on structural copies with detached parameters and copied buffers, and with a forked random state.

- Scores, by value: the rows must have the same scores as a whole, in halves, and beside themselves in the opposite
  order. This finds mixing that has no gradient (a detached mean, an added position), if it is large: a generator may
  compute in bfloat16 internally, whatever the dtype of its scores, so only half of bfloat16's digits must agree. A
  generator whose scores are random is asked again in evaluation mode.
- Scores, by gradient, if gradients are wanted: d scores_i / d hidden_j must be 0 for i != j. This is exact in every
  dtype, in every mode and with dropout, because a term that does not depend on hidden_j contributes exactly 0.
- The loss: that of the rows must be the sum over their halves, and half of that of the rows beside themselves.
- Buffers: what calls change in place must add up over the halves, without effect on the scores, as the number of rows
  or a histogram of predictions does. Anything else would differ from the plain loss: a buffer that is replaced is lost
  with the copy that computed the chunk, and a moving average or the power iteration of spectral normalisation would run
  once for each chunk.

Nothing here finds mixing whose weight is 0 now and is learnt later, nor mixing of distant rows only. The probe is made
again when another code may run (`Situation`): in another mode or dtype, as batch normalisation mixes rows in training
only, and after hooks, submodules, buffers, flags or the number of hidden's dimensions have changed; other numbers are
not noticed.

Shape suffixes: K probed rows, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from seqpar.core.checks import refuse_reentrant
from seqpar.core.chunks import CPU_BUDGET, recording
from seqpar.core.graphs import graph_of_its_own
from seqpar.core.row_independence import Answer, Change, ask, ask_alone, change_in_company, largest_difference
from seqpar.core.token_loss import TokenLoss
from seqpar.engine.at_fault import first_scores
from seqpar.engine.formula_match import check_class_weight
from seqpar.engine.module_calls import Parts, calls_of, parts_of
from seqpar.engine.pair import Project, criterion_loss, project
from seqpar.engine.shards import Shard, check_targets, criterion_rows_of, rows_of
from seqpar.linear.leaves import product_dtype
from seqpar.multi_device.replicas import bind

PROBE_ROWS = 4
"""Two sequences of two time steps."""

ROUNDING = torch.finfo(torch.bfloat16).eps ** 0.5
"""Half of bfloat16's digits: a larger relative difference between scores of the same rows is not rounding."""

REPEATS = 16
"""How often the same rows must give the same result before a module counts as deterministic."""

MOST_COMPANY = 128
"""The most rows in whose company a criterion is asked for each row: a hundredth, that it may leave out, is one."""

COMPANY_BYTES = CPU_BUDGET
"""The most bytes of these rows' scores; of a large vocabulary there are fewer."""

CLOSE = 1e-3
"""The relative difference of a buffer's sum that rounding may make, in any dtype."""

MOST_SITUATIONS = 256
"""How many situations are remembered: more than there are lengths of sources, over which a copy generator attends; but
one with a hook that is made anew for each step never comes back."""


OF_A_COPY = {"_parameters", "_buffers", "_modules", "_is_replica"}
"""The attributes that a structural copy has for itself."""


class LogitFacts(NamedTuple):
    """What a probe has found about the logits."""

    vocab_size: int
    dtype: torch.dtype
    criterion_is_checked: bool
    """False if the probed rows cannot show it, for example because their loss is 0; the next call probes again."""
    keeps_nothing: bool = False
    """Whether calls have set no attribute of a module, which might be a tensor of the size of a chunk's logits."""


class Situation(NamedTuple):
    """Everything that the facts depend on, as far as it can be compared."""

    shapes: tuple[object, ...]
    """The class, shape and device of each parameter and buffer."""
    calls: tuple[object, ...]
    """What a call of each module runs, from hooks of all modules to the mode."""
    dtypes: tuple[torch.dtype, ...]
    """Those of the products and of the parameters."""
    wants_gradients: bool
    leading: int
    """The number of leading dimensions: a softmax over dimension 1 is over the classes of (N, V), or over time."""
    per_token: tuple[tuple[str, torch.Size], ...]
    """The shape of one token's share of hidden and of each per-token tensor, which may have a column for a class."""


def situation_of(parts: Parts, shard: Shard) -> Situation:
    """Return the situation of a call; it is looked up in every one."""
    leading = shard.target.dim()
    columns = {"hidden": shard.hidden, **shard.per_token, **shard.of_criterion}
    tensors = [*parts.parameters, *parts.buffers]
    leaves = (*columns.values(), *parts.parameters)
    return Situation(
        # A lazy one has no shape yet, and is refused
        tuple([(type(t), None if is_lazy(t) else t.shape, t.device) for t in tensors]),
        calls_of(parts.modules),
        (product_dtype(shard.hidden), *[p.dtype for p in parts.parameters]),
        torch.is_grad_enabled() and any(t.requires_grad for t in leaves),
        leading,
        tuple([(name, t.shape[leading:]) for name, t in columns.items()]),
    )


def facts_in(known: dict[Situation, LogitFacts], situation: Situation) -> LogitFacts | None:
    """Return the facts that an earlier call has found in this situation, which now come last; None if none has."""
    # Comparing takes a quarter of the time of looking up, which hashes all that it compares
    latest = next(reversed(known.items()), None)
    if latest is not None and latest[0] == situation:
        return latest[1]
    found = known.pop(situation, None)
    if found is not None:
        known[situation] = found
    return found


def logit_facts(
    known: dict[Situation, LogitFacts],
    situation: Situation,
    found: LogitFacts | None,
    heads: Sequence[nn.ModuleDict],
    shards: Sequence[Shard],
) -> LogitFacts:
    """Return the facts about these inputs, those found already or a probe's, after checking every target.

    Args:
        known: the facts found so far; new ones are added.
        found: what `facts_in` returned.
        heads: the replicas of generator and criterion, one per shard.

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
            probe = _Probe(head, shard, index_K, situation.wants_gradients)
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


class _Probe:
    """Some rows of a shard, on which generator and criterion are called.

    Args:
        head: generator and criterion.
        index_K: which rows.
        wanted: whether gradients are wanted.
    """

    def __init__(self, head: nn.ModuleDict, shard: Shard, index_K: Tensor, wanted: bool) -> None:
        self.head = head
        self.names = tuple(shard.per_token)
        self.rows = [t.detach()[index_K] for t in rows_of(shard)]
        self.of_criterion = {
            name: t.detach()[index_K] for name, t in zip(shard.of_criterion, criterion_rows_of(shard), strict=True)
        }
        self.target_K = shard.target.flatten()[index_K]
        self.target_shape = shard.target.shape
        # The generator expects as many leading dimensions
        self.lead = shard.target.dim()
        self.wanted = wanted

    def facts(self, check_classes: Callable[[int], None]) -> LogitFacts:
        """Return the facts about the logits; the head's buffers and the random state do not change.

        Args:
            check_classes: raises if a target is outside a vocabulary of that size. It is called before the criterion
                is, which on an accelerator would fail with a device-side assertion.
        """
        copy = self._copy()
        before = _buffers_of(copy)
        # Dropout in the probe must not advance the random state: the loss would depend on whether a call was the first
        with self._random_numbers():
            with torch.no_grad():
                shape = self._shape(PROBE_ROWS)
                scores = self._scores(copy)
                logits_KV = first_scores(copy["generator"], scores, shape, self.rows, self.names, self.target_shape)
                check_classes(logits_KV.size(-1))
                check_class_weight(self.head["criterion"], logits_KV.size(-1))
                # Refuses a number that is not a tensor
                criterion_loss(copy["criterion"], logits_KV, self.target_K, self.of_criterion)
                with torch.set_grad_enabled(self.wanted), graph_of_its_own():
                    is_checked = self._criterion_adds_up(copy, logits_KV)
                self._buffers_add_up(before, copy)
            mixed = self._mixed_by_gradient(scores)
            # Before the generator may be asked in evaluation mode
            keeps_nothing = _has_same_attributes(copy, self.head)
            mixed = mixed or self._mixed_by_value(copy["generator"], scores)
        if mixed:
            raise ValueError(
                f"the generator mixes rows: {mixed}{_usual_culprit(copy['generator'])}. It is called on a few tokens "
                "at a time, so a token's scores must depend only on that token; compute anything that mixes tokens "
                "before the engine, and pass the result as hidden or as a per-token keyword"
            )
        return LogitFacts(logits_KV.size(-1), logits_KV.dtype, is_checked, keeps_nothing)

    def _copy(self, moved: Mapping[int, Tensor] | None = None) -> nn.ModuleDict:
        """Return a structural copy with buffers of its own, as they were before any call, and some other weights."""
        copies = {id(p): p.detach() for p in self.head.parameters()} | {id(b): b.clone() for b in self.head.buffers()}
        copies.update(moved or {})
        return bind(self.head, copies)

    def _scores(self, copy: nn.ModuleDict) -> Project:
        def scores(shape: tuple[int, ...], rows: Sequence[Tensor]) -> Tensor:
            return project(copy["generator"], self.names, shape, rows)

        return scores

    def _shape(self, rows: int) -> tuple[int, ...]:
        """Return the leading shape of so many time steps of one sequence."""
        return (*(1,) * (self.lead - 1), rows)

    def _random_numbers(self) -> contextlib.AbstractContextManager[None]:
        """Return a context after which the random state is the one before it."""
        device = self.target_K.device
        return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)

    def _criterion_adds_up(self, copy: nn.ModuleDict, logits_KV: Tensor) -> bool:
        """Raise ValueError unless the loss is a sum over rows; return False if these rows cannot show it.

        That is so if the loss is 0 or not finite. A criterion whose losses are random in evaluation mode as well cannot
        be asked, and passes.
        """
        criterion, rows = _widened(copy["criterion"], self._criterion_rows(logits_KV), self.of_criterion)
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

    def _buffers_add_up(self, before: dict[str, Buffer], called: nn.ModuleDict) -> None:
        """Raise ValueError unless all that calls have changed are sums over rows, on which the scores do not depend."""
        if not before:
            return
        # With other weights, as after a step of training. With these the power iteration of spectral_norm may have
        # converged, and would look like a sum that the scores do not depend on
        moved = {id(p): p.detach() * (1 + torch.rand_like(p)) for p in self.head.parameters() if p.requires_grad}
        whole, in_halves = self._copy(moved), self._copy(moved)
        tensors = _buffers_of(whole)
        rows = slice(0, PROBE_ROWS)
        scores = self._call(whole, rows)
        at_once = _buffers_of(whole)
        after = _buffers_of(called)
        changed = [
            name
            for name, old in before.items()
            if not (old.is_same(after.get(name)) and tensors[name].is_same(at_once.get(name)))
        ]
        if not changed:
            return
        again = self._call(whole, rows)
        for some in (slice(0, PROBE_ROWS // 2), slice(PROBE_ROWS // 2, PROBE_ROWS)):
            self._call(in_halves, some)
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

    def _is_repeated(self, scores: Tensor, again: Tensor) -> bool:
        """Return whether both calls gave the same scores; up to rounding, where no two calls give the same numbers."""
        if torch.equal(scores, again):
            return True
        first, second = (self._call(self._copy(), slice(0, PROBE_ROWS)) for _ in range(2))
        return not torch.equal(first, second) and _close(scores, again)

    def _call(self, copy: nn.ModuleDict, some: slice) -> Tensor:
        """Call both modules with some rows, always with the same random numbers; return the scores."""
        rows = [t[some] for t in self.rows]
        with self._random_numbers():
            logits_KV = self._scores(copy)(self._shape(len(rows[0])), rows)
            own = {name: t[some] for name, t in self.of_criterion.items()}
            criterion_loss(copy["criterion"], logits_KV, self.target_K[some], own)
        return logits_KV

    def _mixed_by_value(self, generator: nn.Module, scores: Project) -> str:
        """Return how much the scores of the same rows change with other rows and their order, in words; "" if not."""
        shape = self._shape(PROBE_ROWS)
        # As so many sequences of one time step
        others = (2 * PROBE_ROWS,) if self.lead == 1 else (*(1,) * (self.lead - 2), 2 * PROBE_ROWS, 1)
        with torch.no_grad():
            for _ in range(2):
                whole_KV = scores(shape, self.rows)
                halves_KV = torch.cat([scores(self._shape(len(half[0])), half) for half in _halves(self.rows)])
                twice_KV, turned_KV = scores(others, _beside_themselves(self.rows)).chunk(2)
                same = (halves_KV, twice_KV, turned_KV.flip(0))
                different = max(largest_difference(logits_KV, whole_KV) for logits_KV in same)
                if different <= ROUNDING:
                    return ""
                if _repeats(lambda: scores(shape, self.rows), whole_KV, ROUNDING):
                    return (
                        "a token's scores change with the other tokens and their order, by "
                        f"{different:.2g} of the largest"
                    )
                # The scores are random, for example by dropout: ask the generator without that
                generator.eval()
        return ""

    def _mixed_by_gradient(self, scores: Project) -> str:
        """Return which other rows the scores of the first and the last row have a gradient in, in words; "" for none.

        With two or more leading dimensions the four rows are two sequences of two time steps: row k is sequence k // 2
        at time k % 2. So seen from either corner, a row at distance 1 is another time step, at distance 2 another
        sequence.
        """
        if not self.wanted:
            return ""
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
