"""Beam search for translations that contain given phrases, by dynamic beam allocation (Post and Vilar 2018).

The hypotheses of a sentence are sorted into banks by the number of constraint tokens that they contain. The slots of
the beam are divided among the banks at each step, and each bank is a beam search in its own slots. Hypotheses that
continue a phrase therefore do not compete with more probable ones that ignore it.

Shapes: B sentences still decoding, K live beams, R = B x K rows, T target time so far, C candidates, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.candidates import Beams, logits_blocks
from models.constraints import Constraints, Phrase, State, allot
from models.decoding import check_alive, check_search, is_done, n_best_of
from models.decoding_rules import Forbidden, Rule, Task, check_tokens_of
from models.ensemble import Batch, Models, Start, check_finite, evaluating, members
from models.hypotheses import Hypothesis, LengthNorm, length_normaliser


class Live(NamedTuple):
    """A live hypothesis."""

    score: float
    """Log-probability."""
    tokens: list[int]
    state: State
    parent: int
    """The beam it continues."""


class Candidate(NamedTuple):
    """A live hypothesis with one more token."""

    score: float
    """Log-probability."""
    beam: int
    """Which live hypothesis."""
    token: int


def constrained_beam_search(
    model: Models,
    src: Tensor,
    phrases: Sequence[Sequence[Phrase]],
    *,
    bos: Start,
    eos: int,
    boundaries: Collection[int] = (),
    beam: int = 10,
    length_penalty: float = 0.6,
    length_norm: LengthNorm = "gnmt",
    n_best: int = 1,
    rules: Sequence[Rule] = (),
    max_length: int | Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Find the best translations that contain the given phrases: src (B, S) ids -> up to `n_best` for each sentence.

    `phrases` has a sequence of phrases for each sentence, possibly empty. A translation must contain the tokens of each
    phrase consecutively; phrases may occur in any order and overlap, and one that is given twice need occur only once.
    After a phrase that is `whole`, the translation must end or continue with one of the `boundaries` tokens.

    The end symbol is allowed only once all phrases are met. The candidates of a step are each live hypothesis's
    `beam` + 1 best tokens and those that continue its unmet phrases; `allot` divides the `beam` slots over the numbers
    of constraint tokens met. All else is as in `beam_search`, to which this is identical for sentences without phrases.

    A sentence that has fewer than `n_best` finished hypotheses after `max_length` steps also returns unfinished ones,
    after the finished ones: those with the most constraint tokens first. `unmet` says which phrases they lack. A phrase
    that does not fit into `max_length` steps, or that the beam loses, is thus reported there rather than as an error.

    Raises ValueError for what `beam_search` refuses, if the number of entries in `phrases` is not that of the
    sentences, for an empty phrase, and for phrases or boundaries that contain tokens outside the vocabulary, padding,
    or the start or end symbol; DeadEndError, a ValueError, if the rules leave a sentence no hypothesis;
    FloatingPointError if the model's logits are nan or inf.
    """
    check_search(beam, n_best, length_penalty, length_norm)
    models = members(model)
    finished: list[list[Hypothesis]] = [[] for _ in range(src.size(0))]
    unfinished: list[list[Hypothesis]] = [[] for _ in range(src.size(0))]
    with evaluating(models):
        batch = Batch.encode(models, src, max_length, bos)
        task = Task.of(batch, eos)
        check_phrases(phrases, boundaries, task)
        boundaries_E = torch.tensor(sorted(boundaries), device=src.device, dtype=torch.long)
        search = Search(task.forbidden(rules), eos, beam, boundaries_E)
        constraints = [Constraints(some, frozenset(boundaries)) for some in phrases]
        live = [[Live(0.0, [], some.start, 0)] for some in constraints]
        beams = Beams.first(batch.memories[0], batch.bos)
        while batch.sentences:
            hiddens = batch.next_hidden(beams.prefixes[:, :, -1].flatten())
            norm = length_normaliser(batch.step, length_penalty, length_norm)
            current = [constraints[sentence] for sentence in batch.sentences]
            found = candidates_of(search, batch, beams, hiddens, live, current)
            going = []
            for row, sentence in enumerate(batch.sentences):
                ended, live[row] = choose_hypotheses(current[row], live[row], found[row], eos, beam)
                finished[sentence] += [Hypothesis(one.tokens, one.score / norm, one.score) for one in ended]
                limit = batch.limits[row]
                if batch.step == limit:
                    met, unmet = current[row].count_met, current[row].unmet_phrases
                    unfinished[sentence] = [
                        Hypothesis(one.tokens, one.score / norm, one.score, unmet(one.state))
                        for one in sorted(live[row], key=lambda one: (-met(one.state), -one.score))
                    ]
                    continue
                best = max((one.score for one in live[row]), default=-math.inf)
                bound = best / length_normaliser(limit, length_penalty, length_norm)
                if not is_done(finished[sentence], bound, beam, n_best):
                    going.append(row)
            if len(going) < len(batch.sentences):
                batch.keep(going)
                live = [live[row] for row in going]
            beams, parents_BK = stack_beams(live, beams, batch.bos)
            batch.reorder(parents_BK)
    return n_best_of(n_best, finished, unfinished)


def check_phrases(phrases: Sequence[Sequence[Phrase]], boundaries: Collection[int], task: Task) -> None:
    """Raise ValueError unless each sentence has a list of phrases, possibly empty, of ordinary tokens."""
    if len(phrases) != len(task.limits):
        raise ValueError(
            f"phrases were given for {len(phrases)} sentences, not for {len(task.limits)}: give one list for each, "
            "[] for none"
        )
    for sentence, some in enumerate(phrases):
        for number, phrase in enumerate(some):
            if not phrase.tokens:
                raise ValueError(f"phrase {number} of src[{sentence}] is empty: leave it out")
            check_tokens_of(f"phrase {number} of src[{sentence}]", phrase.tokens, task)
    check_tokens_of("boundaries", list(boundaries), task)


class Search(NamedTuple):
    """What is the same at each step."""

    forbidden: Forbidden
    eos: int
    beam: int
    boundaries_E: Tensor
    """Tokens that may follow a whole phrase."""


def candidates_of(
    search: Search,
    batch: Batch,
    beams: Beams,
    hiddens: Sequence[Tensor],
    live: list[list[Live]],
    constraints: list[Constraints],
) -> list[list[Candidate]]:
    """Return the candidates of each sentence's live hypotheses, best first."""
    width = beams.scores.size(1)
    found: list[list[Candidate]] = []
    for block in logits_blocks(batch, beams, hiddens):
        # Normalise before anything is forbidden
        best_R = block.logits.amax(-1)
        check_finite(best_R, block.sentences)
        check_alive(best_R, [sentence for sentence in block.sentences for _ in range(width)])
        logp_RV = block.logits.log_softmax(-1)
        search.forbidden.mask(logp_RV, block.prefixes, block.sentences)
        first = len(found)
        states = {
            index * width + k: (constraints[first + index], one.state)
            for index in range(len(block.sentences))
            for k, one in enumerate(live[first + index])
        }
        logp_RV[[row for row, (some, state) in states.items() if some.unmet_phrases(state)], search.eos] = -math.inf
        found += [[] for _ in block.sentences]
        for row, offered in offers(search, block.scores.reshape(-1, 1) + logp_RV, states).items():
            some = [Candidate(score, row % width, token) for token, score in offered.items() if score > -math.inf]
            found[first + row // width] += some
    return [sorted(candidates, key=lambda candidate: -candidate.score) for candidates in found]


def offers(
    search: Search, total_RV: Tensor, states: dict[int, tuple[Constraints, State]]
) -> dict[int, dict[int, float]]:
    """Return the candidate tokens of each live hypothesis by its row, with the log-probability including each."""
    best_RC = total_RV.topk(min(search.beam + 1, total_RV.size(1)))
    scores = best_RC.values.tolist()
    tokens = best_RC.indices.tolist()
    found = {row: dict(zip(tokens[row], scores[row], strict=True)) for row in states}
    wanted = [(row, token) for row, (some, state) in states.items() for token in some.wanted_tokens(state)]
    totals = total_RV[[row for row, _ in wanted], [token for _, token in wanted]].tolist()
    for (row, token), total in zip(wanted, totals, strict=True):
        found[row][token] = total
    awaiting = [row for row, (some, state) in states.items() if some.awaits_boundary(state)]
    if awaiting and len(search.boundaries_E):
        best_M = total_RV[awaiting][:, search.boundaries_E].max(-1)
        ends = search.boundaries_E[best_M.indices].tolist()
        for row, token, total in zip(awaiting, ends, best_M.values.tolist(), strict=True):
            found[row][token] = total
    return found


def choose_hypotheses(
    constraints: Constraints, live: list[Live], candidates: list[Candidate], eos: int, beam: int
) -> tuple[list[Live], list[Live]]:
    """Return the hypotheses that end, and those that continue: the best of each bank, as many as it has slots."""
    banks: list[list[tuple[bool, Live]]] = [[] for _ in range(constraints.total + 1)]
    for score, k, token in candidates:
        before = live[k]
        if token == eos:
            banks[-1].append((True, Live(score, before.tokens, before.state, k)))
        else:
            state = constraints.after(before.state, token)
            banks[constraints.count_met(state)].append((False, Live(score, [*before.tokens, token], state, k)))
    ended = []
    alive = []
    for bank, slots in zip(banks, allot([len(bank) for bank in banks], beam), strict=True):
        # As in `beam_search`: endings among the best `slots`, and the `slots` best of the others
        ended += [one for ends, one in bank[:slots] if ends]
        alive += [one for ends, one in bank if not ends][:slots]
    return ended, alive


def stack_beams(live: list[list[Live]], before: Beams, bos: int) -> tuple[Beams, Tensor]:
    """Return the live hypotheses as tensors, and the beam that each one continues, (B, K)."""
    width = max(map(len, live), default=0)
    # A sentence with fewer hypotheses than another is filled up with copies of its first, which are never extended
    rows = [[*some, *[some[0]] * (width - len(some))] for some in live]
    length = before.prefixes.size(2) + 1
    device = before.scores.device
    prefixes = [[bos, *one.tokens] for row in rows for one in row]
    prefixes_BKT = torch.tensor(prefixes, device=device, dtype=torch.long).reshape(len(live), width, length)
    scores_BK = before.scores.new_tensor([[one.score for one in row] for row in rows]).reshape(len(live), width)
    parents_BK = torch.tensor([[one.parent for one in row] for row in rows], device=device, dtype=torch.long)
    return Beams(prefixes_BKT, scores_BK), parents_BK.reshape(len(live), width)
