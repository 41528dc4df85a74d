"""In low precision the fast path is at most twice as far from float64 as plain torch in the same dtype."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import seqpar
from tests.seqpar.linear.linear_loss import errors, small

LOW = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def both_errors(low, smoothing, softcap, seed, chunk_tokens, vocab_size, rows=256):
    """Ours and plain torch's."""
    torch.manual_seed(seed)
    width = 16
    made = torch.randn(rows, width), torch.randn(vocab_size, width) / 4, torch.randn(vocab_size)
    inputs = [t.to(low).requires_grad_() for t in made]
    target = torch.randint(vocab_size, (rows,))

    def plain(hidden, weight, bias, target=target):
        logits = F.linear(hidden, weight, bias)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(logits, target, label_smoothing=smoothing, reduction="sum") / rows

    exact = [t.detach().double().requires_grad_() for t in inputs]
    truth_loss = plain(*exact)
    truth = [truth_loss.detach(), *torch.autograd.grad(truth_loss, exact)]
    hidden, weight, bias = inputs
    ours = seqpar.linear_cross_entropy(
        hidden, weight, target, bias=bias, label_smoothing=smoothing, softcap=softcap, chunk_tokens=chunk_tokens
    )
    theirs = errors(plain(*inputs), inputs, truth)
    # A product of few rows is another routine of the BLAS, with an error of its own: that of the same rows counts too.
    # So does that of the weight's sum over chunks, which both keep in float32 if the weight has it; lower, only we do
    few = zip(hidden.split(chunk_tokens), target.split(chunk_tokens), strict=True)
    chunked = errors(torch.stack([plain(h, weight, bias, t) for h, t in few]).sum(), inputs, truth)
    counts = 3 if low == torch.float32 else 2
    theirs[1:counts] = map(max, theirs[1:counts], chunked[1:counts])
    return errors(ours.total / rows, inputs, truth), theirs


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@settings(max_examples=min(15, settings.default.max_examples // 5))  # of each of six pairs
@given(seed=st.integers(0, 999), chunk_tokens=st.sampled_from([5, 64, 1000]), vocab_size=st.integers(20, 900))
def test_at_most_twice_plain_torchs_own_error(dtype, smoothing, seed, chunk_tokens, vocab_size):
    mine, theirs = both_errors(LOW[dtype], smoothing, None, seed, chunk_tokens, vocab_size)
    # A result cannot be expected nearer than its own rounding, nor a mean of 256 nearer than its terms' by luck
    floor = torch.finfo(LOW[dtype]).eps / 2
    floors = [max(floor / 256**0.5, torch.finfo(torch.float32).eps), floor, floor, floor]
    for name, a, b, least in zip(["loss", "hidden", "weight", "bias"], mine, theirs, floors, strict=True):
        assert a <= 2 * max(b, least), (name, a, b)


@pytest.mark.parametrize("dtype", LOW)
def test_with_a_softcap_too_in_the_root_mean_square_of_twenty(dtype):
    """Plain torch rounds capped logits once more than we do, so one loss of its may be nearer by luck."""
    pairs = [both_errors(LOW[dtype], 0.1, 5.0, seed, 64, 100) for seed in range(20)]
    mine, theirs = (torch.tensor(side).square().mean(0).sqrt() for side in zip(*pairs, strict=True))
    assert (mine <= 2 * theirs).all(), (mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_and_the_weight_gradient_do_not_lose_small_terms_to_the_chunk_count(dtype):
    """1,024 equal terms: summed in bf16 they would stop growing at 256."""
    hidden, weight = torch.ones(1024, 1, dtype=dtype), torch.zeros(2, 1, dtype=dtype, requires_grad=True)
    loss = seqpar.linear_cross_entropy(hidden, weight, torch.zeros(1024, dtype=torch.int64), chunk_tokens=1)
    (loss.total / loss.tokens).backward()
    assert loss.total.dtype == torch.float32
    torch.testing.assert_close(loss.total.item(), 1024 * torch.log(torch.tensor(2.0)).item(), rtol=1e-6, atol=0)
    assert weight.grad.flatten().tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("low_hidden", [False, True])
def test_under_bf16_autocast_the_products_follow_autocast(low_hidden):
    torch.manual_seed(1)
    head, x, target = nn.Linear(8, 50), torch.randn(40, 8, requires_grad=True), torch.randint(50, (40,))
    hidden = x.bfloat16() if low_hidden else x
    with torch.autocast("cpu", torch.bfloat16):
        loss = seqpar.linear_cross_entropy(hidden, head.weight, target, bias=head.bias, chunk_tokens=7)
        plain = F.cross_entropy(head(hidden).float(), target, reduction="sum")
    mine = torch.autograd.grad(loss.total, (x, *head.parameters()), retain_graph=True)
    theirs = torch.autograd.grad(plain, (x, *head.parameters()))
    assert loss.total.dtype == torch.float32
    assert {g.dtype for g in mine} == {torch.float32}
    # F.linear adds the bias before the product is rounded to bfloat16, we after: without a bias the logits are the same
    torch.testing.assert_close(loss.total, plain, rtol=2e-4, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = seqpar.linear_cross_entropy(hidden, head.weight, target, chunk_tokens=7)
        plain = F.cross_entropy(F.linear(hidden, head.weight).float(), target, reduction="sum")
    torch.testing.assert_close(loss.total, plain, rtol=1e-5, atol=0)
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()  # two bf16 roundings of the same gradient, 2^-8 each, over 40 rows


def test_under_autocast_float64_stays_float64():
    hidden, weight, target = small()
    with torch.autocast("cpu", torch.bfloat16):
        loss = seqpar.linear_cross_entropy(hidden, weight, target)
    torch.testing.assert_close(
        loss.total, F.cross_entropy(hidden @ weight.t(), target, reduction="sum"), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("generator", ["by formula", "by autograd"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_in_float16_small_gradients_survive_if_the_loss_scale_is_known_in_forward(generator, as_tensor):
    """Of 20,000 classes each has p = 5e-5, so without a scale the gradients of all but the target's are below 2^-20."""
    torch.manual_seed(0)
    rows, scale = 64, 2.0**14 / 64
    made = torch.randn(rows, 8) / 64, torch.randn(20_000, 8) / 64
    hidden, weight = (t.half().requires_grad_() for t in made)
    target = torch.zeros(rows, dtype=torch.int64)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = torch.autograd.grad(F.cross_entropy(exact[0] @ exact[1].t(), target, reduction="sum"), exact)

    class Own(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight)

    linear = (nn.Linear if generator == "by formula" else Own)(8, 20_000, bias=False)
    del linear.weight
    linear.register_parameter("weight", nn.Parameter(weight.detach()))
    engine, errors = seqpar.LossCompute(linear, seqpar.CrossEntropy(), chunk_tokens=16), {}
    plain = F.cross_entropy(linear(hidden), target, reduction="sum")
    for name, known in {"plain": None, "known": scale, "unknown": 1.0}.items():
        loss_scale = torch.tensor(known) if as_tensor and known else known
        loss = plain if known is None else engine(hidden, target, loss_scale=loss_scale).total
        got = torch.autograd.grad(loss * scale, (hidden, linear.weight))
        pairs = [(g.double()[i:] / scale, t[i:]) for g, t, i in zip(got, truth, (0, 1), strict=True)]
        errors[name] = [float((g - t).norm() / t.norm()) for g, t in pairs]
    for ours, theirs in zip(errors["known"], errors["plain"], strict=True):
        assert ours <= 2 * max(theirs, 2**-12)
    # On a GPU the kernels round a gradient once, when it is stored
    kernels = generator == "by formula" and hidden.device.type == "cuda"
    assert errors["unknown"][1] > (1.2 if kernels else 2) * errors["known"][1]


def test_a_gradscaler_sees_an_overflow_of_the_kept_gradients():
    hidden, weight = torch.ones(4, 2).half().requires_grad_(), torch.zeros(3, 2).half().requires_grad_()
    loss = seqpar.linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64), loss_scale=2.0**17)
    (loss.total * 2.0**17).backward()
    assert not weight.grad.isfinite().all()


def test_autocast_casts_the_products_and_none_of_the_sums():
    """The sum over classes with weights is a product of a matrix and a vector, which autocast would round."""
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(6, 4), torch.randn(9, 4), torch.randint(9, (6,))
    options = {"label_smoothing": 0.3, "class_weight": torch.rand(9) + 0.5}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = seqpar.linear_cross_entropy(hidden, weight, target, **options).total
    narrow = seqpar.linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), target, **options).total
    assert mixed == narrow


FINE = 1 + 3 / 1024
"""A factor that bfloat16 would round to 1."""


class TimesWeight(nn.Module):
    """A criterion with a weight for each token."""

    def forward(self, logits, target, factor):
        return (F.cross_entropy(logits.float(), target, reduction="none") * factor).sum()


@pytest.mark.parametrize("memory", [None, "least"])
@pytest.mark.parametrize("name", ["token_weight", "class_weight"])
def test_weights_in_float32_keep_their_digits_beside_bfloat16(name, memory):
    hidden, weight, target = small(dtype=torch.bfloat16)
    size = len(target) if name == "token_weight" else len(weight)
    options = {"memory": memory, "label_smoothing": 0.1}
    found = seqpar.linear_cross_entropy(hidden, weight, target, **{name: torch.full((size,), FINE)}, **options).total
    without = seqpar.linear_cross_entropy(hidden, weight, target, **options).total
    torch.testing.assert_close(found / without, torch.tensor(FINE), rtol=1e-5, atol=0)


@pytest.mark.parametrize("devices", [None, ["cpu"] * 3])
def test_tensors_in_float32_for_each_token_keep_their_digits_beside_bfloat16(devices):
    hidden, weight, target = small(dtype=torch.bfloat16)
    factor = torch.full(target.shape, FINE)
    head = nn.Linear(4, 9, bias=False, dtype=torch.bfloat16)
    head.weight = nn.Parameter(weight.detach())
    weighted = seqpar.LossCompute(head, TimesWeight(), devices)
    scored = seqpar.LossCompute(head, seqpar.CrossEntropy(), devices)

    def loss(scores, factor):
        return -scores.log_prob * factor

    calls = (
        lambda factor: weighted(hidden, target, factor=factor),
        lambda factor: scored.scored_loss(hidden, target, loss, factor=factor),
        lambda factor: seqpar.scored_loss(hidden, weight, target, loss, factor=factor),
    )
    for call in calls:
        ratio = call(factor).total / call(torch.ones_like(factor)).total
        torch.testing.assert_close(ratio, torch.tensor(FINE), rtol=1e-5, atol=0)
