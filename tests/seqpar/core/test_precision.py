"""Low precision: at most twice as far from the float64 truth as plain PyTorch in the same dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import seqpar
from seqpar.core.device_facts import FACTS

LOW = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def errors(loss, hidden, generator, truth):
    """Relative distance of loss and gradients from the float64 truth."""
    got = [loss.detach(), *torch.autograd.grad(loss, (hidden, *generator.parameters()))]
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, truth, strict=True)]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@settings(max_examples=min(15, settings.default.max_examples // 5))  # of each of six pairs
@given(seed=st.integers(0, 999), chunk_tokens=st.sampled_from([5, 64, 1000]), vocab_size=st.integers(20, 900))
def test_at_most_twice_plain_torchs_own_error(dtype, smoothing, seed, chunk_tokens, vocab_size):
    torch.manual_seed(seed)
    rows, width, low = 256, 16, LOW[dtype]
    generator = nn.Linear(width, vocab_size).to(low)
    hidden = torch.randn(rows, width).to(low).requires_grad_()
    target = torch.randint(vocab_size, (rows,))
    exact = nn.Linear(width, vocab_size).double()
    exact.load_state_dict(generator.state_dict())
    hidden64 = hidden.detach().double().requires_grad_()
    plain = nn.CrossEntropyLoss(reduction="sum", label_smoothing=smoothing)
    truth_loss = plain(exact(hidden64), target) / rows
    truth = [truth_loss.detach(), *torch.autograd.grad(truth_loss, (hidden64, *exact.parameters()))]
    criterion = seqpar.LabelSmoothing(smoothing, "torch")
    ours = seqpar.LossCompute(generator, criterion, chunk_tokens=chunk_tokens)(hidden, target).total / rows
    mine = errors(ours, hidden, generator, truth)
    theirs = errors(plain(generator(hidden), target) / rows, hidden, generator, truth)
    # A product of few rows is another routine of the BLAS, with an error of its own: that of the same rows counts too
    few = zip(hidden.split(chunk_tokens), target.split(chunk_tokens), strict=True)
    parts = torch.stack([plain(generator(h), t) for h, t in few]).sum() / rows
    theirs[1] = max(theirs[1], errors(parts, hidden, generator, truth)[1])
    # A result cannot be expected nearer than its own rounding, nor a mean of 256 nearer than its terms' by luck
    floor = torch.finfo(low).eps / 2
    floors = [max(floor / rows**0.5, torch.finfo(torch.float32).eps), floor, floor, floor]
    for name, a, b, least in zip(["loss", "hidden", "weight", "bias"], mine, theirs, floors, strict=True):
        assert a <= 2 * max(b, least), (name, a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_and_the_weight_gradient_do_not_lose_small_terms_to_the_chunk_count(dtype):
    """1,024 equal terms: summed in bf16 they would stop growing at 256."""
    generator = nn.Linear(1, 2, bias=False).to(dtype)
    nn.init.zeros_(generator.weight)
    hidden = torch.ones(1024, 1, dtype=dtype)
    target = torch.zeros(1024, dtype=torch.int64)
    loss = seqpar.LossCompute(generator, seqpar.CrossEntropy(), chunk_tokens=1)(hidden, target)
    (loss.total / loss.tokens).backward()
    assert loss.total.dtype == torch.float32
    torch.testing.assert_close(loss.total.item(), 1024 * torch.log(torch.tensor(2.0)).item(), rtol=1e-6, atol=0)
    assert generator.weight.grad.flatten().tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("devices", [None, ["cpu"] * 3])
def test_under_bf16_autocast_the_engine_follows_autocast(devices):
    torch.manual_seed(1)
    generator, hidden = nn.Linear(8, 50), torch.randn(40, 8, requires_grad=True)
    target, seen = torch.randint(50, (40,)), set()
    generator.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = seqpar.LossCompute(generator, seqpar.CrossEntropy(), devices, chunk_tokens=7)(hidden, target)
        plain = nn.functional.cross_entropy(generator(hidden), target, reduction="sum")
    loss.total.backward()
    mine = [hidden.grad, generator.weight.grad]
    theirs = torch.autograd.grad(plain, (hidden, generator.weight))
    assert seen == {torch.bfloat16}
    assert loss.total.dtype == torch.float32
    assert mine[1].dtype == torch.float32
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()  # two bf16 roundings of the same gradient, 2^-8 each, over 40 rows


@pytest.mark.parametrize("chunk_tokens", [7, 64, 1000])
def test_products_that_widen_themselves_are_added_up_without_a_rounding_between(chunk_tokens, monkeypatch):
    """CUDA's `mm` and `addmm` with `out_dtype`, by stand-ins that say what those promise: the CPU has neither. The real
    ones are in the tests of a GPU."""
    mm, addmm, asked = torch.mm, torch.addmm, []

    def widening_mm(a, b, *, out_dtype=None, out=None):
        asked.append(out_dtype)
        return mm(a, b, out=out) if out_dtype is None else mm(a.to(out_dtype), b.to(out_dtype))

    def widening_addmm(sums, a, b, *, out_dtype=None, out=None):
        asked.append(out_dtype)
        return (
            addmm(sums, a, b, out=out) if out_dtype is None else out.copy_(sums + mm(a.to(out_dtype), b.to(out_dtype)))
        )

    torch.manual_seed(0)
    hidden, weight = torch.randn(256, 16).bfloat16(), (torch.randn(90, 16) / 4).bfloat16().requires_grad_()
    target = torch.randint(90, (256,))
    exact = weight.detach().double().requires_grad_()
    truth = torch.autograd.grad(nn.functional.cross_entropy(hidden.double() @ exact.t(), target), exact)[0]
    plain = torch.autograd.grad(nn.functional.cross_entropy(hidden @ weight.t(), target), weight)[0]
    with monkeypatch.context() as patched:
        patched.setitem(FACTS, hidden.device.type, FACTS[hidden.device.type]._replace(widens_products=True))
        patched.setattr(torch, "mm", widening_mm)
        patched.setattr(torch, "addmm", widening_addmm)
        loss = seqpar.linear_cross_entropy(hidden, weight, target, chunk_tokens=chunk_tokens)
    ours = torch.autograd.grad(loss.mean, weight)[0]
    # For each half of the sum
    assert asked.count(torch.float32) == (2 * -(-256 // chunk_tokens) if chunk_tokens < 256 else 0)
    assert (ours.double() - truth).norm() <= 2 * (plain.double() - truth).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [2, 7, 64])
@pytest.mark.parametrize("way", ["closed form", "autograd", "scores"])
def test_a_low_precision_gradient_holds_no_more_memory_than_its_numbers(way, classes, dtype):
    """The sum over chunks, in float32, was twice as long."""
    torch.manual_seed(0)
    generator = nn.Linear(16, classes, dtype=dtype)
    hidden, target = torch.randn(30, 16, dtype=dtype, requires_grad=True), torch.randint(classes, (30,))
    if way == "scores":
        total = -seqpar.token_scores(
            hidden, generator.weight, target, bias=generator.bias, chunk_tokens=7
        ).log_prob.sum()
    else:
        called = nn.Sequential(generator, nn.Identity()) if way == "autograd" else generator
        total = seqpar.LossCompute(called, seqpar.CrossEntropy(), chunk_tokens=7)(hidden, target).total
    total.backward()
    for tensor in (hidden, *generator.parameters()):
        # One row more where their number is odd
        assert tensor.grad.untyped_storage().nbytes() <= tensor.grad.nbytes + tensor.grad[:1].nbytes
