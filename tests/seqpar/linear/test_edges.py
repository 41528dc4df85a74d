"""Values at which a wrong formula agrees with the right one on ordinary data, and dtypes beside the main path."""

import gc
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from seqpar import objectives as o
from seqpar.integrations.trl_node import LogitStatistics
from seqpar.kernels import row_kernel
from seqpar.linear.lora import adapter_rows
from seqpar.testing.ranks import ranks
from tests.seqpar.kernels.interpreted import DEVICE, NUMPY_SAYS, kernels
from tests.seqpar.option_calls import WATCH

pytestmark = pytest.mark.usefixtures("nothing_on_the_default_device")

V, D, N = 7, 4, 6


def t(seed, *shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


HIDDEN, WEIGHT, BIAS = t(0, N, D), t(1, V, D), t(2, V)
TARGET = torch.tensor([0, 2, 6, 5, 6, 1])
TEACHER = t(3, N, 3), t(4, V, 3)
EVERY_CLASS = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(i)) for i in range(N)])


def few_classes(rest):
    log_probs = (TEACHER[0] @ TEACHER[1].T).log_softmax(-1)
    return seqpar.TeacherTopK(EVERY_CLASS[:, :3], log_probs.gather(1, EVERY_CLASS[:, :3]), rest)


LOSSES = {
    "cross-entropy": lambda h, w, y, _, **more: seqpar.linear_cross_entropy(h, w, y, label_smoothing=0.1, **more),
    "soft target": lambda h, w, y, _, **more: seqpar.linear_cross_entropy(
        h, w, y, soft_target=seqpar.SparseTarget(EVERY_CLASS[:, :2], torch.tensor([0.75, 0.25]).expand(N, 2)), **more
    ),
    "scores": lambda h, w, y, _, **more: o.per_item(
        -(found := seqpar.token_scores(h, w, y, entropy=True, ids=EVERY_CLASS, top_k=V, **more)).log_prob
        + found.entropy + found.log_probs_at.cos().sum(-1) + found.top_log_probs.sum(-1) + 0.1 * found.top_ids[:, 0]
    ),
    "one class for the rest": lambda h, w, y, _, **more: seqpar.linear_distillation(
        h, w, few_classes("one_class"), y, divergence="forward_kl", **more
    ),
    "whole teacher": lambda h, w, y, rows, **more: seqpar.linear_distillation(
        h, w, seqpar.TeacherHidden(TEACHER[0], TEACHER[1][rows]), y, divergence="reverse_kl", **more
    ),
}  # fmt: skip


def results(loss, rows, **more):
    """Value and gradients, with these rows of the weight."""
    hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT[rows].clone().requires_grad_()
    total = LOSSES[loss](hidden, weight, TARGET, rows, bias=BIAS[rows], **more).total
    return total.detach(), *torch.autograd.grad(total, [hidden, weight])


def with_an_empty_shard(rank, world, loss):
    rows = [slice(0, 3), slice(3, 3), slice(3, V)][rank]
    return results(loss, rows, vocab=seqpar.VocabShard.of(rows.stop - rows.start, dist.group.WORLD))


@pytest.mark.unswitched
@pytest.mark.parametrize("loss", LOSSES)
def test_a_rank_without_classes_takes_part(loss):
    total, hidden, weight = results(loss, slice(None))
    found = ranks(3, with_an_empty_shard, loss)
    for theirs in found:
        torch.testing.assert_close(theirs[0], total, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(theirs[1], hidden, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([theirs[2] for theirs in found]), weight, rtol=1e-12, atol=1e-12)


def top_classes(rank, world, masked):
    """The classes in order of their probability, those of probability 0 last, on a rank of a split vocabulary."""
    rows = [slice(0, 2), slice(2, V)][rank]
    bias = torch.zeros(V, dtype=torch.float64).index_fill(0, torch.tensor(masked), -torch.inf)
    shard = seqpar.VocabShard.of(rows.stop - rows.start, dist.group.WORLD)
    return seqpar.token_scores(HIDDEN, WEIGHT[rows], TARGET * 0 + 1, bias=bias[rows], top_k=V, vocab=shard).top_ids


@pytest.mark.parametrize("masked", [[0], [4], [0, 3, 6], [5, 6]])
def test_the_least_likely_classes_are_each_named_once_over_ranks(masked):
    bias = torch.zeros(V, dtype=torch.float64).index_fill(0, torch.tensor(masked), -torch.inf)
    expected = (HIDDEN @ WEIGHT.T + bias).sort(dim=-1, descending=True, stable=True).indices
    for found in ranks(2, top_classes, masked):
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_with_every_class_has_no_rest_though_its_probabilities_sum_to_less_than_1(dtype):
    """Were the rounding a rest, the student, which has no class for it, would be infinitely far away."""
    log_probs = (TEACHER[0] @ TEACHER[1].T).log_softmax(-1).to(dtype)
    for below in (0.0, 4 * torch.finfo(dtype).eps):
        teacher = seqpar.TeacherTopK(torch.arange(V).expand(N, V), log_probs - below, "one_class")
        loss = seqpar.linear_distillation(HIDDEN, WEIGHT, teacher, TARGET, divergence="forward_kl").total
        expected = F.kl_div(
            (HIDDEN @ WEIGHT.T).log_softmax(-1), (log_probs - below).double(), log_target=True, reduction="sum"
        )
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=10 * N * below)


@pytest.mark.filterwarnings(NUMPY_SAYS)
@pytest.mark.parametrize("block", [1, 2, 4, row_kernel.LARGEST_BLOCK])
@pytest.mark.parametrize("tied", [(1, 5), (1, 2, 4, 5), (0, 4), (5, 6), (3, 6)])
def test_of_equally_likely_classes_the_lowest_is_best_in_whatever_blocks_they_are(block, tied):
    weight = torch.zeros(V, 1, device=DEVICE).index_fill(0, torch.tensor(tied, device=DEVICE), 2.0)
    hidden, target = torch.ones(3, 1, device=DEVICE), torch.tensor([tied[0], tied[-1], 0], device=DEVICE)
    with kernels() as launched, patch.object(row_kernel, "LARGEST_BLOCK", block):
        found = seqpar.token_scores(hidden, weight, target, top_k=1).top_ids.flatten().tolist()
        correct = seqpar.linear_cross_entropy(hidden, weight, target).correct
    assert launched
    assert found == [tied[0]] * 3
    assert correct == (target == tied[0]).sum()


@pytest.mark.filterwarnings(NUMPY_SAYS)
def test_the_bias_gradient_of_chunks_that_cancel_is_not_rounded_chunk_by_chunk():
    """The kernel's gradient of the logits is in the products' dtype, and so would its sums over a chunk's rows be."""
    # So many rows of one class in a chunk that rounding their sum would outweigh the rounding of each
    rows, chunk = 128, 64
    dtype = torch.float16
    hidden = t(5, chunk, D).repeat(rows // chunk, 1).to(DEVICE, dtype)
    weight, bias = WEIGHT.to(DEVICE, dtype), BIAS.to(DEVICE, dtype)
    target = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    factor = torch.tensor([1.0, -0.97], device=DEVICE).repeat_interleave(chunk).repeat(rows // chunk // 2)

    def gradient(kind):
        leaf = bias.to(kind).requires_grad_()
        logits = F.linear(hidden.to(kind), weight.to(kind), leaf).to(torch.promote_types(kind, torch.float32))
        losses = F.cross_entropy(logits, target, reduction="none")
        return torch.autograd.grad((losses * factor.to(losses.dtype)).sum(), leaf)[0].double()

    leaf = bias.clone().requires_grad_()
    with kernels() as launched:
        loss = seqpar.linear_cross_entropy(
            hidden, weight, target, bias=leaf, token_weight=factor.to(dtype), chunk_tokens=chunk
        )
    assert launched
    (found,) = torch.autograd.grad(loss.total, leaf)
    factor = factor.to(dtype)
    truth = gradient(torch.float64)
    rounding = torch.finfo(dtype).eps * truth.abs().max()
    assert (found.double() - truth).abs().max() <= max(2 * (gradient(dtype) - truth).abs().max(), rounding)


def test_an_adapters_rows_have_the_digits_of_the_adapter_beside_a_model_in_bfloat16():
    hidden, lora_a = t(6, N, 64).bfloat16(), t(7, 2, 64).float()
    exact = hidden.double() @ lora_a.double().T * 0.5
    torch.testing.assert_close(adapter_rows(hidden, lora_a, 0.5).double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_mean_logit_is_at_most_twice_as_far_from_the_truth_as_plain_torchs(parts):
    rows, weight, bias = t(8, 50, 64), t(9, 300, 64) + 3, t(10, 300)
    rows, weight = (torch.cat([tensor.bfloat16()] * parts, -1) for tensor in (rows, weight))
    bias = bias.bfloat16()
    found = LogitStatistics(rows, weight, bias=bias, softcap=None, temperature=1.0).mean_logits()
    truth = F.linear(rows.double(), weight.double(), bias.double()).mean(-1)
    plain = F.linear(rows, weight, bias)
    ours, theirs = ((mean.double() - truth).norm() for mean in (found, plain.float().mean(-1)))
    assert ours <= 2 * theirs
    assert ours <= 1e-5 * truth.norm()


def test_an_engines_scores_take_the_size_of_chunk_that_the_call_names():
    engine = seqpar.LossCompute(nn.Linear(D, V).double(), seqpar.CrossEntropy(), chunk_tokens=20)
    largest = {}
    for given in ({}, {"chunk_tokens": 8}, {"chunk_tokens": None}):
        with WATCH:
            WATCH.rows = 0
            engine.token_scores(HIDDEN.repeat(6, 1), TARGET.repeat(6), **given)
        largest[given.get("chunk_tokens", 20)] = WATCH.rows
    assert largest[8] < largest[20] < largest[None]


@pytest.mark.parametrize("frozen", [False, True])
def test_no_logits_are_kept_after_backward_though_the_scores_are(frozen):
    classes = 1_009  # a number that no tensor of another test has
    weight = t(11, classes, D).requires_grad_(not frozen)
    scores = seqpar.token_scores(HIDDEN.clone().requires_grad_(), weight, TARGET, entropy=True)
    for _ in range(2):
        (scores.log_prob.sum() + scores.entropy.sum()).backward(retain_graph=True)
        gc.collect()
        of_any_test = (each for each in gc.get_objects() if type(each) is Tensor and not each.is_nested)
        kept = [each for each in of_any_test if each.dim() > 1]
        assert not [
            each.shape
            for each in kept
            if classes in each.shape
            and each is not weight
            and each is not weight.grad
            and each.data_ptr() != weight.data_ptr()
        ]


def with_padding_checked(launch, seen):
    """Launch a kernel, and see what it has left between the last class and the next row."""

    def launching(kernel, product_KV, *arguments, **settings):
        launch(kernel, product_KV, *arguments, **settings)
        written = [
            each
            for each in (product_KV, *arguments)
            if isinstance(each, Tensor) and each.stride() == product_KV.stride()
        ]
        for each in written:
            whole = each.as_strided((len(each), each.stride(0)), (each.stride(0), 1))
            seen.append((kernel.__name__, bool(whole.isfinite().all())))

    return launching


@pytest.mark.filterwarnings(NUMPY_SAYS)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_lies_behind_the_bias_in_memory_is_not_read(frozen):
    """Padding behind a row may be read by a matrix product, whose width is a multiple of its vectors'."""
    behind = torch.full((64,), torch.nan, dtype=torch.float64, device=DEVICE)
    behind[:V] = BIAS
    bias = behind[:V]
    hidden = HIDDEN.to(DEVICE, copy=True).requires_grad_()
    weight = WEIGHT.to(DEVICE, copy=True).requires_grad_(not frozen)
    seen = []
    with kernels(), patch.object(row_kernel, "launch", with_padding_checked(row_kernel.launch, seen)):
        scores = seqpar.token_scores(hidden, weight, TARGET.to(DEVICE), bias=bias, entropy=True)
        (scores.log_prob.sum() + scores.entropy.sum()).backward()
        seqpar.linear_cross_entropy(hidden, weight, TARGET.to(DEVICE), bias=bias).total.backward()
    gradients = [finite for name, finite in seen if "sums" not in name]
    assert gradients
    assert all(gradients), seen


def test_kernels_number_rows_in_64_bits():
    """Row 65,000 of 50,000 classes begins beyond 2^31; the interpreter would need as much memory to show it."""
    source = Path(row_kernel.__file__).with_name("triton_rows.py").read_text()
    assert source.count("tl.program_id(") == source.count("tl.program_id(0).to(tl.int64)") > 0
