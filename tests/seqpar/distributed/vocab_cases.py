"""What the tests of a split vocabulary share: a rank's tensors of a case, comparisons in the parent, counters."""

from collections import Counter
from contextlib import contextmanager

import torch
import torch.distributed as dist

import seqpar
from tests.seqpar.linear.linear_loss import LinearCase


def numbers(tensor):
    return None if tensor is None else tensor.detach().numpy()


def own_rows(whole, start, rows, frozen=False):
    return whole.detach()[start : start + rows].clone().requires_grad_(whole.requires_grad and not frozen)


def parts(case, vocab, rows, full_class_weight=False, without=()):
    """A rank's tensors of a case."""
    made = {name: t for name, t in case.tensors().items() if name not in without}
    names = [n for n in ("weight", "bias", "class_weight") if n in made]
    for name in names:
        if name != "class_weight" or not full_class_weight:
            made[name] = own_rows(made[name], vocab.start, rows)
    return made


def answer(loss, tensors, upstream=1.0):
    """What a rank sends to the parent: the loss, and the gradients of so many times its total."""
    if loss.total.requires_grad:
        (loss.total * upstream).backward()
    leaves = {n: numbers(tensors[n].grad) for n in LEAVES if n in tensors}
    return [float(t.detach()) for t in loss], leaves


def whole_gradients(per_rank, leaves, order):
    """Each rank's gradients, those of its shard joined with the others' in the order of the classes."""
    assert all(fields == per_rank[0][0] for fields, _ in per_rank), "the loss differs between ranks"
    for name in set(LEAVES) - set(leaves):
        assert all(grads.get(name) is None for _, grads in per_rank), f"{name} is frozen and got a gradient"
    in_order = [per_rank[order.index(place)][1] for place in range(len(order))]
    joined = {n: torch.cat([torch.as_tensor(g[n]) for g in in_order]) for n in ("weight", "bias") if n in leaves}
    return [{n: torch.as_tensor(grads[n]) for n in leaves if n not in joined} | joined for _, grads in per_rank]


def leaves_and_gradients(tensors, reference, upstream):
    """The names of the tensors that need a gradient, and those of so many times the plain loss."""
    leaves = [n for n in LEAVES if n in tensors and tensors[n].requires_grad]
    return leaves, torch.autograd.grad(reference * upstream, [tensors[n] for n in leaves]) if leaves else ()


def shard_of(case, split, order, rank):
    """A rank's shard, and how many classes it has, where the ranks have their classes in any order."""
    return seqpar.VocabShard(dist.group.WORLD, sum(split[: order[rank]]), case.vocab_size), split[order[rank]]


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
