"""Probe on a few rows whether a pair may be computed chunk by chunk, on copies, with gradients taken at factor one.

That gives the plain loss and its gradient if and only if the pair

- treats each row alone: its scores, in value and in gradient (d scores_i / d hidden_j must be 0 for i != j, which is
  exact in every dtype, in every mode and with dropout), and its loss, whether or not other rows are present;
- has a backward whose gradients add up over rows, and that writes nothing else; if it is not linear in the factor of
  the loss, the gradient is computed in backward, where the factor is known;
- keeps nothing between calls that it reads again, in its attributes or around its code. Buffers may add up over rows,
  as a histogram of predictions does; a buffer that is replaced is lost with the copy, and a moving average or a power
  iteration would run once for each chunk;
- gives what the matched closed form gives, where one replaces it;
- ignores exactly the target that it says it ignores.

A pair that is random, for example because of dropout, is probed again in evaluation mode. Mixing of distant rows only
is not found, nor is what rarely acts. The probe is repeated when different code may run (`Situation`): in another mode
or dtype, since batch normalisation mixes rows in training only, and after a change of hooks, submodules, buffers, flags
(also those of a configuration that a module holds) or hidden's number of dimensions; other numbers are not noticed.

Shape suffixes: K probed rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from seqpar.core.device_facts import is_capturing, is_on_host
from seqpar.core.effects import KEEPS_A_GRAPH
from seqpar.core.graphs import graph_of_its_own
from seqpar.core.row_independence import ends_of_rows, largest_difference, precision_of
from seqpar.core.surroundings import Surroundings, ask_about_state_around, refuse_graphs_left, refuse_iterators
from seqpar.distributed.torch_private import is_fsdp_unit
from seqpar.engine.at_fault import first_scores
from seqpar.engine.criterion_rows import ask_about_counts, ask_about_padding, criterion_adds_up
from seqpar.engine.formula_match import FormulaMatch, check_class_weight, linear_loss
from seqpar.engine.kept_state import ask_about_buffers, ask_about_renewed, ask_about_state, has_same_attributes
from seqpar.engine.linear_backward import ask_about_backward
from seqpar.engine.module_calls import surroundings_of
from seqpar.engine.pair import criterion_loss
from seqpar.engine.row_mixing import ask_about_rows
from seqpar.engine.shards import Shard, check_targets, rows_of
from seqpar.engine.situation import LogitFacts, Situation
from seqpar.engine.trial import PROBE_ROWS, Outcome, Trial, in_short
from seqpar.linear.projection import product_dtype

MOST_SITUATIONS = 256
"""How many situations are remembered: more than there are source lengths, each of which is a situation of its own for a
copy generator. There is a limit because a situation with a hook that is created anew in each step never recurs."""


def logit_facts(
    known: dict[Situation, LogitFacts],
    situation: Situation,
    found: LogitFacts | None,
    original: nn.ModuleDict,
    heads: Sequence[nn.ModuleDict],
    shards: Sequence[Shard],
) -> LogitFacts:
    """Return the facts about these inputs, known already or found by a probe, after checking every target.

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
    if is_capturing(hidden.device):
        found = _facts_while_capturing(known, situation)
    if found is not None and found.criterion_is_checked:
        check_targets(shards, found.vocab_size)
        return found
    # One shard with rows that count is enough, because all replicas run the same code. Those whose per-token tensors
    # vary come first: a mask without padding shows less
    replicas = zip(heads, shards, strict=True)
    for head, shard in sorted(replicas, key=lambda replica: all(map(_is_constant, rows_of(replica[1])[1:]))):
        index_K = _choose_rows(shard.counted.flatten(), rows_of(shard)[1:])
        if len(index_K):
            trial = Trial((head, original), shard, index_K, situation.wants_gradients)
            common = set().union(*map(_padding_candidates, shards))
            facts = _facts_of(trial, common, lambda size: check_targets(shards, size))
            known[situation] = facts
            for earliest in list(known)[:-MOST_SITUATIONS]:
                known.pop(earliest, None)
            return facts
    # Every target is ignored, so there is nothing to project and the size of the vocabulary does not matter
    return LogitFacts(vocab_size=1, dtype=hidden.dtype, criterion_is_checked=False)


def _facts_of(trial: Trial, common: set[int], check_classes: Callable[[int], None]) -> LogitFacts:
    """Return the facts about the logits, without a change to anything of the caller's, random states included.

    Args:
        common: the targets that may be the padding.
        check_classes: raises if a target is outside a vocabulary of that size. It is called before the criterion,
            which on an accelerator would fail with a device-side assertion.
    """
    around = surroundings_of(trial.head)
    # Random number generators found there are restored, like those of the modules and torch's own
    trial.held.generators += around.generators
    try:
        return _asked(trial, around, common, check_classes)
    finally:
        # A count that a hook or a closure keeps must be of the caller's rows alone
        around.put_back(keeps_made=True)


def _asked(trial: Trial, around: Surroundings, common: set[int], check_classes: Callable[[int], None]) -> LogitFacts:
    """Return the facts about the logits; the calls may change what is around the pair's code."""

    def call() -> Outcome:
        return trial.outcome(trial.copy())

    asked = ("the pair", call, Outcome.difference)
    refuse_changing = partial(refuse_iterators, *asked, Outcome.is_same, is_on_host(trial.target_K), trial.held, around)
    # First, because what is taken from an iterator stays taken, and results may change in the first calls only
    refuse_changing()
    with trial.keep_state(), torch.no_grad():
        logits_KV, keeps_nothing = _first_call(trial, check_classes)
    harmless = ask_about_state_around(*asked, around)
    # Dropout in the probe must not advance the random state: the loss would depend on whether a call was the first
    with trial.keep_state(), torch.no_grad(), torch.set_grad_enabled(trial.wanted), graph_of_its_own():
        is_checked = criterion_adds_up(trial, logits_KV, common)
    with trial.keep_state(), torch.no_grad():
        ask_about_padding(trial, logits_KV, common)
        ask_about_counts(trial, logits_KV)
    with trial.keep_state(), torch.no_grad():
        buffers = ask_about_buffers(trial)
    ask_about_rows(trial)
    written = ask_about_state(trial)
    # Once more, because a hook may change other things only in backward
    ask_about_state_around(*asked, around, harmless)
    refuse_changing()
    refuse_graphs_left(around, KEEPS_A_GRAPH)
    why_once = "calls add to its buffers" if buffers.adds_up else ""
    if is_fsdp_unit(trial.head["generator"]):
        why_once = "FSDP2 gathers its weights for forward alone"
    is_linear = ask_about_backward(trial, why_once)
    return LogitFacts(logits_KV.size(-1), logits_KV.dtype, is_checked, keeps_nothing, buffers, written, is_linear)


def _first_call(trial: Trial, check_classes: Callable[[int], None]) -> tuple[Tensor, bool]:
    """Return the scores of the rows, and whether the call has set no attribute; raise if something does not fit."""
    copy = trial.copy()
    logits_KV = first_scores(trial, copy)
    check_classes(logits_KV.size(-1))
    check_class_weight(trial.head["criterion"], logits_KV.size(-1))
    # Raises for a number that is not a tensor
    criterion_loss(copy["criterion"], logits_KV, trial.target_K, trial.of_criterion)
    keeps_nothing = has_same_attributes(copy, trial.head)
    if not keeps_nothing:
        ask_about_renewed(trial, copy)
    return logits_KV, keeps_nothing


def _facts_while_capturing(known: Mapping[Situation, LogitFacts], situation: Situation) -> LogitFacts:
    """Return facts found in any mode or dtype, because no number can be read while a CUDA graph is captured."""
    for earlier, facts in known.items():
        if earlier.shapes == situation.shapes and facts.criterion_is_checked:
            return facts
    raise RuntimeError(
        "the first call of the engine is being captured in a CUDA graph, but it has to read some logits; call the "
        "engine once before the capture (torch.cuda.graph needs a warm-up in any case)"
    )


def _choose_rows(counted_N: Tensor, per_token: Sequence[Tensor] = ()) -> Tensor:
    """Return `PROBE_ROWS` rows that are not ignored: the extremes of per-token tensors, then some across the batch.

    Some are repeated if there are fewer; if every row is ignored, the result is empty.

    Args:
        per_token: tensors whose smallest and largest rows are chosen, so that both values of a mask occur. Floating
            ones come last, because their gradients tell as much.
    """
    indices_K = counted_N.nonzero().squeeze(1)
    if not len(indices_K):
        return indices_K
    spread_K = indices_K[torch.arange(PROBE_ROWS, device=indices_K.device) * len(indices_K) // PROBE_ROWS]
    if not per_token:
        return spread_K
    ends = indices_K[ends_of_rows([t[indices_K] for t in sorted(per_token, key=torch.is_floating_point)])]
    chosen = [*dict.fromkeys(ends.tolist())][: PROBE_ROWS - 1]
    return torch.cat([spread_K.new_tensor(chosen), spread_K])[:PROBE_ROWS]


def _is_constant(per_token: Tensor) -> bool:
    """Return whether all rows are the same, as in a mask without padding."""
    return not len(per_token) or bool((per_token == per_token[:1]).all())


def _padding_candidates(shard: Shard) -> set[int]:
    """Return the targets that may be the padding: the most common one, and the last."""
    counted_K = shard.target[shard.counted]
    if not len(counted_K):
        return set()
    return {int(counted_K.mode().values), int(counted_K[-1])}


def gives_formula(
    heads: tuple[nn.ModuleDict, nn.ModuleDict], match: FormulaMatch, shard: Shard, wanted: bool
) -> bool | None:
    """Return whether a pair, called on a few rows, gives the loss and the gradients of its closed form.

    It does not if other code has replaced `F.cross_entropy`, `F.linear` or a forward. None if there are no rows.
    """
    index_K = _choose_rows(shard.counted.flatten())
    if not len(index_K):
        return None
    trial = Trial(heads, shard, index_K, wanted)
    with trial.keep_state():
        called = trial.call(trial.copy())
        copy = trial.copy()
        here = match.of_replica(copy)
        hidden = trial.rows[0].detach().requires_grad_(wanted)
        total = linear_loss(here, hidden, trial.target_K).total
        ends = {"hidden": hidden}
        ends |= {name: p for name, p in copy.named_parameters() if any(p is own for own in here.parameters)}
        wanted_ends = {name: t for name, t in ends.items() if t.requires_grad}
        grads = torch.autograd.grad(total, [*wanted_ends.values()]) if wanted_ends else ()
        pairs = [(called.total, total)]
        for name, grad in zip(wanted_ends, grads, strict=True):
            right = grad if name == "hidden" else in_short(grad)
            pairs.append((called.gradients.get(name, torch.zeros_like(right)), right))
        # Detached, because the graph of the closed form does not show autocast's dtype
        rounding = precision_of(total.detach(), product_dtype(hidden)).rounding
        return all(largest_difference(a, b) <= rounding for a, b in pairs)
