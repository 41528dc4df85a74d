"""Odd arguments of what speaks of ranks, steps and bytes, each with its number or the line that names the argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import seqpar
from seqpar import memory_plan as memory
from tests.seqpar.public_edge.case import Case, Equals
from tests.seqpar.public_edge.tables import NOT_TENSORS, raises

NAN, INF = float("nan"), float("inf")
TOKENS = torch.arange(1, 13).reshape(2, 6)


def equals(about: str, call: Callable[[], tuple[Tensor, ...]], *expected: Tensor) -> Case:
    """A call that must give these numbers."""
    return Case(about, call, Equals(lambda: expected))


def _not_dense() -> Iterator[Case]:
    """Whatever is no plain tensor."""
    takers: dict[str, tuple[str, Callable[[Any], object]]] = {
        "split_time": ("tensor", lambda odd: seqpar.split_time(odd, None)),
        "join_time": ("parts[1]", lambda odd: seqpar.join_time([torch.ones(6, 4), odd])),
        "next_token_targets": ("tokens", lambda odd: seqpar.next_token_targets(odd, None)),
        "group_sum": ("tensor", lambda odd: seqpar.group_sum(odd, None)),
        "copy_to_group": ("tensor", lambda odd: seqpar.copy_to_group(odd, None)),
    }
    for name, (argument, call) in takers.items():
        for kind, (make, message) in NOT_TENSORS.items():
            odd = partial(lambda call, make: call(make()), call, make)
            yield raises(f"{name}, {argument} {kind}", odd, TypeError, f"{argument} is {message}")


NO_GROUP = {"text": "world", "a list of ranks": [0, 1], "a number": 2, "a bool": True}


def _groups() -> Iterator[Case]:
    """What is no group of ranks."""
    takers: dict[str, Callable[[Any], object]] = {
        "split_time": lambda group: seqpar.split_time(TOKENS, group),
        "next_token_targets": lambda group: seqpar.next_token_targets(TOKENS, group),
        "group_sum": lambda group: seqpar.group_sum(torch.ones(2), group),
        "copy_to_group": lambda group: seqpar.copy_to_group(torch.ones(2), group),
        "check_agreement": lambda group: seqpar.check_agreement({}, group),
        "sum_over_ranks": lambda group: seqpar.sum_over_ranks(a_loss(), group),
        "accumulate_gradients": lambda group: step(group=group),
        "VocabShard": lambda group: seqpar.VocabShard(group, 0, 9),
        "VocabShard.of": lambda group: seqpar.VocabShard.of(9, group),
    }
    for name, call in takers.items():
        for kind, group in NO_GROUP.items():
            yield raises(f"{name}, group {kind}", partial(call, group), TypeError, "group is ", "ProcessGroup")


ORDERS = ("zig-zag", "Zigzag", "", None, 1, ["zigzag"])


def _time() -> Iterator[Case]:
    """Orders, dimensions, and tokens that cannot be cut."""
    takers: dict[str, Callable[[Any], object]] = {
        "split_time": lambda order: seqpar.split_time(TOKENS, None, order=order),
        "join_time": lambda order: seqpar.join_time([TOKENS], order=order),
        "next_token_targets": lambda order: seqpar.next_token_targets(TOKENS, None, order=order),
        "time_steps": lambda order: seqpar.time_steps(4, 0, 1, order),
    }
    for name, call in takers.items():
        for order in ORDERS:
            yield raises(f"{name}, order {order!r}", partial(call, order), ValueError, f"order is {order!r}")
    for dim, error in ((2, ValueError), (-3, ValueError), (None, TypeError), (1.0, TypeError), ("time", TypeError)):
        for name, cut in (
            ("split_time", lambda d: seqpar.split_time(TOKENS, None, d)),
            ("join_time", lambda d: seqpar.join_time([TOKENS], d)),
        ):
            yield raises(f"{name}, dim {dim!r}", partial(cut, dim), error, f"dim is {dim!r}")
    wrong: dict[str, tuple[tuple[Any, Any, Any], type[Exception]]] = {
        "time": ((-1, 0, 1), ValueError), "time a float": ((4.0, 0, 1), TypeError),
        "time none": ((None, 0, 1), TypeError), "rank": ((4, 2, 2), ValueError),
        "rank negative": ((4, -1, 2), ValueError), "rank text": ((4, "0", 2), TypeError),
        "rank a bool": ((4, True, 2), TypeError), "world": ((4, 0, 0), ValueError),
        "world a float": ((4, 0, 2.0), TypeError),
    }  # fmt: skip
    for about, (arguments, error) in wrong.items():
        yield raises(f"time_steps, {about}", partial(seqpar.time_steps, *arguments), error, f"{about.split()[0]} is ")
    yield raises("join_time of nothing", lambda: seqpar.join_time([]), ValueError, "parts is empty")
    yield raises("join_time of one tensor", lambda: seqpar.join_time(TOKENS), TypeError, "parts is a Tensor")
    yield raises("join_time of other widths", lambda: seqpar.join_time([TOKENS, TOKENS.t()]), ValueError, "parts[1]")
    mixed = [TOKENS, TOKENS.double()]
    yield raises("join_time of other dtypes", lambda: seqpar.join_time(mixed), TypeError, "parts[1] has dtype")
    for shape in ((6,), (), (2, 3, 4)):
        odd = torch.zeros(shape, dtype=torch.int64)
        yield raises(
            f"next_token_targets of {shape}",
            partial(seqpar.next_token_targets, odd, None),
            TypeError,
            "tokens have shape",
        )
    for dtype in (torch.float32, torch.bool, torch.uint16, torch.uint64, torch.complex64):
        odd = TOKENS.to(dtype)
        yield raises(
            f"next_token_targets of {dtype}", partial(seqpar.next_token_targets, odd, None), TypeError, "tokens have"
        )
    for index, error in (
        (-100.0, TypeError),
        (None, TypeError),
        ("pad", TypeError),
        (True, TypeError),
        (2**70, ValueError),
    ):
        call = partial(seqpar.next_token_targets, TOKENS, None, ignore_index=index)
        yield raises(f"next_token_targets, ignore_index {index!r}", call, error, "ignore_index is ")


def _targets() -> Iterator[Case]:
    """Tokens of any integer dtype keep the ignored target what it is."""
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        for ignored in (-100, 300, 0):
            for batch, time in ((2, 6), (2, 1), (0, 6), (2, 0)):
                tokens = TOKENS[:batch, :time]
                plain = torch.cat([tokens[:, 1:], torch.full((batch, min(1, time)), ignored)], 1)
                call = partial(_successors, tokens.to(dtype), ignored)
                yield equals(f"next_token_targets, {dtype} {batch} x {time}, ignored {ignored}", call, plain)
    for order in ("contiguous", "zigzag"):
        views = {"transposed": TOKENS.t(), "expanded": TOKENS[:1].expand(3, 6), "strided": TOKENS[:, ::2]}
        for kind, view in views.items():
            yield equals(f"split_time, {kind}, {order}", partial(_cut, view, order), view)
            yield equals(f"join_time, {kind}, {order}", partial(_joined, view, order), view)
    yield equals("time_steps of no time", lambda: (seqpar.time_steps(0, 1, 2),), torch.zeros(0, dtype=torch.int64))
    yield equals("group_sum alone", lambda: (seqpar.group_sum(TOKENS, None),), TOKENS)
    yield equals("copy_to_group alone", lambda: (seqpar.copy_to_group(TOKENS, None),), TOKENS)


def _successors(tokens: Tensor, ignored: int) -> tuple[Tensor, ...]:
    return (seqpar.next_token_targets(tokens, None, ignore_index=ignored),)


def _cut(view: Tensor, order: Any) -> tuple[Tensor, ...]:
    return (seqpar.split_time(view, None, order=order),)


def _joined(view: Tensor, order: Any) -> tuple[Tensor, ...]:
    parts = [view.index_select(1, seqpar.time_steps(view.size(1), rank, 2, order)) for rank in range(2)]
    return (seqpar.join_time(parts, order=order),)


def a_loss(weight: Tensor | None = None, tokens: int = 2) -> seqpar.TokenLoss:
    """Of two tokens."""
    total = torch.ones((), dtype=torch.float64) if weight is None else weight.sum() * tokens
    return seqpar.TokenLoss(total, torch.tensor(tokens))


def step(**odd: Any) -> seqpar.TokenLoss:
    """A good step but for the odd arguments."""
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    given: dict[str, Any] = {
        "micro_batches": [2, 2],
        "loss_of": lambda m: a_loss(weight, m),
        "tokens_of": lambda m: m,
    }
    return seqpar.accumulate_gradients(**(given | odd))


STEPS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no iterable": ({"micro_batches": 3}, TypeError, "micro_batches is "),
    "none": ({"micro_batches": None}, TypeError, "micro_batches is "),
    "no micro-batch": ({"micro_batches": []}, ValueError, "no micro-batch"),
    "loss_of no function": ({"loss_of": torch.ones(())}, TypeError, "loss_of is "),
    "loss_of a tensor": ({"loss_of": lambda m: torch.ones((), requires_grad=True)}, TypeError, "returned a Tensor"),
    "loss_of a float": ({"loss_of": lambda m: 1.0}, TypeError, "loss_of returned a float"),
    "loss_of nothing": ({"loss_of": lambda m: None}, TypeError, "loss_of returned None"),
    "loss_of a tuple": ({"loss_of": lambda m: (torch.ones(()), 2)}, TypeError, "loss_of returned a tuple"),
    "loss_of without a gradient": ({"loss_of": lambda m: a_loss(None, m)}, ValueError, "loss_of returned a loss"),
    "tokens_of no function": ({"tokens_of": 4}, TypeError, "tokens_of is "),
    "tokens_of nothing": ({"tokens_of": lambda m: None}, TypeError, "what tokens_of returned is None"),
    "tokens_of text": ({"tokens_of": lambda m: "2"}, TypeError, "what tokens_of returned is the text '2'"),
    "tokens_of a mask": ({"tokens_of": lambda m: torch.ones(2)}, ValueError, "what tokens_of returned has shape (2,)"),
    "tokens_of a half": ({"tokens_of": lambda m: 1.5}, ValueError, "tokens_of counted 1.5"),
    "tokens_of nan": ({"tokens_of": lambda m: torch.tensor(NAN)}, ValueError, "tokens_of counted nan"),
    "tokens_of below 0": ({"tokens_of": lambda m: -2}, ValueError, "tokens_of counted -2"),
    "tokens_of too few": ({"tokens_of": lambda m: 1}, RuntimeError, "tokens_of counted 2 tokens"),
    "backward no function": ({"backward": "scaler"}, TypeError, "backward is "),
    "agree no dict": ({"agree": ["step"]}, TypeError, "agree is "),
    "model no module": ({"model": "ddp"}, TypeError, "model is "),
    "model that reduces nothing": ({"model": torch.nn.Linear(1, 1)}, TypeError, "model is a Linear"),
}  # fmt: skip


def _steps() -> Iterator[Case]:
    for about, (odd, error, words) in STEPS.items():
        yield raises(f"accumulate_gradients, {about}", partial(step, **odd), error, words)
    for kind, loss in {"a tensor": torch.ones(()), "none": None, "a tuple": (torch.ones(()), 2)}.items():
        yield raises(f"sum_over_ranks, {kind}", partial(seqpar.sum_over_ranks, loss, None), TypeError, "loss is ")
    for kind, facts in {"a list": ["step"], "none": None, "text": "step"}.items():
        yield raises(
            f"check_agreement, facts {kind}", partial(seqpar.check_agreement, facts, None), TypeError, "facts is "
        )
    for kind, numbers in {"floats": [0.5], "text": "12", "none": None, "too large": [2**70], "a bool": [True]}.items():
        call = partial(seqpar.check_agreement, {}, None, numbers)
        yield raises(
            f"check_agreement, numbers {kind}", call, ValueError if kind == "too large" else TypeError, "numbers"
        )
    good = {"a generator": lambda: iter([2, 2]), "a tuple": lambda: (2, 2), "with one of no tokens": lambda: [4, 0]}
    for kind, made in good.items():
        yield equals(
            f"accumulate_gradients, {kind}", partial(_summed, made), torch.tensor(12.0).double(), torch.tensor(4)
        )
    alone = partial(_summed, lambda: [2, 2], group=seqpar.THIS_PROCESS)
    yield equals("accumulate_gradients, this process", alone, torch.tensor(12.0).double(), torch.tensor(4))
    counts = {"a tensor": torch.tensor, "a float": float, "a float tensor": lambda m: torch.tensor(float(m))}
    for kind, tokens_of in counts.items():
        call = partial(_summed, lambda: [2, 2], tokens_of)
        yield equals(f"accumulate_gradients, tokens_of {kind}", call, torch.tensor(12.0).double(), torch.tensor(4))


def _summed(made: Callable[[], Any], tokens_of: Callable[[int], Any] = int, **given: Any) -> tuple[Tensor, ...]:
    return tuple(step(micro_batches=made(), tokens_of=tokens_of, **given)[:2])


def _shards() -> Iterator[Case]:
    """Vocabularies that there are not."""
    for name, values in {
        "start": {"negative": -1, "beyond": 10, "a float": 0.0, "none": None, "a bool": True, "text": "0"},
        "vocab_size": {"0": 0, "negative": -3, "a float": 9.0, "none": None, "text": "9"},
    }.items():
        for kind, value in values.items():
            error = ValueError if kind in ("negative", "beyond", "0") else TypeError
            given = {"group": None, "start": 0, "vocab_size": 9, name: value}
            yield raises(f"VocabShard, {name} {kind}", partial(seqpar.VocabShard, **given), error, f"{name} is ")
    for value, error in ((-1, ValueError), (2.0, TypeError), (None, TypeError), ("9", TypeError)):
        yield raises(f"VocabShard.of {value!r}", partial(seqpar.VocabShard.of, value, None), error, "weight_rows is ")


def _plans() -> Iterator[Case]:
    """Sizes that there are not, and those that are just there."""
    sizes: dict[str, Any] = {"tokens": 10, "d": 4, "vocab": 7}
    counts = {"0": 0, "negative": -2, "a float": 8.0, "text": "8", "a bool": True, "none": None, "nan": NAN}
    for name in ("tokens", "d", "vocab", "devices"):
        for kind, value in counts.items():
            call = partial(memory.memory_plan, **(sizes | {name: value}))
            yield raises(f"memory_plan, {name} {kind}", call, ValueError, f"{name} is {value!r}")
    others = {"layout": ("FSDP", None, 3), "dtype": ("int8", None, torch.int64, "nn"), "device": ("tpu", None, 0)}
    for name, values in others.items():
        for value in values:
            call = partial(memory.memory_plan, **(sizes | {name: value}))
            yield raises(f"memory_plan, {name} {value!r}", call, ValueError, f"{name} is {value!r}")
    for devices, here in ((1, 10), (3, 4), (10, 1), (11, 1), (1000, 1)):
        yield equals(f"memory_plan, 10 tokens on {devices}", partial(_tokens_here, devices), torch.tensor(here))


def _tokens_here(devices: int) -> tuple[Tensor, ...]:
    plan = memory.memory_plan(tokens=10, d=4, vocab=7, devices=devices)
    return (torch.tensor(plan.tokens_here),)


CASES = [*_not_dense(), *_groups(), *_time(), *_targets(), *_steps(), *_shards(), *_plans()]
