"""One kernel for a row's loss and gradient: what is stored, counted and refused around it, in Triton's interpreter."""

import re
import subprocess
import sys
import weakref
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar.core.chunks import cover
from seqpar.kernels import row_kernel
from seqpar.linear.fused_loss import FusedLoss
from tests.seqpar.kernels.interpreted import DEVICE, NUMPY_SAYS, kernels

pytestmark = [pytest.mark.unswitched, pytest.mark.filterwarnings(NUMPY_SAYS)]

ROWS, WIDTH, VOCAB = 12, 4, 21


def problem(dtype=torch.float64, rows=ROWS):
    torch.manual_seed(0)
    sizes = {"hidden": (rows, WIDTH), "weight": (VOCAB, WIDTH), "bias": (VOCAB,)}
    leaves = {name: torch.randn(size, dtype=torch.float64).to(DEVICE, dtype) for name, size in sizes.items()}
    return {name: t.requires_grad_() for name, t in leaves.items()}, torch.randint(VOCAB, (rows,), device=DEVICE)


def of(leaves, target, **options):
    return seqpar.linear_cross_entropy(leaves["hidden"], leaves["weight"], target, **options)


def gradients(leaves, target, wanted, factor=1.0, **options):
    """Of the kernel, and in float64 of the plain loss."""
    with kernels() as launched:
        loss = of(leaves, target, bias=leaves["bias"], **options)
        got = torch.autograd.grad(loss.total * factor, [leaves[name] for name in wanted])
    assert set(launched) == {"_row_loss"}
    wide = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    logits = nn.functional.linear(wide["hidden"], wide["weight"], wide["bias"])
    plain = nn.functional.cross_entropy(logits, target, reduction="sum") * factor
    return dict(zip(wanted, got, strict=True)), dict(
        zip(wanted, torch.autograd.grad(plain, [wide[name] for name in wanted]), strict=True)
    )


def error(got, right):
    return float((got.double() - right).norm() / right.norm())


EVERY = ("hidden", "weight", "bias")


@pytest.mark.parametrize("chunk_tokens", [None, 5])
@pytest.mark.parametrize("wanted", [EVERY, ("bias",), ("weight",), ("hidden", "bias"), ("bias", "hidden")])
def test_the_bias_gradient_beside_the_weights_is_there_whichever_gradients_are_asked_for(wanted, chunk_tokens):
    leaves, target = problem(torch.bfloat16)
    got, right = gradients(leaves, target, wanted, 0.37, chunk_tokens=chunk_tokens)
    for name in wanted:
        assert got[name].dtype == torch.bfloat16
        assert got[name].is_contiguous()
        assert error(got[name], right[name]) < 2**-7, name


@pytest.mark.parametrize("first", [("weight",), ("bias",)])
def test_weight_and_bias_may_be_asked_for_by_two_backwards_with_factors_of_their_own(first):
    leaves, target = problem(torch.bfloat16)
    right = gradients(leaves, target, EVERY)[1]
    with kernels():
        loss = of(leaves, target, bias=leaves["bias"], chunk_tokens=5)
        last = tuple({"weight", "bias"} - {*first})
        for names, factor in ((first, 0.5), (last, 0.3)):
            upstream = torch.full((), factor, device=DEVICE)
            (got,) = torch.autograd.grad(loss.total, [leaves[n] for n in names], upstream, retain_graph=True)
            assert error(got, factor * right[names[0]]) < 2**-7, names


def test_a_large_sum_is_overwritten_by_its_gradient_and_has_no_column_beside_it():
    leaves, target = problem(torch.bfloat16)
    with patch("seqpar.linear.fused_loss.SPARE", 1), patch("torch.cat", side_effect=AssertionError):
        for chunk_tokens in (None, 5):
            got, right = gradients(leaves, target, EVERY, chunk_tokens=chunk_tokens)
            for name in EVERY:
                assert error(got[name], right[name]) < 2**-7, name
                # An odd number of rows has a larger half
                assert got[name].untyped_storage().nbytes() <= got[name].nbytes + 2 * WIDTH


def test_in_float32_no_column_stands_beside_the_weights_gradient():
    """It would have to be copied away from it, with as much memory as the gradient takes."""
    leaves, target = problem(torch.float32)
    with patch("torch.cat", side_effect=AssertionError):
        got, right = gradients(leaves, target, EVERY, chunk_tokens=5)
    for name in EVERY:
        assert error(got[name], right[name]) < 1e-5, name


def test_one_chunk_with_fewer_rows_than_columns_has_no_column_beside_it_either():
    leaves, target = problem(torch.bfloat16, rows=WIDTH - 1)
    with patch("torch.cat", side_effect=AssertionError):
        got, right = gradients(leaves, target, EVERY)
    for name in EVERY:
        assert error(got[name], right[name]) < 2**-7, name


def test_beyond_what_float32_counts_sums_are_float64():
    leaves, target = problem(torch.float32)
    with kernels():
        few = of(leaves, target)
        with patch("seqpar.linear.fused_loss.COUNTED", 3):
            many = of(leaves, target)
    assert [t.dtype for t in many] == [t.dtype for t in few]
    assert many.correct == few.correct
    torch.testing.assert_close(many.total, few.total)


CALLS = {
    "linear_cross_entropy": lambda h, w, t: seqpar.linear_cross_entropy(h, w, t, ignore_index=-1),
    "token_scores": lambda h, w, t: seqpar.token_scores(h, w, t, ignore_index=-1),
    "scored_loss": lambda h, w, t: seqpar.scored_loss(h, w, t, lambda scores: -scores.log_prob, ignore_index=-1),
    "linear_distillation": lambda h, w, t: seqpar.linear_distillation(
        h, w, seqpar.TeacherHidden(h, w), t, divergence="forward_kl", ignore_index=-1
    ),
    "soft targets": lambda h, w, t: seqpar.linear_cross_entropy(
        h, w, t, ignore_index=-1, soft_target=seqpar.SparseTarget(t.clamp(0, 4).unsqueeze(-1), torch.ones(2, 3, 1))
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("outside", [5, -2, 2**40])
def test_a_target_outside_the_vocabulary_is_named_although_it_is_read_late(call, outside):
    hidden, weight = torch.randn(2, 3, 4, device=DEVICE), torch.randn(5, 4, device=DEVICE)
    target = torch.tensor([[0, -1, 1], [4, outside, -1]], device=DEVICE)
    with (
        kernels(),
        pytest.raises(IndexError, match=rf"target {outside} at position \(1, 1\) is outside the vocabulary"),
    ):
        call(hidden, weight, target)


def test_padding_rows_are_counted_out_and_never_projected():
    leaves, target = problem()
    target[::3] = -100
    rows = []
    with torch.no_grad(), kernels(), patch("torch.mm", lambda a, b, out=None: rows.append(len(a)) or a @ b):
        loss = of(leaves, target, chunk_tokens=4)
    assert loss.tokens == 8
    assert rows == [4, 4]


@pytest.mark.parametrize(("classes", "expected"), [(80, 8), (81, 16), (161, 32), (5000, 32)])
def test_a_larger_vocabulary_has_larger_blocks_up_to_four_times(classes, expected):
    blocks = []

    def run(kernel, programs, numbers, device, *arguments, most=None, **settings):
        blocks.append(most)

    hidden, weight = torch.randn(3, 4, device=DEVICE), torch.randn(classes, 4, device=DEVICE)
    target = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with (
        kernels(),
        patch.object(row_kernel, "LARGEST_BLOCK", 8),
        patch("seqpar.linear.inputs.is_capturing", lambda _: True),
        patch.object(row_kernel, "run_programs", run),
    ):
        seqpar.linear_cross_entropy(hidden, weight, target)
    assert blocks[-1] == expected


def test_chunks_cover_all_rows_if_they_are_adjacent_slices_from_the_first_to_the_last():
    assert cover([slice(0, 3), slice(3, 5)], 5)
    assert not cover([slice(0, 3), slice(3, 5)], 6)
    assert not cover([slice(0, 3), slice(4, 6)], 6)
    assert not cover([slice(0, 6, 2)], 6)
    assert not cover([torch.arange(6)], 6)
    assert cover([], 0)


@pytest.mark.kernels
@pytest.mark.unswitched
def test_a_chunk_takes_at_most_12_dispatches_and_a_call_14_and_the_logits_are_passed_over_four_times():
    """On the emulated accelerator with CUDA's branches: three products and one kernel touch all logits of a chunk."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.dispatches"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, engine, last = done.stdout.splitlines()
    chunk, call = (int(word.split()[1]) for word in last.split(", "))
    assert chunk <= 12
    assert call <= 14
    assert engine == f"LossCompute: {last}"
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")]
    assert {row[-2].strip() for row in rows[2:]} == {"4"}


@pytest.mark.kernels
def test_a_training_step_at_d128_has_at_most_455_launches_and_385_with_compiled_layers():
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.dispatches", "--training"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    plain, compiled = (
        tuple(map(int, re.search(rf"^{what}: (\d+) launches, (\d+) reads$", said, re.MULTILINE).groups()))
        for what in ("training step", "with compiled layers")
    )
    assert 300 < plain[0] <= 455
    assert 300 < compiled[0] <= 385
    assert plain[1] == compiled[1] == 3
    assert re.search(r"^ +1\d\d launch  generated$", said, re.MULTILINE)


def test_the_results_of_the_compiled_operator_share_no_memory():
    """torch refuses an operator of which two results do, such as the sums that one kernel has written."""
    leaves, target = problem(torch.float32)
    compiled = torch.compile(of, backend="aot_eager", fullgraph=True)
    with kernels() as launched:
        loss = compiled(leaves, target, bias=leaves["bias"])
        got = torch.autograd.grad(loss.total, list(leaves.values()))
    assert set(launched) == {"_row_loss"}
    right = of(leaves, target, bias=leaves["bias"])
    torch.testing.assert_close(loss, right)
    for a, b in zip(got, torch.autograd.grad(right.total, list(leaves.values())), strict=True):
        torch.testing.assert_close(a, b)


class ProductsAlive(TorchDispatchMode):
    """Counts the products of a chunk that exist when another one is made."""

    def __init__(self):
        super().__init__()
        self.products = []
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default and result.size(1) == VOCAB_IN_VECTORS:
            self.products.append(weakref.ref(result))
            self.most = max(self.most, sum(product() is not None for product in self.products))
        return result


VOCAB_IN_VECTORS = 32
"""Of which rows are aligned as they are, so that each product takes memory of its own."""


def test_the_products_of_two_chunks_never_exist_at_the_same_time():
    """The second took as much memory as the first, 512 MiB on an accelerator."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=True)
    weight = torch.randn(VOCAB_IN_VECTORS, WIDTH, device=DEVICE, requires_grad=True)
    target = torch.randint(VOCAB_IN_VECTORS, (ROWS,), device=DEVICE)
    with kernels(), ProductsAlive() as alive:
        seqpar.linear_cross_entropy(hidden, weight, target, chunk_tokens=4).total.backward()
    assert len(alive.products) == 3
    assert alive.most == 1


def test_the_memory_between_two_rows_is_zero_after_the_loss():
    """A product may read whole tiles, beyond the end of a row, where new memory may hold nan."""
    kept = []
    allocate = FusedLoss._product_memory

    def filled(self, most):
        memory_KV = allocate(self, most)
        kept.append(memory_KV.as_strided((most, memory_KV.stride(0)), memory_KV.stride()).fill_(torch.nan))
        return memory_KV

    hidden, weight = (torch.randn(n, 8, device=DEVICE, requires_grad=True) for n in (5, 123))
    target = torch.randint(123, (5,), device=DEVICE)
    with kernels(), patch.object(FusedLoss, "_product_memory", filled):
        seqpar.linear_cross_entropy(hidden, weight, target).total.backward()
    (padded,) = kept
    assert padded.shape == (5, 128)
    assert (padded[:, 123:] == 0).all()
    assert padded[:, :123].all()
