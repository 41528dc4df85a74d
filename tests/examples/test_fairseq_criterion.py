"""The example of a criterion for fairseq against fairseq's published formula, and with models that it must refuse."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from examples.fairseq_criterion import ChunkedCrossEntropy, FairseqModel
from seqpar.testing.ranks import ranks
from tests.seqpar.integrations.small_seq2seq import PAD, VOCAB, WIDTH, micro_batches
from tests.seqpar.integrations.tiny_models import gradients, relative_error


def model_of(kind=FairseqModel):
    torch.manual_seed(0)
    return kind(VOCAB, WIDTH).double()


def sample_of(seed):
    (batch,) = micro_batches(1, seed)
    lengths = torch.full((len(batch["source"]),), 3)
    net_input = {"src_tokens": batch["source"], "src_lengths": lengths, "prev_output_tokens": batch["target_in"]}
    return {"net_input": net_input, "target": batch["target"], "ntokens": int((batch["target"] != PAD).sum())}


def published(model, sample, eps, prefix=0):
    """label_smoothed_nll_loss, as fairseq publishes it: eps/(V-1) to all classes but the target."""
    lprobs = model(**sample["net_input"])[0][:, prefix:].log_softmax(-1).flatten(0, 1)
    target = sample["target"][:, prefix:].flatten()
    kept = target != PAD
    nll = -lprobs.gather(1, target.unsqueeze(1)).squeeze(1)[kept].sum()
    smooth = -lprobs.sum(1)[kept].sum()
    each = eps / (VOCAB - 1)
    correct = (lprobs.argmax(1) == target)[kept].sum()
    return (1 - eps - each) * nll + each * smooth, nll, correct


@given(st.integers(0, 99), st.sampled_from([0.0, 0.1]), st.integers(0, 2), st.booleans())
def test_it_returns_what_the_published_criterion_returns(seed, smoothing, prefix, sentence_avg):
    model, sample = model_of(), sample_of(seed)
    expected, nll, correct = published(model, sample, smoothing, prefix)
    assume(float(expected.detach()))  # a prefix may leave no token
    expected.backward()
    plain = gradients(model)
    model.zero_grad()
    criterion = ChunkedCrossEntropy(PAD, smoothing, sentence_avg=sentence_avg, ignore_prefix_size=prefix)
    loss, sample_size, logged = criterion(model, sample)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert relative_error(gradients(model), plain) < 1e-12
    assert sample_size == (len(sample["target"]) if sentence_avg else sample["ntokens"]) == logged["sample_size"]
    torch.testing.assert_close(logged["nll_loss"], nll.detach(), rtol=1e-12, atol=1e-12)
    assert logged["n_correct"] == correct
    assert (logged["ntokens"], logged["nsentences"]) == (sample["ntokens"], len(sample["target"]))
    assert not logged["loss"].requires_grad


def test_losses_token_by_token_are_refused():
    with pytest.raises(ValueError, match="reduce=False"):
        ChunkedCrossEntropy(PAD)(model_of(), sample_of(0), reduce=False)


class Scaled(FairseqModel):
    def forward(self, **inputs):
        scores, extra = super().forward(**inputs)
        return 0.25 * scores, extra


class Masked(FairseqModel):
    def get_normalized_probs(self, net_output, log_probs):
        net_output[0][..., 5] = -1e9
        return net_output[0].log_softmax(-1)


class OtherTargets(FairseqModel):
    def get_targets(self, sample, net_output):
        return sample["target"].roll(1, 1)


class Hooked(FairseqModel):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.projection.register_forward_hook(lambda module, inputs, output: 2 * output)


class OwnForward(FairseqModel):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.projection.forward = lambda features: 2 * functional.linear(features, self.projection.weight)


class Adaptive(FairseqModel):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.decoder.output_projection = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCAB, [5])


REFUSED = {
    Scaled: "where fairseq's loss is .*; use fairseq's own criterion",
    Masked: "where fairseq's loss is",
    OtherTargets: "where fairseq's loss is",
    Hooked: "where fairseq's loss is",
    OwnForward: "has no nn.Linear called output_projection",
    Adaptive: "has no nn.Linear called output_projection",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_does_more_than_project_is_refused(kind):
    criterion = ChunkedCrossEntropy(PAD, 0.1)
    for _ in range(2):
        with pytest.raises(TypeError, match=REFUSED[kind]) as raised:
            criterion(model_of(kind), sample_of(4))
        assert "\n" not in str(raised.value)


def test_the_check_leaves_no_trace_and_runs_once():
    model, sample, calls = model_of(), sample_of(5), []
    model.register_forward_hook(lambda module, inputs, output: calls.append(functional.dropout(torch.ones(3))))
    criterion, state = ChunkedCrossEntropy(PAD), torch.get_rng_state()
    criterion(model, sample)
    criterion(model, sample)
    assert len(calls) == 4
    torch.set_rng_state(state)
    torch.testing.assert_close(calls[2], functional.dropout(torch.ones(3)))
    assert "forward" not in vars(model.projection)


def test_weights_that_are_nan_give_the_loss_nan_as_without_chunks():
    """A training that has diverged is no other model."""
    model = model_of()
    model.projection.weight.data[3] = float("nan")
    assert ChunkedCrossEntropy(PAD, 0.1)(model, sample_of(0))[0].isnan()


class Proxy(nn.Module):
    """It passes on the attributes of the model in the wrapper, as fairseq's proxy does."""

    def __init__(self, wrapper):
        super().__init__()
        self.module = wrapper

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module.module, name)

    def forward(self, **inputs):
        return self.module(**inputs)


def stepped(rank, world, find_unused, tied):
    """The averaged gradients of this rank's sample under DDP, with fairseq's proxy of its attributes."""
    model = model_of()
    model.unused = nn.Linear(2, 2).double().requires_grad_(find_unused)
    if tied:
        model.embed.weight = model.projection.weight
    wrapped = Proxy(nn.parallel.DistributedDataParallel(model, find_unused_parameters=find_unused))
    criterion = ChunkedCrossEntropy(PAD, 0.1)
    for seed in (rank, rank + world):
        model.zero_grad()
        criterion(wrapped, sample_of(seed))[0].backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("find_unused", [False, True])
def test_under_ddp_the_gradient_is_that_of_both_ranks(find_unused, tied):
    """With find_unused_parameters DDP must see in the outputs that the projection was used."""
    model = model_of()
    if tied:
        model.embed.weight = model.projection.weight
    (sum(published(model, sample_of(seed), 0.1)[0] for seed in (2, 3)) / 2).backward()
    for got in ranks(2, stepped, find_unused, tied):
        assert relative_error({n: g for n, g in got.items() if "unused" not in n}, gradients(model)) < 1e-12
