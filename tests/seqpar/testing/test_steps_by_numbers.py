"""What is said of a step, by the numbers of its ranks alone; and how one is watched."""

import sys

import pytest
import torch
from torch import nn

from seqpar.testing import Layout, assert_same_step, same_step
from seqpar.testing.evidence import NEVER
from seqpar.testing.same_step import (
    _differ,
    _refuse_frozen,
    _refuse_normalised,
    _refuse_untrained,
    _result,
    _Trial,
)
from seqpar.testing.share_causes import parts_of_step
from seqpar.testing.step_run import Ran, Run, Watch, _OtherRandomNumbers, alone, named_parameters
from tests.seqpar.testing.test_same_step import trainer

pytestmark = pytest.mark.unswitched


def ran(loss=4.0, state=1.0, after=None, **gradients):
    """What a rank's step did to two parameters, whose gradients are these."""
    tensors = {name: torch.tensor(g, dtype=torch.float64) for name, g in gradients.items() if g is not None}
    before = {"a.w": torch.zeros(2).double(), "b": torch.zeros(2).double()}
    states = {"exp_avg of a.w": torch.full((2,), state).double()}
    after = before | {name: torch.tensor(p, dtype=torch.float64) for name, p in (after or {}).items()}
    return Ran(loss, {"a.w" if name == "a" else name: g for name, g in tensors.items()}, states, before, after, 6)


RIGHT = {"a": [1.0, -3.0], "b": [0.0, 2.0]}


def step_off(*ranks, layout=None, truth=None, rtol=1e-12, reference=None):
    """What differs in these ranks' steps."""
    layout = layout or Layout(ranks=len(ranks))
    reference = reference or ran(**RIGHT)
    return _Trial(len, layout, ranks, reference, truth or reference, rtol).differences()


def narrow(reference, truth=None, dtype=torch.bfloat16):
    """A step in a narrow dtype, and one process's steps in that dtype and in float64, which are two objects."""
    return {"layout": Layout(dtype=dtype), "reference": reference, "truth": truth or ran(**RIGHT)}


NARROW = narrow(ran(loss=4.1, a=[1.01, -3.0], b=[0.0, 2.0]))
EXACT, FAR = narrow(ran(**RIGHT)), narrow(ran(a=[1.15, -3.0], b=[0.0, 2.0]))
SINGLE = narrow(ran(**RIGHT), dtype=torch.float32)
NOTHING = ran(a=[1.0, -3.0], b=[0.0, 0.0])
STEPS = [
    ([ran(**RIGHT)], {}, {}),
    ([ran(a=[1.0, -3.0 + 2.9e-12], b=[2.9e-14, 2.0])], {}, {}),
    ([ran(a=[1.0, -3.0 + 3.1e-12], b=[0.0, 2.0])], {}, {"a.w": (0, "the gradient of a.w is off by 3.1e-12 where")}),
    ([ran(a=[1.0, -3.0 + 3.1e-12], b=[0.0, 2.0])], {"rtol": 2e-12}, {}),
    ([ran(**RIGHT), ran(a=[1.0, 3.0], b=[0.0, 2.0])], {}, {"a.w": (1, "the gradient of a.w is off by 6 where")}),
    ([ran(a=[1.0, -3.0]), ran(b=[0.0, 2.0])], {}, {}),
    ([ran(a=[1.0, -3.0])], {}, {"b": (0, "the gradient of b is missing in every rank")}),
    ([ran(a=[1.0, -3.0])], {"reference": NOTHING}, {}),
    ([ran(state=2.0, **RIGHT)], {}, {"a.w": (0, "the exp_avg of a.w is off by 1 where the reference is 1 large")}),
    ([ran(loss=None, **RIGHT), ran(loss=8.0, **RIGHT)], {}, {"": (1, "the loss is reported as 8 where 4 is right")}),
    ([ran(a=[1.0, -3.0], b=[2.9e-14, 0.0])], {"reference": NOTHING}, {}),
    ([ran(a=[1.0, -3.0], b=[3.1e-14, 0.0])], {"reference": NOTHING}, {"b": (0, "the gradient of ")}),
    ([ran(loss=4.1, a=[1.0, -3.0], b=[0.0, 0.0])], NARROW, {"b": (0, "the gradient of b is off by 1 of its size")}),
    ([ran(loss=4.1, a=[1.0, -3.0], b=[1e-3, 0.0])], NARROW | {"truth": NOTHING}, {}),
    ([ran(a=[1.0, -3.0], b=[0.5, 0.0])], narrow(NOTHING, NOTHING._replace()),
        {"b": (0, "the gradient of b has the norm 0.5 and should be 0, where ")}),
    ([ran(a=[1.25, -3.0], b=[0.0, 2.0])], FAR, {}),
    ([ran(loss=4.01, **RIGHT)], EXACT, {}),
    ([ran(loss=4.01, **RIGHT)], SINGLE, {"": (0, "the loss is reported as 4.01 where 4 is right")}),
    ([ran(loss=4.00021234567, **RIGHT)], {}, {}),
    ([ran(loss=float("nan"), **RIGHT)], {}, {"": (0, "the loss is reported as nan where 4 is right")}),
    ([ran(loss=4.0002, **RIGHT)], {}, {}),
    ([ran(loss=4.0004, **RIGHT)], {}, {"": (0, "the loss is reported as 4.0004")}),
    ([ran(loss=4.0008, **RIGHT)], {"layout": Layout(accumulation=6)}, {}),
    ([ran(loss=2.0003001, **RIGHT)], {"reference": ran(loss=2.00000001, **RIGHT)},
        {"": (0, "the loss is reported as 2.0")}),
    ([ran(loss=2.0002, **RIGHT)], {"reference": ran(loss=2.00000001, **RIGHT)}, {}),
    ([ran(loss=float(torch.tensor(100.123451)), **RIGHT)], {"reference": ran(loss=100.123451, **RIGHT)}, {}),
    ([ran(loss=float(torch.tensor(-100.123451)), **RIGHT)], {"reference": ran(loss=-100.123451, **RIGHT)}, {}),
    ([ran(loss=-1e9 / 3 * (1 + 9e-13), **RIGHT)], {"reference": ran(loss=-1e9 / 3, **RIGHT)}, {}),
    ([ran(loss=-4.01, **RIGHT)], narrow(ran(loss=-4.0, **RIGHT), ran(loss=-4.0, **RIGHT)), {}),
    ([ran(loss=100.123452, **RIGHT)], {"reference": ran(loss=100.123451, **RIGHT)},
        {"": (0, "the loss is reported as 100")}),
    ([ran(loss=4.19, a=[1.019, -3.0], b=[1e-3, 2.0])], NARROW, {}),
    ([ran(loss=4.3, **RIGHT)], NARROW, {"": (0, "the loss is reported as 4.3 where 4 is right")}),
    ([ran(loss=4.1, a=[1.1, -3.0], b=[0.0, 2.0])], NARROW,
        {"a.w": (0, "the gradient of a.w is off by 0.032 of its size, where one process in this dtype is off by "
        "0.0032")}),
    ([ran(loss=4.1, a=[1.0, -3.0], b=[0.0, 2.1])], NARROW,
        {"b": (0, "the gradient of b is off by 0.05 of its size, where one process in this dtype is off by 0")}),
    ([ran(loss=4.1, a=[[1.0], [-3.0]], b=[0.0, 2.0])], NARROW, {"a.w": (0, "the gradient of a.w has shape (2, 1)")}),
]  # fmt: skip


def assert_found(found, wanted):
    """By name, the rank in which something differs, and the beginning of what is said."""
    assert found.keys() == wanted.keys(), found
    for name, (rank, said) in wanted.items():
        assert found[name][0] == rank
        assert found[name][1].startswith(said), found[name][1]


@pytest.mark.parametrize(("ranks", "given", "wanted"), STEPS)
def test_what_differs_in_a_step_is_said_with_its_rank_and_both_numbers(ranks, given, wanted):
    assert_found(step_off(*ranks, **given), wanted)


SMALL = {"a": [1.0, -3.0], "b": [0.0, 2e-3]}


@pytest.mark.parametrize("times", [0.0, 0.5, 1.0])
def test_in_low_precision_a_gradient_that_is_small_beside_others_is_compared(times):
    given = {"layout": Layout(dtype=torch.bfloat16), "reference": ran(**SMALL), "truth": ran(**SMALL)}
    found = step_off(ran(a=[1.0, -3.0], b=[0.0, times * 2e-3]), **given)
    assert found.keys() == ({"b"} if times < 1 else set()), found


DONE = {"a.w": [4.0, 5.0], "b": [-2.0, 1.0]}
NOISE = {"a": [2.9e-6, -3.0], "b": [0.0, 2.0]}
NOISY = NOISE | {"b": [1e-15, 2.0]}
WIDE = ran(**RIGHT)
HALF = {"layout": Layout(ranks=2, dtype=torch.bfloat16), "truth": ran(after=DONE, **RIGHT), "reference": WIDE}
WEIGHTS = [
    ([RIGHT, DONE], [RIGHT, DONE], RIGHT, {}, {}),
    ([RIGHT, DONE], [RIGHT, {}], RIGHT, {}, {"a.w": (1, "a.w is not changed by the step"), "b": (1, "b is not ch")}),
    ([RIGHT, {}], [RIGHT, DONE], RIGHT, {}, {"a.w": (0, "a.w is not changed by the step"), "b": (0, "b is not ch")}),
    ([RIGHT, DONE], [RIGHT, DONE | {"b": [-2.0, 1.0 + 2.1e-5]}], RIGHT, {},
        {"b": (1, "b is off by 2.1e-05 after the step, whose update is 2 large")}),
    ([RIGHT, DONE], [RIGHT, DONE | {"b": [-2.0, 1.0 + 1.9e-5]}], RIGHT, {}, {}),
    ([RIGHT, DONE], [RIGHT, DONE | {"b": [-2.0, 1.0 + 2.1e-5]}], RIGHT, {"rtol": 2e-12}, {}),
    ([RIGHT, DONE], [RIGHT, DONE | {"b": [float("nan"), 1.0]}], RIGHT, {}, {"b": (1, "b is off by nan after the st")}),
    # The sign of noise, by which Adam and Lion move a weight
    ([NOISE, DONE], [NOISE, DONE | {"a.w": [-4.0, 5.0]}], NOISE, {}, {}),
    ([NOISE, DONE], [NOISE, DONE | {"a.w": [4.0, -5.0]}], NOISE, {}, {"a.w": (1, "a.w is off by 10 after the step")}),
    ([NOISE, DONE], [NOISE, DONE | {"b": [2.0, 1.0]}], NOISE, {}, {"b": (1, "b is off by 4 after the step, whose ")}),
    ([NOISE, DONE], [NOISY, DONE | {"b": [2.0, 1.0]}], NOISE, {}, {}),
    ([NOISE, DONE], [NOISE | {"b": None}, DONE | {"b": [2.0, 1.0]}], NOISE, {}, {"b": (1, "b is off by 4 after the ")}),
    # A part of the weights that is frozen there, and one that is frozen elsewhere
    ([{"a": [1.0, -3.0]}, DONE], [{"a": [1.0, -3.0]}, DONE | {"b": [-2.0, 1.1]}], {"a": [1.0, -3.0]}, {},
        {"b": (1, "b is off by 0.1 after the step")}),
    # Ranks of a pipeline, and slices that a rank keeps
    ([RIGHT, DONE], [RIGHT, DONE | {"b": [-2.0, 1.0, 3.0]}], RIGHT, {}, {}),
    # In low precision the ranks' own
    ([RIGHT, DONE], [RIGHT, DONE], RIGHT, HALF, {}),
    ([RIGHT, {"b": [9.0, 9.0]}], [RIGHT, {"b": [9.0, 9.0]}], RIGHT, HALF, {"b": (0, "b is off by 11 after the step")}),
    ([RIGHT, DONE], [RIGHT, DONE | {"b": [-2.0, 1.1]}], RIGHT, HALF,
        {"b": (1, "b differs from that of the first rank after the step")}),
    ([RIGHT, DONE], [RIGHT, {}], RIGHT, HALF, {"a.w": (1, "a.w is not changed by the step"), "b": (1, "b is not ch")}),
    ([RIGHT, DONE], [RIGHT | {"b": None}, DONE | {"b": [-2.0, 1.1]}], RIGHT, HALF, {"b": (1, "b differs from that")}),
    ([RIGHT, DONE], [RIGHT | {"b": [0.0, 2.0 + 1e-9]}, DONE | {"b": [-2.0, 1.1]}], RIGHT, HALF, {}),
]  # fmt: skip
"""Gradients and weights of two ranks, those gradients that are right, what else is given, and what is found."""


@pytest.mark.parametrize(("first", "second", "right", "given", "wanted"), WEIGHTS)
def test_weights_are_compared_after_the_step(first, second, right, given, wanted):
    ranks = [ran(after=weights, **gradients) for gradients, weights in (first, second)]
    assert_found(step_off(*ranks, **({"reference": ran(after=DONE, **right)} | given)), wanted)


def test_the_message_has_what_differs_in_the_order_of_the_model_and_a_call_with_all_that_is_not_usual(monkeypatch):
    monkeypatch.setattr("seqpar.testing.same_step.is_shown", lambda: False)
    layout = Layout(ranks=3, accumulation=2, kind="fsdp2", dtype=torch.float32)
    wrong = ran(loss=9.0, a=[5.0, -3.0], b=[0.0, 7.0])
    right = ran(**RIGHT)
    trial = _Trial(trainer, layout, [right, wrong, wrong], right, right, 1e-5)
    said, *call = trial.message(dict(reversed(trial.differences().items()))).splitlines()
    assert said.startswith(
        "3 ranks, 2 micro-batches each, fsdp2: the gradient of a.w is off by 4 where the reference is 3"
    )
    assert (
        ", in rank 1; the loss is reported as 9 where 4 is right; the first module that differs is a, and 2 of " in said
    )
    assert call == [
        "    from seqpar.testing import Layout, assert_same_step",
        "    from tests.seqpar.testing.test_same_step import trainer",
        "    assert_same_step(trainer, [Layout(ranks=3, accumulation=2, kind='fsdp2')], dtype=torch.float32, "
        "rtol=1e-05)",
    ]
    monkeypatch.setattr(trainer, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "trainer", trainer, raising=False)
    assert trial.message(trial.differences()).splitlines()[1:] == [call[0], call[2]]
    only = _Trial(len, Layout(), [ran(a=[1.0, -3.0], b=[0.0, 7.0])], right, right, 1e-12)
    said = only.message(only.differences())
    assert (
        "one process: the gradient of b is off by 5 where the reference is 2 large; the first module that differs is "
        "the model itself, and 1 of 2 parameters do"
    ) in said
    assert ", in rank" not in said


def test_a_layout_divides_the_sentences_among_its_micro_batches(monkeypatch):
    assert [str(one) for one in (Layout(), Layout(accumulation=3), Layout(ranks=2), Layout(kind="x"))] == [
        "one process", "one process, 3 micro-batches", "2 ranks", "one process, x",
    ]  # fmt: skip
    layout, seen = Layout(ranks=2, accumulation=2, kind="x"), []
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", "0")
        seen += layout.micro_batches(range(6))
    assert seen == [[0], [1, 2], [3], [4, 5]]
    assert alone(layout, 4) == Layout(only=4)
    assert Layout(only=4).step(range(6)) == [4]


def test_parameters_have_the_names_that_they_have_without_wrappers():
    model = nn.ModuleDict({"module": nn.ModuleDict({"a": nn.ModuleDict({"_orig_mod": nn.Linear(1, 1)})})})
    model["_checkpoint_wrapped_module"] = nn.ModuleDict({"_fsdp_wrapped_module": nn.Linear(1, 1, bias=False)})
    assert [name for name, _ in named_parameters(model)] == ["a.weight", "a.bias", "weight"]


def watched(optimizer, model, step):
    watch = Watch(model)
    with watch.watching():
        step(optimizer)
    optimizer.step()  # nobody watches any more
    return watch


@pytest.mark.parametrize("by_name", [True, False])
def test_gradients_of_a_closure_every_group_and_its_settings_are_kept(by_name):
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    groups = [{"params": part.parameters(), "lr": lr} for part, lr in zip(model, (0.1, 0.2), strict=True)]
    optimizer = torch.optim.AdamW(groups, betas=(0.7, 0.8))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2)).square().sum()
        loss.backward()
        return loss

    model[0].weight.grad = torch.full((3, 2), 99.0)  # of an earlier step, until the closure runs
    watch = watched(optimizer, model, lambda o: o.step(closure=closure) if by_name else o.step(closure))
    assert watch.gradients.keys() == {"0.weight", "1.weight"}
    assert not (watch.gradients["0.weight"] == 99).any()
    wanted = {"lr of 0.weight": 0.1, "lr of 1.weight": 0.2, "betas[0] of 0.weight": 0.7, "betas[1] of 1.weight": 0.8}
    assert {name: float(watch.state[name]) for name in wanted} == wanted
    assert {"exp_avg of 0.weight", "exp_avg_sq of 1.weight", "step of 1.weight"} <= watch.state.keys()
    with pytest.raises(ValueError, match=r"has a parameter of shape \(3, 2\) that is none of the Linear which"):
        watched(optimizer, nn.Linear(1, 1), lambda o: o.step())


def test_a_parameter_that_is_clipped_alone_is_kept_as_it_was_and_clipping_still_clips():
    model = nn.Linear(3, 2, bias=False)
    model.weight.grad = torch.ones(2, 3)

    def step(optimizer):
        nn.utils.clip_grad_norm_(model.weight, 0.1)
        assert model.weight.grad.norm() < 0.11
        optimizer.step()

    assert (watched(torch.optim.SGD(model.parameters(), 0.1), model, step).gradients["weight"] == 1).all()


def test_other_random_numbers_are_others_in_every_operation():
    torch.manual_seed(0)
    first = torch.rand(3)
    torch.manual_seed(0)
    with _OtherRandomNumbers():
        second = torch.rand(3)
    assert not torch.equal(first, second)


def moved(loss=4.0, by=1.0, **gradients):
    one = ran(loss, **(gradients or RIGHT))
    return one._replace(after={name: p + by for name, p in one.after.items()})


def test_a_step_trains_if_any_rank_reports_and_any_gradient_and_parameter_is_not_0():
    _refuse_untrained(Layout(), [moved(None), moved()])
    _refuse_untrained(Layout(), [moved(by=0.0), moved()])
    _refuse_untrained(Layout(), [moved(a=[0.0, 0.0], b=[0.0, 1.0])])
    for ranks, error, said in (
        ([moved(None), moved(None)], ValueError, "one process: the step returned no loss"),
        ([moved(a=[0.0, 0.0])], AssertionError, "one process: nothing is trained: every gradient is 0"),
        ([moved(by=0.0)], AssertionError, "no parameter changes; there are gradients"),
        ([moved(by=0.0, a=None)], AssertionError, "no parameter changes; no optimizer had a gradient"),
    ):
        with pytest.raises(error, match=said):
            _refuse_untrained(Layout(), ranks)


def test_a_loss_is_frozen_if_all_are_the_same_to_a_billionth_and_not_0():
    _refuse_frozen([ran(2.5), ran(2.5), ran(2.5 * (1 + 1.1e-9))])
    _refuse_frozen([ran(2.5), ran(2.6), ran(2.5)])
    _refuse_frozen([ran(0.9e-6)] * 3)
    with pytest.raises(AssertionError, match=r"the loss is 2\.5 with other weights as well"):
        _refuse_frozen([ran(2.5), ran(2.5), ran(2.5 * (1 + 0.9e-9))])
    with pytest.raises(AssertionError, match=r"the loss is -2\.5 with other weights as well"):
        _refuse_frozen([ran(-2.5)] * 3)


def test_gradients_are_normalised_if_all_have_the_same_norm_to_a_billionth_and_more_than_one_sentence():
    same, other = ran(**RIGHT), ran(a=[3.0, 1.0], b=[2.0 * (1 + 1e-8), 0.0])
    _refuse_normalised([same, same, other])
    _refuse_normalised([ran(a=[0.0], b=[0.0])] * 3)
    _refuse_normalised([ran()] * 3)
    for sentences in (0, 1):
        _refuse_normalised([same._replace(sentences=sentences)] * 3)
    for turned in (same, ran(a=[3.0, 1.0], b=[2.0, 0.0]), ran(a=[3.0, 1.0], b=[2.0 * (1 + 1e-10), 0.0])):
        with pytest.raises(AssertionError, match=r"the gradients have the norm 3\.74166 with other weights as well"):
            _refuse_normalised([same._replace(sentences=2), same, turned])


@pytest.mark.parametrize("name", ["ranks", "accumulation"])
def test_a_layout_has_at_least_one_rank_and_one_micro_batch(name):
    with pytest.raises(ValueError, match=f"^{name} is 0"):
        Layout(**{name: 0})


def test_parts_of_a_step_are_its_sentences_means_by_their_shares():
    one, other = (torch.tensor(g).double() for g in ([1.0, 2.0], [0.0, 4.0]))
    means = [{"w": one}, {"w": other}]
    parts, weights = parts_of_step({"w": one / 8 + 3 / 8 * other}, means)
    assert weights == pytest.approx([1 / 4, 3 / 4])
    torch.testing.assert_close([part["w"] for part in parts], [one / 8, 3 / 8 * other])
    for whole, given in ((one - other, means), (one, means), (one, means[:1])):
        assert parts_of_step({"w": whole}, given) == ([], [])


def test_ranks_differ_by_a_millionth_of_the_smallest_number():
    def of(number):
        return {"w": torch.tensor([1.0, number]).double(), f"only here {number}": torch.ones(1)}

    assert not _differ(of(1e-12), of(1e-12 * (1 + 0.9e-6)))
    assert _differ(of(1e-12), of(1e-12 * (1 + 1.1e-6)))


def test_without_gradients_the_updates_are_compared_in_float64():
    loss, updates = _result(moved(None, by=2.0, a=None))
    assert loss.isnan()
    assert {name: update.tolist() for name, update in updates.items()} == {"a.w": [2.0, 2.0], "b": [2.0, 2.0]}
    assert _result(moved())[1].keys() == {"a.w", "b"}


class Canned(_Trial):
    """A trial whose other runs have been run."""

    def _other_runs(self):
        one, other = ran(a=[1.0, 0.0], b=[0.0, 8.0]), ran(a=[1.0, -4.0], b=[0.0, 0.0])
        return [one, other, ran(4.5, **RIGHT)]


@pytest.mark.parametrize("wrong_rank", [1, 2])
@pytest.mark.parametrize("reported", [4.0, None])
def test_the_cause_of_a_step_is_inferred_from_the_numbers_of_the_rank_that_is_off(wrong_rank, reported):
    right, layout = ran(**RIGHT), Layout(ranks=3, accumulation=2)
    ranks = [ran(reported if rank else 4.0, **RIGHT) for rank in range(3)]
    ranks[wrong_rank] = ran(reported, a=[7.0, -3.0], b=[0.0, 2.0])
    e = Canned(len, layout, ranks, right, right, 1e-12)._evidence(wrong_rank)
    assert e.got[1]["a.w"].tolist() == [7.0, -3.0]
    assert (float(e.got[0]), float(e.expected[0])) == (4.0, 4.0)
    assert (e.rank, e.world, e.micro_batches, e.ranks_differ, e.dtype) == (wrong_rank, 3, 6, True, torch.float64)
    assert e.again == ([4.5], [4.0], ())
    assert e.weights == pytest.approx([1 / 4, 3 / 4])
    assert (e.divisor, len(e.parts)) == (4, 2)
    alike = Canned(len, Layout(dtype=torch.float32), ranks[:1], right, ran(**RIGHT), 1e-12)._evidence(0)
    assert (alike.world, alike.ranks_differ, alike.dtype) == (1, False, torch.float32)


@pytest.mark.parametrize(
    ("other", "reference", "random"), [(4.5, 4.5, False), (4.6, 4.5, True), (9e-7, 0.0, False), (2e-6, 0.0, True)]
)
def test_random_numbers_are_those_by_which_two_steps_in_one_dtype_differ(monkeypatch, other, reference, random):
    """A step in a narrow dtype has another loss than that in float64, by its rounding."""
    asked = []

    def canned(make_trainer, *runs):
        asked.extend(runs)
        return [[ran(other, **RIGHT)] for _ in runs]

    monkeypatch.setattr(same_step, "run", canned)
    truth = ran(4.0, **RIGHT)._replace(sentences=2)
    trial = _Trial(len, Layout(ranks=2, dtype=torch.bfloat16), [truth] * 2, ran(reference, **RIGHT), truth, 1e-12)
    assert trial._evidence(0).again == (([other], [4.0], ()) if random else NEVER)
    narrow = Run(Layout(dtype=torch.bfloat16), other_random_numbers=True)
    assert asked == [Run(Layout(only=0)), Run(Layout(only=1)), narrow]


@pytest.mark.parametrize("silent", [None, 1, 2])
def test_every_layout_is_run_beside_one_process_with_other_weights_and_one_in_float64(monkeypatch, silent):
    asked = []

    def canned(make_trainer, *runs):
        asked.extend(runs)
        # Of other weights, and of another norm
        gradients = [RIGHT | {"b": [0.0, 3.0]} if one.other_weights else RIGHT for one in runs]
        losses = [None if one.layout.ranks == silent else 4.0 + one.other_weights for one in runs]
        return [[moved(loss, **found)] for loss, found in zip(losses, gradients, strict=True)]

    monkeypatch.setattr(same_step, "run", canned)
    narrow, two = Layout(dtype=torch.float32), Layout(ranks=2, dtype=torch.float32)
    if silent:
        with pytest.raises(ValueError, match="the step returned no loss"):
            assert_same_step(trainer(), [Layout(), Layout(ranks=2)], dtype=torch.float32)
        return
    assert_same_step(trainer(), [Layout(), Layout(ranks=2)], dtype=torch.float32)
    shaken = [Run(narrow, other_weights=True), Run(alone(narrow, 0), other_weights=True)]
    assert asked == [Run(narrow), *shaken, Run(Layout()), Run(narrow), Run(two)]
