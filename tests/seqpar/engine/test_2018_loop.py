"""The 2018 training loop runs unchanged, and computes what 2018's equations say, un-chunked on one device."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import seqpar
from tests.seqpar.option_calls import WATCH, Affine, D, leaf, smoothing
from tests.seqpar.published import Generator2018, LabelSmoothing2018, NoamOpt


class Batch:
    def __init__(self, src, trg, pad):
        self.src, self.trg, self.trg_y = src, trg[:, :-1], trg[:, 1:]
        self.ntokens = (self.trg_y != pad).sum()


class Seq2Seq(nn.Module):
    """Stands where the encoder-decoder stands: (src, trg) -> hidden states."""

    def __init__(self, vocab_size, width):
        super().__init__()
        self.src, self.trg = nn.Embedding(vocab_size, width), nn.Embedding(vocab_size, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.generator = Generator2018(width, vocab_size)

    def forward(self, src, trg):
        return self.mix(self.trg(trg) + self.src(src).mean(1, keepdim=True))[0]


def batches(count, vocab_size, pad, seed):
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        rows, time = (int(torch.randint(2, 9, (), generator=g)) for _ in range(2))
        trg = torch.randint(1, vocab_size, (rows, time + 1), generator=g)
        trg[torch.rand(trg.shape, generator=g) < 0.2] = pad
        yield Batch(torch.randint(1, vocab_size, (rows, 4), generator=g), trg, pad)


def run_epoch(data_iter, model, loss_compute):
    """The 2018 loop."""
    total_tokens, total_loss = 0, 0.0
    for batch in data_iter:
        out = model(batch.src, batch.trg)
        loss = loss_compute(out, batch.trg_y, batch.ntokens)
        total_loss += loss
        total_tokens += batch.ntokens
    return total_loss / total_tokens


def published(generator, criterion, opt):
    """The same computation from the equations: whole logits, one division, one backward, one step."""

    def compute(out, targets, normalize):
        logits = generator(out)
        loss = criterion(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))
        if opt is not None:
            (loss / normalize).backward()
            opt.step()
            getattr(opt, "optimizer", opt).zero_grad()
        return loss.item()

    return compute


def optimizer(kind, model):
    if kind == "noam":
        return NoamOpt(8, 1.0, 4, torch.optim.Adam(model.parameters(), lr=0, betas=(0.9, 0.98), eps=1e-9))
    return torch.optim.SGD(model.parameters(), 0.1) if kind == "sgd" else None


@pytest.mark.parametrize("kind", ["noam", "sgd", None])
@pytest.mark.parametrize("devices", [1, 3])
def test_an_epoch_equals_the_published_computation(kind, devices):
    torch.manual_seed(0)
    ours = Seq2Seq(11, 8).double()
    theirs = copy.deepcopy(ours)
    criterion = LabelSmoothing2018(11, padding_idx=0, smoothing=0.1)
    parallel = seqpar.DataParallel(ours, ["cpu"] * devices) if devices > 1 else ours
    compute = seqpar.MultiGPULossCompute(ours.generator, criterion, ["cpu"] * devices, opt=optimizer(kind, ours))
    mean = run_epoch(batches(6, 11, 0, seed=5), parallel, compute)
    expected = run_epoch(
        batches(6, 11, 0, seed=5), theirs, published(theirs.generator, criterion, optimizer(kind, theirs))
    )
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=0)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=name)  # Adam divides by gradients near 0
    if kind:
        assert not torch.equal(ours.src.weight, Seq2Seq(11, 8).double().src.weight)
        assert all(p.grad is None or not p.grad.any() for p in ours.parameters())


@given(st.integers(1, 12), st.integers(0, 99), st.integers(1, 4))
def test_the_returned_sum_and_gradient_do_not_depend_on_chunk_size_or_devices(chunk_size, seed, devices):
    torch.manual_seed(seed)
    generator = Generator2018(4, 7).double()
    (batch,) = batches(1, 7, 0, seed)
    hidden = torch.randn(*batch.trg_y.shape, 4, dtype=torch.float64, requires_grad=True)
    criterion = LabelSmoothing2018(7, 0, 0.2)
    keep = torch.optim.SGD(generator.parameters(), 0.0)
    keep.zero_grad = lambda: None
    compute = seqpar.MultiGPULossCompute(generator, criterion, ["cpu"] * devices, keep, chunk_size)
    total = compute(hidden, batch.trg_y, 3)
    got = [hidden.grad, *(p.grad for p in generator.parameters())]
    plain = criterion(generator(hidden).flatten(0, 1), batch.trg_y.flatten())
    expected = torch.autograd.grad(plain / 3, [hidden, *generator.parameters()])
    torch.testing.assert_close(total, plain.item(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(got, [*expected], rtol=1e-12, atol=1e-13)


def test_evaluation_builds_no_graph_and_steps_nothing():
    generator, hidden = Generator2018(4, 7), torch.randn(2, 3, 4, requires_grad=True)
    compute = seqpar.MultiGPULossCompute(generator, LabelSmoothing2018(7, 0), ["cpu"], opt=None)
    assert isinstance(compute(hidden, torch.ones(2, 3, dtype=torch.int64), 6), float)
    assert hidden.grad is None
    assert generator.proj.weight.grad is None


@pytest.mark.parametrize(("chunk_size", "steps"), [(5, 5), (None, 12)])
def test_a_chunk_size_says_how_many_time_steps_have_logits_at_once_and_none_leaves_it_to_their_memory(
    chunk_size, steps
):
    compute = seqpar.MultiGPULossCompute(Affine(), smoothing(), ["cpu"], chunk_size=chunk_size)
    out, targets = leaf(1, 2, 12, D), torch.ones(2, 12, dtype=torch.int64)
    compute(out, targets, 24)  # the first call looks at logits of its own
    with WATCH:
        WATCH.rows = 0
        compute(out, targets, 24)
    assert WATCH.rows == 2 * steps


def test_a_step_on_no_gradient_is_refused_by_name():
    generator = nn.Linear(D, 30).requires_grad_(False)
    out, targets = torch.randn(2, 6, D), torch.randint(30, (2, 6))
    other = nn.Linear(2, 2)
    compute = seqpar.MultiGPULossCompute(
        generator, seqpar.CrossEntropy(), ["cpu", "cpu"], torch.optim.SGD(other.parameters(), 0.1)
    )
    with pytest.raises(RuntimeError, match=r"neither out nor a parameter .* requires a gradient: pass opt=None"):
        compute(out, targets, 12)
    before = other.weight.clone()
    assert compute(out.requires_grad_(), targets, 12) > 0
    assert out.grad.norm() > 0
    assert torch.equal(other.weight, before)
