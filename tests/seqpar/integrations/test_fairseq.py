"""The fairseq criterion against fairseq's published formula, with a model that has fairseq's interface."""

import re
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from seqpar.integrations.fairseq import ChunkedCrossEntropy
from seqpar.testing.ranks import ranks
from tests.seqpar.integrations.small_seq2seq import PAD, VOCAB, WIDTH, Trunk, micro_batches
from tests.seqpar.integrations.tiny_models import gradients, relative_error


class Decoder(nn.Module):
    def __init__(self, name="output_projection"):
        super().__init__()
        self.trunk, self.name = Trunk(), name
        self.add_module(name, nn.Linear(WIDTH, VOCAB, bias=False))

    def forward(self, prev_output_tokens, src_tokens):
        return getattr(self, self.name)(self.trunk(src_tokens, prev_output_tokens)), {"attn": [None]}


class FairseqModel(nn.Module):
    """`model(src_tokens, src_lengths, prev_output_tokens)` returns `(logits, extra)`."""

    def __init__(self, name="output_projection"):
        super().__init__()
        self.decoder = Decoder(name)

    def forward(self, src_tokens, src_lengths, prev_output_tokens):
        return self.decoder(prev_output_tokens, src_tokens)

    def get_targets(self, sample, net_output):
        return sample["target"]

    def get_normalized_probs(self, net_output, log_probs):
        return net_output[0].log_softmax(-1)


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


@given(st.integers(0, 99), st.sampled_from([0.0, 0.1]), st.integers(1, 9), st.booleans())
def test_it_returns_what_the_published_criterion_returns(seed, smoothing, chunk_tokens, sentence_avg):
    torch.manual_seed(seed)
    model, sample = FairseqModel().double(), sample_of(seed)
    expected, nll, correct = published(model, sample, smoothing)
    expected.backward()
    plain = gradients(model)
    model.zero_grad()
    criterion = ChunkedCrossEntropy(PAD, smoothing, sentence_avg=sentence_avg, chunk_tokens=chunk_tokens)
    loss, sample_size, logged = criterion(model, sample)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert relative_error(gradients(model), plain) < 1e-12
    assert sample_size == (len(sample["target"]) if sentence_avg else sample["ntokens"]) == logged["sample_size"]
    torch.testing.assert_close(logged["nll_loss"], nll.detach(), rtol=1e-12, atol=0)
    assert (logged["n_correct"], logged["total"]) == (correct, sample["ntokens"])
    assert (logged["ntokens"], logged["nsentences"]) == (sample["ntokens"], len(sample["target"]))
    assert not logged["loss"].requires_grad
    assert criterion.logging_outputs_can_be_summed()


@pytest.mark.parametrize("name", ["output_projection", "fc_out", "fc3"])
def test_the_projection_has_three_names_and_may_be_weight_normalised(name):
    model, sample = FairseqModel(name).double(), sample_of(2)
    weight_norm(getattr(model.decoder, name))
    expected, _, _ = published(model, sample, 0.1)
    expected.backward()
    plain = gradients(model)
    model.zero_grad()
    ChunkedCrossEntropy(PAD, 0.1)(model, sample)[0].backward()
    assert relative_error(gradients(model), plain) < 1e-12


def test_without_options_it_neither_smooths_nor_counts_sentences_nor_leaves_tokens_out():
    model, sample = FairseqModel().double(), sample_of(2)
    loss, sample_size, _ = ChunkedCrossEntropy(PAD)(model, sample)
    torch.testing.assert_close(loss, published(model, sample, 0.0)[0], rtol=1e-12, atol=0)
    assert sample_size == sample["ntokens"]


def test_losses_token_by_token_are_refused():
    with pytest.raises(ValueError, match="reduce=False"):
        ChunkedCrossEntropy(PAD)(FairseqModel().double(), sample_of(0), reduce=False)


@pytest.mark.parametrize("prefix", [1, 2])
def test_the_first_target_tokens_can_be_left_out(prefix):
    model, sample = FairseqModel().double(), sample_of(3)
    expected, nll, correct = published(model, sample, 0.1, prefix)
    expected.backward()
    plain = gradients(model)
    model.zero_grad()
    loss, sample_size, logged = ChunkedCrossEntropy(PAD, 0.1, ignore_prefix_size=prefix)(model, sample)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert relative_error(gradients(model), plain) < 1e-12
    torch.testing.assert_close(logged["nll_loss"], nll.detach(), rtol=1e-12, atol=0)
    assert logged["n_correct"] == correct
    assert sample_size == sample["ntokens"]
    with pytest.raises(ValueError, match="ignore_prefix_size is -1"):
        ChunkedCrossEntropy(PAD, ignore_prefix_size=-1)


class Scaled(FairseqModel):
    def forward(self, src_tokens, src_lengths, prev_output_tokens):
        scores, extra = FairseqModel.forward(self, src_tokens, src_lengths, prev_output_tokens)
        return 0.25 * scores, extra


class Masked(FairseqModel):
    """It changes its scores in place."""

    def get_normalized_probs(self, net_output, log_probs):
        net_output[0][..., 5] = -1e9
        return net_output[0].log_softmax(-1)


class MaskedInEvaluation(FairseqModel):
    def get_normalized_probs(self, net_output, log_probs):
        if not self.training:
            net_output[0][..., 5] = -1e9
        return net_output[0].log_softmax(-1)


class Tempered(FairseqModel):
    def get_normalized_probs(self, net_output, log_probs):
        return (net_output[0] / 2).log_softmax(-1)


class Smaller(FairseqModel):
    def get_normalized_probs(self, net_output, log_probs):
        return net_output[0][..., :-1].log_softmax(-1)


class Copying(FairseqModel):
    """It mixes in a distribution over the source, of the shape of all tokens."""

    def forward(self, src_tokens, src_lengths, prev_output_tokens):
        scores, extra = super().forward(src_tokens, src_lengths, prev_output_tokens)
        return scores + torch.zeros(*prev_output_tokens.shape, VOCAB)[..., :], extra


class Twice(FairseqModel):
    def forward(self, src_tokens, src_lengths, prev_output_tokens):
        super().forward(src_tokens, src_lengths, prev_output_tokens)
        return super().forward(src_tokens, src_lengths, prev_output_tokens)


class OtherTargets(FairseqModel):
    def get_targets(self, sample, net_output):
        return sample["target"].roll(1, 1)


class Bare(FairseqModel):
    """Like `lightconv`, it multiplies by a weight."""

    def __init__(self):
        super().__init__()
        self.decoder.weight = self.decoder.output_projection.weight
        del self.decoder.output_projection


class Adaptive(FairseqModel):
    def __init__(self):
        super().__init__()
        self.decoder.output_projection = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCAB, [5])


class Hooked(FairseqModel):
    def __init__(self):
        super().__init__()
        self.decoder.output_projection.register_forward_hook(lambda module, inputs, output: 2 * output)


class HookedBackward(FairseqModel):
    def __init__(self):
        super().__init__()
        self.decoder.output_projection.register_full_backward_hook(lambda module, inputs, outputs: None)


class OwnForward(FairseqModel):
    def __init__(self):
        super().__init__()
        projection = self.decoder.output_projection
        projection.forward = lambda features: 2 * functional.linear(features, projection.weight)


REFUSED = {
    Scaled: "Scaled's log-probabilities are not log_softmax",
    Masked: "Masked's log-probabilities are not log_softmax",
    Tempered: "Tempered's log-probabilities are not log_softmax",
    Smaller: "Smaller's log-probabilities are not log_softmax",
    Copying: "Copying fails with the scores of a few tokens",
    Twice: "Twice called its projection 2 times",
    OtherTargets: "OtherTargets.get_targets does not return",
    Bare: "Bare's Decoder has no output_projection, fc_out or fc3",
    Adaptive: "Adaptive's Decoder.output_projection is a AdaptiveLogSoftmaxWithLoss",
    Hooked: "Hooked's log-probabilities are not log_softmax",
    HookedBackward: "HookedBackward's Decoder.output_projection has backward hooks",
    OwnForward: "OwnForward's Decoder.output_projection has backward hooks or a forward set on the instance",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_does_more_than_project_is_refused_by_name(kind):
    criterion = ChunkedCrossEntropy(PAD, 0.1)
    for _ in range(2):
        with pytest.raises(TypeError, match=re.escape(REFUSED[kind])) as raised:
            criterion(kind().double(), sample_of(4))
        assert str(raised.value).endswith("use fairseq's own criterion for this model")
        assert "\n" not in str(raised.value)


def test_each_mode_projection_and_flag_of_the_batch_is_checked():
    """What may choose another branch of the forward may choose another loss."""
    model, sample, criterion = MaskedInEvaluation().double(), sample_of(4), ChunkedCrossEntropy(PAD)
    criterion(model, sample)
    # The model's own mode alone
    model.training = False
    with pytest.raises(TypeError, match="not log_softmax"):
        criterion(model, sample)
    model.train().decoder.output_projection.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(TypeError, match="not log_softmax"):
        criterion(model, sample)

    class Flagged(FairseqModel):
        def forward(self, *, scaled, **inputs):
            scores, extra = super().forward(**inputs)
            return scores * (2 if scaled else 1), extra

    model = Flagged().double()
    for flag in (False, "", None):
        sample["net_input"]["scaled"] = flag
        criterion(model, sample)
    for flag in (True, "yes", 1):
        sample["net_input"]["scaled"] = flag
        with pytest.raises(TypeError, match="not log_softmax"):
            criterion(model, sample)


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


class Wrapper(nn.Module):
    """It has the model as `module`, as DDP has."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, **inputs):
        return self.module(**inputs)


def scaled_forward(of):
    return lambda *given, **named: (2 * (found := of(*given, **named))[0], found[1])


OVERRIDES = {
    "get_normalized_probs of the object": lambda model: setattr(
        model, "get_normalized_probs", lambda net_output, log_probs: (net_output[0] / 2).log_softmax(-1)
    ),
    "get_targets of the object": lambda model: setattr(
        model, "get_targets", types.MethodType(OtherTargets.get_targets, model)
    ),
    "forward of the object": lambda model: setattr(model, "forward", scaled_forward(model.forward)),
    "forward of the decoder": lambda model: setattr(model.decoder, "forward", scaled_forward(model.decoder.forward)),
    "get_normalized_probs of the class": lambda model: setattr(
        type(model), "get_normalized_probs", Tempered.get_normalized_probs
    ),
    "forward of the class": lambda model: setattr(type(model), "forward", Scaled.forward),
    "a hook of the model": lambda model: model.register_forward_hook(
        lambda module, inputs, found: (2 * found[0], found[1])
    ),
}


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: Proxy(Wrapper(model))], ids=["bare", "wrapped"])
def test_an_override_that_comes_after_the_first_call_is_seen(override, wrap):
    class Own(FairseqModel):
        """Of this test alone, which changes it."""

    model, sample, criterion = Own().double(), sample_of(4), ChunkedCrossEntropy(PAD)
    criterion(wrap(model), sample)
    OVERRIDES[override](model)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"not log_softmax|get_targets does not return"):
            criterion(wrap(model), sample)


def test_the_check_leaves_no_trace_and_runs_once():
    model, sample = FairseqModel().double(), sample_of(5)
    model.dropout = nn.Dropout(0.5)
    calls = []
    model.register_forward_hook(lambda module, inputs, output: calls.append(module.dropout(torch.ones(3))))
    criterion, state = ChunkedCrossEntropy(PAD), torch.get_rng_state()
    criterion(model, sample)
    criterion(model, sample)
    assert len(calls) == 3
    torch.set_rng_state(state)
    torch.testing.assert_close(calls[1], model.dropout(torch.ones(3)))
    assert "forward" not in vars(model.decoder.output_projection)


def test_weights_that_are_nan_give_the_loss_nan_as_without_chunks():
    """A training that has diverged is no other model."""
    model, sample = FairseqModel().double(), sample_of(0)
    model.decoder.output_projection.weight.data[3] = float("nan")
    assert published(model, sample, 0.1)[0].isnan()
    loss, _, logged = ChunkedCrossEntropy(PAD, 0.1)(model, sample)
    assert loss.isnan()
    assert logged["loss"].isnan()


def test_an_error_of_the_batch_is_its_own():
    sample = sample_of(0)
    sample["net_input"]["src_tokens"] = torch.full_like(sample["net_input"]["src_tokens"], VOCAB)
    with pytest.raises(IndexError):
        ChunkedCrossEntropy(PAD)(FairseqModel().double(), sample)


def test_a_model_that_runs_out_of_memory_says_so_itself():
    class OutOfMemory(FairseqModel):
        def get_normalized_probs(self, net_output, log_probs):
            raise torch.OutOfMemoryError("no memory is left")

    with pytest.raises(torch.OutOfMemoryError, match=r"^no memory is left$"):
        ChunkedCrossEntropy(PAD)(OutOfMemory().double(), sample_of(0))


def stepped(rank, world, find_unused, tied):
    """The averaged gradients of this rank's sample under DDP, with fairseq's proxy of its attributes."""
    torch.manual_seed(0)
    model = FairseqModel().double()
    model.decoder.unused = nn.Linear(2, 2).double().requires_grad_(find_unused)
    if tied:
        model.decoder.trunk.target.weight = model.decoder.output_projection.weight
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
    torch.manual_seed(0)
    model = FairseqModel().double()
    if tied:
        model.decoder.trunk.target.weight = model.decoder.output_projection.weight
    (sum(published(model, sample_of(seed), 0.1)[0] for seed in (2, 3)) / 2).backward()
    for got in ranks(2, stepped, find_unused, tied):
        assert relative_error({n: g for n, g in got.items() if "unused" not in n}, gradients(model)) < 1e-12
