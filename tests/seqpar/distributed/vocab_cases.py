"""What the tests of a split vocabulary share: a rank's tensors of a case, comparisons in the parent, counters."""

from collections import Counter
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tests.seqpar.linear.linear_loss import LinearCase


def numbers(tensor):
    return None if tensor is None else tensor.detach().numpy()


def own_rows(whole, start, rows, frozen=False):
    return whole.detach()[start : start + rows].clone().requires_grad_(whole.requires_grad and not frozen)


def parts(case, vocab, rows, full_class_weight=False):
    """A rank's tensors of a case."""
    made = case.tensors()
    names = [n for n in ("weight", "bias", "class_weight") if n in made]
    for name in names:
        if name != "class_weight" or not full_class_weight:
            made[name] = own_rows(made[name], vocab.start, rows)
    return made


def answer(loss, tensors):
    """What a rank sends to the parent."""
    leaves = {n: numbers(tensors[n].grad) for n in LEAVES if n in tensors}
    return [float(t.detach()) for t in loss], leaves


def assert_close(what, got, expected, rtol=1e-12):
    got, expected = torch.as_tensor(got, dtype=torch.float64), expected.detach()
    assert got.shape == expected.shape, what
    size = float(expected.abs().max()) if expected.numel() else 0.0
    apart = float((got - expected).abs().max()) if expected.numel() else 0.0
    assert apart <= rtol * size + 1e-14, f"{what} is off by {apart:.3g} where the reference is {size:.3g} large"


LEAVES = ("hidden", "weight", "bias", "token_weight")

PLAIN = LinearCase(
    (2, 5), 4, 11, -100, 0.0, True, False, 0.1, "torch", 0.0, None, 1.0, False, 1.0, False, 3, 1.0, frozenset(), 5
)  # fmt: skip
"""Ten rows in four chunks."""


@contextmanager
def counted():
    """Counts this rank's collectives by name."""
    calls: Counter[str] = Counter()
    names = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "reduce_scatter_tensor")
    originals = {name: getattr(dist, name) for name in names}

    def counting(name):
        def call(*arguments, **keywords):
            calls[name] += 1
            return originals[name](*arguments, **keywords)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def message(function, *arguments, **keywords):
    """The exception's type and text, or None."""
    try:
        function(*arguments, **keywords)
    except Exception as error:
        return type(error).__name__, str(error)
    return None
