"""The fairseq criterion against fairseq's published formula, with a model that has fairseq's interface."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from seqpar.integrations.fairseq import ChunkedCrossEntropy
from tests.seqpar.integrations.small_seq2seq import PAD, VOCAB, WIDTH, Trunk, micro_batches
from tests.seqpar.integrations.tiny_models import gradients, relative_error


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.output_projection = Trunk(), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, prev_output_tokens, src_tokens, features_only):
        features = self.trunk(src_tokens, prev_output_tokens)
        return features if features_only else self.output_projection(features), {"attn": [None]}


class FairseqModel(nn.Module):
    """`model(src_tokens, src_lengths, prev_output_tokens, features_only)` returns `(features or logits, extra)`."""

    def __init__(self):
        super().__init__()
        self.decoder = Decoder()

    def forward(self, src_tokens, src_lengths, prev_output_tokens, features_only=False):
        return self.decoder(prev_output_tokens, src_tokens, features_only)

    def get_targets(self, sample, net_output):
        return sample["target"]


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


def test_losses_token_by_token_and_adaptive_softmax_are_refused():
    model, criterion = FairseqModel().double(), ChunkedCrossEntropy(PAD)
    with pytest.raises(ValueError, match="reduce=False"):
        criterion(model, sample_of(0), reduce=False)
    model.decoder.output_projection = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCAB, [5])
    with pytest.raises(TypeError, match="output_projection is a AdaptiveLogSoftmaxWithLoss"):
        criterion(model, sample_of(0))
    model = FairseqModel().double()
    model.decoder.output_projection.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(TypeError, match="output_projection does more than multiply: Linear has hooks"):
        criterion(model, sample_of(0))


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


def test_a_decoder_whose_output_layer_is_its_own_is_refused():
    """A pointer-generator projects with an `nn.Linear`, too, and then mixes in what it copies."""
    model, sample = FairseqModel().double(), sample_of(0)
    decoder = model.decoder
    decoder.output_layer = decoder.output_projection.forward
    ChunkedCrossEntropy(PAD)(model, sample)
    for own in (lambda features: 0.25 * decoder.output_projection(features), lambda features, attention: features):
        decoder.output_layer = own
        with pytest.raises(TypeError, match=r"Decoder\.output_layer does something else than call output_projection"):
            ChunkedCrossEntropy(PAD)(model, sample)
    features = decoder(**{k: v for k, v in sample["net_input"].items() if k != "src_lengths"}, features_only=True)
    del model.decoder
    model.forward = lambda **net_input: features
    with pytest.raises(TypeError, match="output_projection is a NoneType"):
        ChunkedCrossEntropy(PAD)(model, sample)
