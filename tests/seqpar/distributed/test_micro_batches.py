"""The micro-batches of a step: a loader that fills its memory again is refused, and memory in common is not."""

from array import array
from collections import UserDict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import seqpar

SIZES = (5, 3, 4)
DATA = [(torch.arange(40.0).reshape(5, 8) + i, torch.arange(5) + 7 * i) for i in range(3)]


class Pair(NamedTuple):
    hidden: object
    target: object


@dataclass(frozen=True)
class Record:
    hidden: object
    target: object


class SlottedObject:
    __slots__ = ("hidden", "target")

    def __init__(self, hidden, target):
        self.hidden = hidden
        self.target = target


@dataclass(slots=True)
class Slotted:
    hidden: object
    target: object


CONTAINERS = {
    "a tuple": lambda h, t: (h, t),
    "a list": lambda h, t: [h, t],
    "a dict": lambda h, t: {"hidden": h, "target": t},
    "a UserDict": lambda h, t: UserDict(hidden=h, target=t),
    "a NamedTuple": Pair,
    "a dataclass": Record,
    "a dataclass with slots": Slotted,
    "an object": lambda h, t: SimpleNamespace(hidden=h, target=t),
    "an object with slots": SlottedObject,
    "objects in an object": lambda h, t: SimpleNamespace(source=SimpleNamespace(hidden=[h]), target=t),
    "nested": lambda h, t: {"inputs": [{"hidden": h}], "target": (t,)},
}


def by_torch():
    return torch.empty(5, 8), torch.empty(5, dtype=torch.long)


def by_numpy():
    return np.empty((5, 8), np.float32), np.empty(5, np.int64)


def whole(buffer, n):
    return buffer


def rows(buffer, n):
    return buffer[:n]


def as_tensor(seen):
    """What is seen of an array of numpy's as a tensor; torch does not count what numpy writes."""
    return lambda buffer, n: torch.from_numpy(seen(buffer, n))


def refilling(buffers, seen):
    """A loader that fills its buffers again with batches of other lengths, of which it shows so much."""

    def loader():
        h, t = buffers()
        for (new_h, new_t), n in zip(DATA, SIZES, strict=True):
            h[:n], t[:n] = new_h[:n], new_t[:n]
            yield seen(h, n), seen(t, n)

    return loader


def only_hidden():
    h = torch.empty(5, 8)
    for new_h, new_t in DATA:
        h.copy_(new_h)
        yield h, new_t


def two_in_turn():
    """A ring of two buffers: the third micro-batch overwrites the first."""
    ring = [torch.empty(5, 8), torch.empty(5, 8)]
    for i, (new_h, new_t) in enumerate(DATA):
        ring[i % 2].copy_(new_h)
        yield ring[i % 2], new_t


def in_inference_mode():
    with torch.inference_mode():
        h = torch.empty(5, 8)
    for new_h, new_t in DATA:
        with torch.inference_mode():
            h.copy_(new_h)
        yield h, new_t


def large_and_transposed():
    h = torch.empty(40, 300).t()
    for new_h, new_t in DATA:
        h.fill_(new_h.sum())
        yield h, new_t


WHOLE = {
    "by torch": refilling(by_torch, whole),
    "by numpy": refilling(by_numpy, as_tensor(whole)),
    "arrays": refilling(by_numpy, whole),
}
PARTLY = {"by views": refilling(by_torch, rows), "only hidden": only_hidden, "two in turn": two_in_turn}
REFILLED = WHOLE | PARTLY | {
    "by views of numpy's": refilling(by_numpy, as_tensor(rows)),
    "in inference mode": in_inference_mode,
    "large and transposed": large_and_transposed,
}  # fmt: skip


def take(micro_batches):
    """Run a step, and return the micro-batches that its loss saw."""
    seen = []
    weight = torch.ones((), requires_grad=True)

    def loss_of(micro_batch):
        seen.append(micro_batch)
        return seqpar.TokenLoss(weight * 1, torch.tensor(1))

    seqpar.accumulate_gradients(micro_batches, loss_of, lambda _: 1)
    return seen


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("loader", REFILLED)
def test_a_loader_that_fills_its_memory_again_is_refused(loader, container):
    made = CONTAINERS[container]
    with pytest.raises(
        ValueError, match=r"^micro-batch 0 of 3 changed when a later one was drawn: [^\n]*copy.deepcopy"
    ):
        take(made(h, t) for h, t in REFILLED[loader]())


def one_dict():
    batch = {}
    for h, t in DATA:
        batch.update(hidden=h, target=t)
        yield batch


def one_object():
    batch = SimpleNamespace()
    for h, _ in DATA:
        batch.hidden = h
        yield batch


def one_list_of_numbers():
    tokens = []
    for _, t in DATA:
        tokens[:] = t.tolist()
        yield tokens


def a_longer_list():
    batch = []
    for h, _ in DATA:
        batch.append(h)
        yield batch


def one_array():
    tokens = array("q", [0] * 8)
    for _, t in DATA:
        tokens[: len(t)] = array("q", t.flatten().tolist()[: len(t)])
        yield {"tokens": tokens}


def one_bytearray():
    tokens = bytearray(8)
    for place, _ in enumerate(DATA):
        tokens[place] = 1
        yield {"tokens": tokens}


def one_queue():
    tokens = deque(maxlen=4)
    for place, _ in enumerate(DATA):
        tokens.append(place)
        yield {"tokens": tokens}


def one_set():
    names = set()
    for place, _ in enumerate(DATA):
        names.add(f"sentence {place}")
        yield {"names": names}


@pytest.mark.parametrize(
    "loader",
    [one_dict, one_object, one_list_of_numbers, a_longer_list, one_array, one_bytearray, one_queue, one_set],
)
def test_a_loader_that_fills_one_container_again_is_refused(loader):
    with pytest.raises(ValueError, match="micro-batch 0 of 3 changed"):
        take(loader())


@pytest.mark.parametrize("container", [name for name in CONTAINERS if name != "an object"])
@pytest.mark.parametrize(("loader", "second"), [*((name, "1") for name in WHOLE), *((name, "[12]") for name in PARTLY)])
def test_a_list_of_what_such_a_loader_gave_is_refused(loader, second, container):
    made = CONTAINERS[container]
    with pytest.raises(ValueError, match=rf"micro_batches\[0\] and \[{second}\] are two objects with the same memory"):
        take([made(h, t) for h, t in REFILLED[loader]()])


MASK = torch.ones(5, 5).tril_()
TABLE = torch.zeros(7, 8).normal_().abs_().clamp_(max=1).mul_(2)
"""Written to more often than it is used, with no row for each of the batch's."""
LANGUAGE = torch.zeros(5).add_(2).add_(1).mul_(2)
TOKENS = torch.arange(31)
ROWS = torch.randn(400, 30)
NAN = torch.full((3, 2000), torch.nan)


def rewritten():
    """A loader that writes the same mask again."""
    mask = torch.empty(5, 5, dtype=torch.bool)
    for _, t in DATA:
        mask.fill_(True)
        yield mask, t.clone()


RIGHT = {
    "tensors of their own": lambda: DATA,
    "a constant mask": lambda: [(MASK, t) for _, t in DATA],
    "a mask written anew": rewritten,
    "a table beside them": lambda: [(TABLE, t) for _, t in DATA],
    "one language for all rows": lambda: [(LANGUAGE, t) for _, t in DATA],
    "a mask expanded": lambda: [(MASK.expand(4, 5, 5), t) for _, t in DATA],
    "slices of one tensor": lambda: TOKENS.split(8),
    "windows that overlap": lambda: [TOKENS[i : i + 11] for i in range(0, 30, 10)],
    "views of other strides": lambda: [ROWS[i::3] for i in range(3)] + [ROWS.t()[i::3] for i in range(3)],
    "arrays of numpy": lambda: [t.numpy() for _, t in DATA],
    "slices of an array": lambda: np.array_split(np.arange(31), 3),
    "nan": lambda: [(NAN, t) for _, t in DATA],
    "one batch several times": lambda: [DATA[0]] * 3,
    "one batch written to, several times": lambda: [(MASK,)] * 3,
    "equal pairs of one batch": lambda: [(ROWS, TOKENS) for _ in range(3)],
    "other numbers with one batch": lambda: [(ROWS, seed) for seed in range(3)],
    "a packed sequence": lambda: [pack_sequence([t, t[:2]]) for _, t in DATA],
    "numbers, text and nothing": lambda: [(1, "a", None), (float("nan"), b"b", {}), ()],
    "functions and modules": lambda: [{"f": len, "m": torch.nn.Linear(1, 1)}] * 2,
    "no rows": lambda: [torch.empty(0, 8).zero_() for _ in range(2)],
    "sparse": lambda: [torch.eye(3).to_sparse() for _ in range(2)],
    "on no device": lambda: [torch.empty(3, device="meta") for _ in range(2)],
}


@pytest.mark.parametrize("drawn", [list, iter], ids=["in a list", "drawn"])
@pytest.mark.parametrize("kind", RIGHT)
def test_memory_that_nobody_writes_to_is_not_refused(kind, drawn):
    made = list(RIGHT[kind]())
    assert len(take(drawn(made))) == len(made)


def test_the_same_as_a_loader_that_copies():
    seen = take((h.clone(), t.clone()) for h, t in REFILLED["by views"]())
    for (h, t), (new_h, new_t), n in zip(seen, DATA, SIZES, strict=True):
        assert torch.equal(h, new_h[:n])
        assert torch.equal(t, new_t[:n])


@pytest.mark.parametrize("drawn", [list, iter], ids=["in a list", "drawn"])
@pytest.mark.parametrize("both", [lambda b: b, lambda b: [b], lambda b: (b, 1), lambda b: Record(b, 1)])
@pytest.mark.parametrize("kind", [dict, UserDict])
def test_labels_may_be_taken_out_of_a_micro_batch(kind, both, drawn):
    """As `batch.pop("labels")` does, by the count as well as by the loss, of one batch that is used twice."""
    batch = both(kind(labels=torch.arange(3)))
    weight = torch.ones((), requires_grad=True)

    def labels_of(micro_batch):
        while not isinstance(micro_batch, (dict, UserDict)):
            micro_batch = micro_batch.hidden if isinstance(micro_batch, Record) else micro_batch[0]
        return micro_batch.pop("labels")

    loss = seqpar.accumulate_gradients(
        drawn([batch, batch]),
        lambda m: seqpar.TokenLoss(weight * labels_of(m).sum(), torch.tensor(3)),
        lambda m: len(labels_of(m)),
    )
    assert loss.tokens == 6
    assert torch.equal(labels_of(batch), torch.arange(3))
