"""The example of a criterion against fairseq's own, with its own models: what is not refused is exact."""

import warnings
from argparse import Namespace

import pytest
import torch

from examples.fairseq_criterion import ChunkedCrossEntropy
from tests.seqpar.integrations.tiny_models import gradients, relative_error

pytest.importorskip("fairseq", reason="needs fairseq 0.12.2, which runs on Python 3.11 as docs/from-fairseq.md says")

with warnings.catch_warnings(action="ignore"):
    from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = Dictionary()
for word in range(29):
    WORDS.add_symbol(str(word))
PAD = WORDS.pad()

LAYERS = "[(16, 3)] * 2"
SMALL = {
    "encoder_embed_dim": 16,
    "decoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 16,
    "decoder_ffn_embed_dim": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_hidden_size": 16,
    "decoder_hidden_size": 16,
    "decoder_out_embed_dim": 16,
    "alignment_layer": 1,
    "max_source_positions": 32,
    "max_target_positions": 32,
    "dropout": 0.3,
}
RECURRENT = {"arch": "lstm", "adaptive_softmax_cutoff": None, "criterion": "label_smoothed_cross_entropy"}
CONVOLUTION = {"arch": "fconv", "encoder_layers": LAYERS, "decoder_layers": LAYERS, "decoder_attention": "True"}
LIGHT = {
    "arch": "lightconv",
    "encoder_kernel_size_list": [3, 3],
    "decoder_kernel_size_list": [3, 3],
    "encoder_conv_type": "lightweight",
    "decoder_conv_type": "lightweight",
    "weight_softmax": True,
}
MODELS = {
    "transformer": {"arch": "transformer"},
    "transformer, tied": {"arch": "transformer", "share_decoder_input_output_embed": True},
    "transformer_align": {"arch": "transformer_align"},
    "transformer_align, full context": {"arch": "transformer_align", "full_context_alignment": True},
    "lstm": RECURRENT,
    "fconv": CONVOLUTION,
    "fconv, tied": CONVOLUTION | {"share_input_output_embed": True},
}
REFUSED = {
    "lightconv": (LIGHT, "LightConvDecoder has no nn.Linear called output_projection, fc_out, fc3"),
    "lstm, tied": (RECURRENT | {"share_decoder_input_output_embed": True}, "LSTMDecoder has no"),
    "adaptive": (
        {"arch": "transformer", "adaptive_softmax_cutoff": "5,9"},
        "TransformerDecoderBase has no",
    ),
}


class Task:
    source_dictionary = target_dictionary = WORDS


def model_of(settings):
    arguments = Namespace(**SMALL | settings)
    ARCH_CONFIG_REGISTRY[arguments.arch](arguments)
    torch.manual_seed(1)
    return ARCH_MODEL_REGISTRY[arguments.arch].build_model(arguments, Task)


def sample_of(seed):
    g = torch.Generator().manual_seed(seed)
    source, target = torch.randint(4, len(WORDS), (2, 3, 6), generator=g)
    target[1, 4:] = PAD
    inputs = torch.cat([torch.full((3, 1), WORDS.eos()), target[:, :-1]], 1)
    net_input = {"src_tokens": source, "src_lengths": torch.full((3,), 6), "prev_output_tokens": inputs}
    return {"net_input": net_input, "target": target, "ntokens": int((target != PAD).sum())}


def taken(criterion, model, sample):
    torch.manual_seed(2)
    loss, size, logged = criterion(model, sample)
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    return loss.detach(), size, logged, found


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_loss_gradient_and_log_are_those_of_fairseqs_own_criterion(name, prefix):
    """fairseq's is in float32, also of a model in float64."""
    model, sample = model_of(MODELS[name]).double(), sample_of(0)
    own = LabelSmoothedCrossEntropyCriterion(Task, False, 0.1, prefix, True)
    expected, size, log, wanted = taken(own, model, sample)
    ours = ChunkedCrossEntropy(PAD, 0.1, ignore_prefix_size=prefix)
    for _ in range(2):
        loss, our_size, logged, found = taken(ours, model, sample)
        torch.testing.assert_close(loss, expected.double(), rtol=1e-6, atol=0)
        assert relative_error(found, wanted) < 1e-4
        assert our_size == size
        assert {key: float(logged[key]) for key in log} == pytest.approx({k: float(v) for k, v in log.items()})


@pytest.mark.parametrize("name", MODELS)
def test_in_float64_the_gradient_is_exact(name):
    model, sample = model_of(MODELS[name]).double(), sample_of(1)
    model.eval()
    scores = model(**sample["net_input"])[0].log_softmax(-1)
    kept = sample["target"] != PAD
    gold = scores.gather(-1, sample["target"].unsqueeze(-1)).squeeze(-1)[kept].sum()
    each = 0.1 / (scores.size(-1) - 1)
    expected = -(0.9 - each) * gold - each * scores[kept].sum()
    expected.backward()
    wanted = gradients(model)
    model.zero_grad()
    loss, _, _, found = taken(ChunkedCrossEntropy(PAD, 0.1), model, sample)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    assert relative_error(found, wanted) < 1e-12


@pytest.mark.parametrize("name", REFUSED)
def test_a_decoder_without_a_projection_module_is_refused_by_name(name):
    settings, message = REFUSED[name]
    with pytest.raises(TypeError, match=message):
        ChunkedCrossEntropy(PAD)(model_of(settings), sample_of(0))


def masked(self, net_output, log_probs, sample=None):
    scores = net_output[0].clone()
    scores[..., 7] = -1e9
    return type(self).get_normalized_probs(self, (scores, None), log_probs, sample)


def scaled(self, *args, **kwargs):
    scores, extra = type(self).forward(self, *args, **kwargs)
    return scores / 2, extra


@pytest.mark.parametrize(("method", "change"), [("get_normalized_probs", masked), ("forward", scaled)])
def test_a_model_that_masks_or_scales_is_refused_by_name(method, change):
    model = model_of(MODELS["transformer"])
    setattr(model, method, change.__get__(model))
    with pytest.raises(TypeError, match="where fairseq's loss is"):
        ChunkedCrossEntropy(PAD)(model, sample_of(0))
