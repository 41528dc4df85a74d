"""A step over ranks is right up to a line, and its cases are what their names say."""

from dataclasses import replace

import pytest
import torch

from conformance import layout_checks
from conformance.layout_adapter import LAYOUTS, ROWS
from conformance.layout_cases import IGNORED, SHAPE, Answer, Case, cases, gradients
from conformance.layout_causes import factors
from conformance.layout_checks import Fault, _ended, _smallest, fault
from conformance.layout_peers import KNOWN_LAYOUTS
from seqpar.testing.evidence import close
from seqpar.testing.ranks import RankError
from tests.seqpar.testing.test_edges_of_verdicts import JUST

pytestmark = pytest.mark.unswitched


FEW = Case("data parallel", 2, ((5, 3), (4, 0)))


def test_a_parameter_that_the_loss_does_not_need_has_a_gradient_of_zero():
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1), "idle": torch.nn.Linear(2, 1)})
    model["used"].bias.requires_grad_(False)
    found = gradients(model["used"](torch.ones(2)).sum(), model)
    assert {name: g.tolist() for name, g in found.items()} == {
        "used.weight": [[1.0, 1.0]],
        "idle.weight": [[0.0, 0.0]],
        "idle.bias": [0.0],
    }


@JUST
@pytest.mark.parametrize(("offers", "allowed"), [({"float64"}, 1e-12), (set(), 1e-5)])
@pytest.mark.parametrize("part", ["loss", "embed.weight"])
def test_over_ranks_a_loss_may_be_off_by_1e_12_or_by_1e_5_in_float32(part, offers, allowed, times, right, monkeypatch):
    adapter = replace(KNOWN_LAYOUTS["seqpar"], offers=frozenset({"data parallel"} | offers))
    case = replace(FEW, ranks=4, groups=2)
    truths = [case.right(0), case.right(1)]
    factor = 1 + times * allowed

    def answers(name, case):
        last = truths[1]
        if part == "loss":
            wrong = last._replace(loss=last.loss * factor)
        else:
            wrong = last._replace(gradients={**last.gradients, part: last.gradients[part] * factor})
        return [truths[0], truths[0], last, wrong]

    monkeypatch.setattr(layout_checks, "answers", answers)
    found = fault(adapter, case)
    assert (found is None) == right
    if found:
        assert found.worst == part
        assert found.numbers.startswith("by rank: loss ")
        assert f"({truths[1].loss:.4g} is right), {part} off by" in found.numbers


def test_the_smallest_case_is_one_that_fails_for_the_same_reason(monkeypatch):
    def smallest(case, *answers, cause="a cause: all gradients are 3 times the right ones"):
        left, asked = iter(answers), []

        def scripted(adapter, case):
            asked.append(case.tokens)
            answer = next(left)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(layout_checks, "fault", scripted)
        found, again = _smallest(KNOWN_LAYOUTS["seqpar"], case, Fault(cause, "first", "loss"))
        return asked, found.tokens, again.numbers

    one, two = ((2,), (1,)), ((2, 2), (1, 0))
    again = Fault("a cause: all gradients are 2 times the right ones", "again", "loss")
    other = Fault("another: all gradients are 3 times the right ones", "other", "loss")
    assert smallest(FEW, again) == ([one], one, "again")
    assert smallest(FEW, None, again) == ([one, two], two, "again")
    assert smallest(FEW, other, again) == ([one, two], two, "again")
    assert smallest(FEW, RankError("hangs"), again) == ([one, two], two, "again")
    assert smallest(FEW, other, None) == ([one, two], FEW.tokens, "first")
    pipeline = Case("pipeline", 2, ((5, 3, 0, 1),))
    assert smallest(pipeline, again) == ([((2, 2, 0, 1),)], ((2, 2, 0, 1),), "again")


def test_of_ranks_that_end_the_one_that_raises_is_named_and_not_those_that_wait_for_it():
    waits = "Traceback\nRuntimeError: Timed out waiting 1000ms\n"
    fails = "Traceback\nKeyError: 'nobody'\nmore of it"
    assert _ended(f"rank 0: {waits}\nrank 1: {fails}") == "rank 1 raises KeyError: 'nobody'"
    assert _ended(f"rank 2: {fails}\nrank 3: {fails}") == "rank 2 raises KeyError: 'nobody'"
    assert _ended(f"rank 1: {waits}\nrank 3: {waits}") == "it hangs: rank 1, 3 waited for the others until the time-out"
    assert _ended("rank 0: exit code 3\n") == "rank 0 raises rank 0: exit code 3"
    assert _ended("rank 0: ValueError: " + "x" * 200) == "rank 0 raises rank 0: ValueError: " + "x" * 100


CHANGES = {
    "frozen head": {"frozen_head": True},
    "loss scale": {"loss_scale": 1024.0},
    "label smoothing": {"label_smoothing": 0.1},
    "tied weights": {"tied": True},
    "a rank without the targets' classes": {"few_classes": True},
    "odd vocabulary": {"vocab_size": 7},
    "the whole head passed as a shard": {"whole_head": True, "few_classes": True},
    "mean differentiated": {"reduction": "mean"},
}
OF_RANKS = {"a rank without tokens", "padding on one rank only"}
SPLITS = {"a rank without the targets' classes", "odd vocabulary", "the whole head passed as a shard"}
HALF = {"a group that is not the world"}
TIED = {"tied weights"}
EVERY = {"unequal tokens", "frozen head", "loss scale", "label smoothing"}
EXPECTED = {
    "data parallel": OF_RANKS | TIED | HALF | {"mean differentiated"},
    "FSDP2": OF_RANKS | TIED | HALF,
    "HSDP": OF_RANKS | TIED,
    "ZeRO-3": OF_RANKS | TIED,
    "split vocabulary": SPLITS | TIED | HALF,
    "split sequence": OF_RANKS | TIED | HALF,
    "pipeline": HALF | {"a micro-batch without tokens"},
    "zero bubble": HALF | {"a micro-batch without tokens"},
    "data x vocabulary": OF_RANKS | SPLITS | TIED,
    "data x sequence": OF_RANKS | TIED,
    "FSDP2 x vocabulary": OF_RANKS | SPLITS | TIED,
    "FSDP2 x sequence": OF_RANKS | TIED,
    "HSDP x vocabulary": OF_RANKS | SPLITS | TIED,
    "sequence x vocabulary": OF_RANKS | SPLITS - {"the whole head passed as a shard"} | HALF,
    "DTensor model": HALF | {"a rank without the targets' classes"},
    "expert parallel": OF_RANKS | TIED | HALF,
    "data x expert": OF_RANKS | TIED,
    "accumulation": OF_RANKS | TIED | HALF,
    "a replica that goes away": OF_RANKS | TIED | HALF,
    "DiLoCo's inner step": TIED,
}
"""The cases of each layout beside those that every layout has."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_each_case_of_a_layout_differs_from_the_first_in_what_its_name_says(layout, seed):
    drawn, row = cases(layout, seed), ROWS[layout]
    assert drawn.keys() == EVERY | EXPECTED[layout]
    batches = {"accumulation": 3, "pipeline": 4, "zero bubble": 8}.get(layout, 1)
    for place, (first, (ranks, data)) in enumerate(zip(drawn["unequal tokens"], row.sizes, strict=True)):
        sizes = [size for part in first.tokens for size in part]
        assert (first.ranks, len(first.tokens), {len(part) for part in first.tokens}) == (ranks, data, {batches})
        assert first.groups == (ranks if layout == "DiLoCo's inner step" else 1)
        assert sizes[0] == 5
        assert sizes[-1] == (2 if len(sizes) > 1 else 5)
        assert all(1 <= size <= 6 for size in sizes)
        of_this = {name: found[-len(row.sizes) :] for name, found in drawn.items()}
        for name, changes in CHANGES.items():
            assert name not in drawn or of_this[name][place] == replace(first, **changes)
        if data > 1:
            # A row whose fewest ranks have the same tokens has these cases over the others alone
            assert drawn["a rank without tokens"][place - len(row.sizes)].tokens == (*first.tokens[:-1], (0,) * batches)
            (*others, last) = drawn["padding on one rank only"][place - len(row.sizes)].tokens
            assert (set(others), last) == ({(6,) * batches}, (0,) * (batches - 1) + (1,))
        elif batches > 1:
            ((_, *rest),) = first.tokens
            assert drawn["a micro-batch without tokens"][place].tokens == ((0, *rest),)
    if "a group that is not the world" in drawn:
        (half,) = drawn["a group that is not the world"]
        assert half == replace(drawn["unequal tokens"][0], ranks=4, groups=2)


def test_no_two_micro_batches_are_the_same_and_as_many_targets_count_as_said():
    case = Case("accumulation", 2, ((5, 3, 1), (6, 0, 4)))
    seen = set()
    for seed in (0, 1):
        for group in (0, 1):
            for place, part in enumerate(replace(case, seed=seed).parts(group)):
                for size, (tokens, target) in zip(case.tokens[place], part, strict=True):
                    assert tokens.shape == target.shape == torch.Size(SHAPE)
                    assert int((target != IGNORED).sum()) == size
                    seen.add(tuple(tokens.flatten().tolist()))
    assert len(seen) == 2 * 2 * 6
    assert case.count == 19
    assert isinstance(case.right(), Answer)
    few = Case("split vocabulary", 4, ((6,),), vocab_size=7, few_classes=True)
    assert [few.rows_of(place) for place in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert {few.part(0, 0)[0][1].max().item() for _ in range(2)} <= {0, 1}


@pytest.mark.parametrize(
    ("times", "name"),
    [
        (1 / 2, "divided by ranks twice"),
        (2, "multiplied by the number of ranks once too often"),
        (1 / 3, "divided by the number of micro-batches as well as by the tokens"),
        (1 / 6, "divided by the number of micro-batches as well as by the tokens"),
        (25, "not divided by the tokens"),
        (25 / 2, "not divided by the tokens"),
        (25 / 3, "not divided by the tokens"),
        (25 / 6, "not divided by the tokens"),
        (25 / 18, "divided by all rows, including padding"),
        (25 / 36, "divided by all rows, including padding"),
        (1 / 1024, "the loss scale is missing"),
        (1024, "the loss scale is applied twice"),
        (7, ""),
    ],
)
def test_a_factor_of_all_gradients_is_named_by_the_numbers_of_the_step(times, name):
    case = Case("accumulation", 2, ((5, 3, 1), (6, 6, 4)), loss_scale=1024.0)
    assert case.count == 25
    named = [said for said, values in factors(case).items() if any(close(times, value) for value in values)]
    assert named[:1] == ([name] if name else [])
