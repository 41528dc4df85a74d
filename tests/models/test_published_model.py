"""The model is the published one: torch's own Transformer layers with the same weights, and Glorot's first weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from models import PRESETS, EncoderDecoder, TransformerConfig, make_transformer, sinusoidal_positions, subsequent_mask
from models.attention import Attention
from models.dropout import Dropout
from models.embedding import positions_in_halves
from models.transformer import Layer
from tests.models.examples import random_batch

PAD = 3  # not 0, which is what a forgotten argument would be
CONFIG = TransformerConfig(
    d_model=16, d_ff=24, heads=4, encoder_layers=2, decoder_layers=3, dropout=0.375, norm="pre", tie="none"
)
VOCABS = (11, 13)


class Scale(nn.Module):
    """Stand in for dropout: what is dropped, at which rate, becomes visible in every number."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 - self.p)


def scaled_model(norm: str) -> EncoderDecoder:
    """A float64 model with random biases and norms, each dropout in it a `Scale` of its rate."""
    torch.manual_seed(0)
    model = make_transformer(replace(CONFIG, norm=norm), *VOCABS, pad=PAD).double()  # type: ignore[arg-type]
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Dropout):
                setattr(module, name, Scale(child.p))
    return model


def torchs_encoder_layer(layer: Layer, norm: str) -> nn.TransformerEncoderLayer:
    theirs = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, norm_first=norm == "pre", batch_first=True).double()
    return fill(theirs, layer, [layer.self_attention], [theirs.self_attn])


def torchs_decoder_layer(layer: Layer, norm: str) -> nn.TransformerDecoderLayer:
    theirs = nn.TransformerDecoderLayer(16, 4, 24, dropout=0.0, norm_first=norm == "pre", batch_first=True).double()
    ours = [layer.self_attention, layer.memory_attention]
    return fill(theirs, layer, ours, [theirs.self_attn, theirs.multihead_attn])


def fill(theirs: nn.Module, ours: nn.Module, attentions: list[Attention], torchs: list[nn.Module]) -> nn.Module:
    """Give torch's layer the weights of ours, and dropout where section 5.4 has it: on each sublayer's output."""
    with torch.no_grad():
        for attention, multihead in zip(attentions, torchs, strict=True):
            multihead.in_proj_weight.copy_(torch.cat((attention.query.weight, attention.key_value.weight)))
            multihead.in_proj_bias.copy_(torch.cat((attention.query.bias, attention.key_value.bias)))
            multihead.out_proj.load_state_dict(attention.output.state_dict())
    theirs.linear1.load_state_dict(ours.feed_forward.inner.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.outer.state_dict())
    for number, residual in enumerate(ours.residuals, start=1):
        getattr(theirs, f"norm{number}").load_state_dict(residual.norm.state_dict())
        setattr(theirs, f"dropout{number}", Scale(CONFIG.dropout))
    return theirs


def embedded(embedding: nn.Module, tokens: Tensor) -> Tensor:
    """Sections 3.4 and 3.5, written out."""
    vectors = embedding.lookup.weight[tokens] * 4.0
    position = torch.arange(tokens.size(1), dtype=torch.float64)[:, None]
    angle = position / 10_000 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    table = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)
    return (vectors + table) * (1 - CONFIG.dropout)


def torchs_hidden(
    model: EncoderDecoder, norm: str, src: Tensor, tgt: Tensor, hidden_src: Tensor, hidden_tgt: Tensor
) -> tuple[Tensor, list[nn.Module]]:
    """The decoder's output by torch's layers, and those layers. Torch's masks are True where nothing may be seen."""
    encoder = [torchs_encoder_layer(layer, norm) for layer in model.encoder.layers]
    decoder = [torchs_decoder_layer(layer, norm) for layer in model.decoder.layers]
    memory, x = embedded(model.src_embed, src), embedded(model.tgt_embed, tgt)
    for layer in encoder:
        memory = layer(memory, src_key_padding_mask=hidden_src)
    memory = model.encoder.norm(memory)
    for layer in decoder:
        x = layer(x, memory, tgt_mask=hidden_tgt, memory_key_padding_mask=hidden_src)
    return model.decoder.norm(x), [*encoder, *decoder]


def close(actual: Tensor | None, expected: Tensor | None) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("masks", ["derived", "given"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_model_is_torchs_layers_with_the_same_weights_and_dropout_on_every_sublayer(norm: str, masks: str) -> None:
    model = scaled_model(norm)
    src, tgt = random_batch(1, width=7), random_batch(2, vocab=13)
    src[src == 0] = PAD
    if masks == "derived":
        hidden_src, hidden_tgt, given = src == PAD, ~subsequent_mask(6)[0, 0], ()
        hidden_src[:, 0] &= ~hidden_src.all(1)
    else:
        hidden_src, hidden_tgt = torch.rand(5, 7) < 0.5, torch.rand(5, 6, 6) < 0.5
        hidden_src[:, 2], hidden_tgt[:, :, 1] = False, False
        given = (~hidden_src[:, None, None], ~hidden_tgt[:, None])
        hidden_tgt = hidden_tgt.repeat_interleave(4, 0)
    expected, layers = torchs_hidden(model, norm, src, tgt, hidden_src, hidden_tgt)
    hidden = model(src, tgt, *given)
    close(hidden, expected)
    close(model.generator(hidden), hidden @ model.generator.weight.T + model.generator.bias)

    embeddings = [model.src_embed.lookup.weight, model.tgt_embed.lookup.weight]
    of_ours = [
        *embeddings,
        *(layer.feed_forward.inner.weight for layer in [*model.encoder.layers, *model.decoder.layers]),
    ]
    of_torchs = [*embeddings, *(layer.linear1.weight for layer in layers)]
    ours = torch.autograd.grad(hidden.sin().sum(), of_ours)
    for gradient, plain in zip(ours, torch.autograd.grad(expected.sin().sum(), of_torchs), strict=True):
        close(gradient, plain)


@pytest.mark.parametrize("tie", ["none", "target", "all"])
def test_first_weights_are_glorots_with_keys_and_values_drawn_as_two_matrices(tie: str) -> None:
    torch.manual_seed(0)
    model = make_transformer(TransformerConfig(64, 160, 4, 2, 2, tie=tie), 90, 90)  # type: ignore[arg-type]
    for name, parameter in model.state_dict().items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif "lookup" in name or (name == "generator.weight" and tie != "none"):  # a tied one is an embedding
            assert float(parameter.std()) == pytest.approx(64**-0.5, rel=0.05), name
            assert float(parameter.abs().max()) > 3 * 64**-0.5, f"{name} is not normal"
        else:
            parts = parameter.chunk(2) if "key_value" in name else [parameter]
            for part in parts:
                limit = (6 / sum(part.shape)) ** 0.5
                assert 0.99 * limit < float(part.abs().max()) <= limit, name
                assert float(part.std()) == pytest.approx(limit / 3**0.5, rel=0.04), f"{name} is not uniform"
                assert abs(float(part.mean())) < 0.05 * limit, name
            assert not torch.equal(parts[0], parts[-1]) or len(parts) == 1, name


def test_no_two_weights_of_a_fresh_model_are_equal() -> None:
    model = make_transformer(TransformerConfig(16, 24, 2, 3, 2, tie="none"), 11, 11)
    matrices = [p.detach() for p in model.parameters() if p.dim() == 2]
    assert len({float(matrix.sum()) for matrix in matrices}) == len(matrices)
    assert len(matrices) == 3 + 3 * 5 + 2 * 8


@pytest.mark.parametrize("positions", [sinusoidal_positions, partial(positions_in_halves, steps=31)])
@pytest.mark.parametrize(("dtype", "half_step"), [(torch.bfloat16, 2**-9), (torch.float16, 2**-12)])
def test_positions_of_a_low_precision_are_computed_in_float32_and_rounded_once(
    dtype: torch.dtype, half_step: float, positions: Callable[..., torch.Tensor]
) -> None:
    low = positions(0, 3_000, 64, like=torch.zeros((), dtype=dtype))
    exact = positions(0, 3_000, 64, like=torch.zeros((), dtype=torch.float64))
    assert low.dtype == dtype
    rounding_of_the_angle = 3_000 * 2**-22
    assert float((low.double() - exact).abs().max()) <= half_step + rounding_of_the_angle
    later = positions(2_990, 3_000, 64, like=low)
    assert torch.equal(later, low[2_990:])


def test_ids_are_long_or_int_and_nothing_else() -> None:
    model, src, tgt = scaled_model("pre"), random_batch(1), random_batch(2)
    assert torch.equal(model(src.int(), tgt.int()), model(src, tgt))
    for wrong in (torch.bool, torch.uint8, torch.float64):
        with pytest.raises(TypeError, match=r"src is torch\.\w+, not torch.long: pass token ids"):
            model.encode(src.to(wrong))
        with pytest.raises(TypeError, match=r"tgt is torch\.\w+, not torch.long: pass token ids"):
            model.decode(model.encode(src), None, tgt.to(wrong))


def test_encode_and_decode_refuse_a_mask_that_would_be_misread() -> None:
    model, src, tgt = scaled_model("pre"), random_batch(1), random_batch(2)
    memory = model.encode(src)
    for wrong, error in (((src != PAD)[:, None], ValueError), ((src != PAD)[:, None, None].double(), TypeError)):
        with pytest.raises(error, match=r"src_mask (has|is)"):
            model.encode(src, wrong)
        with pytest.raises(error, match=r"src_mask (has|is)"):
            model.decode(memory, wrong, tgt)
        with pytest.raises(error, match=r"tgt_mask (has|is)"):
            model.decode(memory, None, tgt, wrong)


@pytest.mark.parametrize("pad", [-1, 11])
def test_a_padding_id_must_be_in_both_vocabularies(pad: int) -> None:
    for vocabs in ((11, 13), (13, 11)):
        with pytest.raises(ValueError, match=rf"pad is {pad}, outside \[0, 11\)"):
            make_transformer(CONFIG, *vocabs, pad=pad)
    assert make_transformer(CONFIG, 11, 13, pad=10).pad == 10


def test_presets_are_what_runs_were_saved_with() -> None:
    """A checkpoint names its preset: another number here would be another model there."""
    ours = ("relu", "vaswani", 1024)
    table = {
        "tiny": (128, 512, 4, 2, 2, 0.1, "pre", "all", *ours),
        "multi30k": (128, 256, 4, 4, 4, 0.3, "pre", "all", *ours),
        "student": (128, 512, 4, 6, 1, 0.1, "pre", "all", *ours),
        "small": (256, 512, 8, 3, 3, 0.1, "pre", "all", *ours),
        "base": (512, 2048, 8, 6, 6, 0.1, "post", "all", *ours),
        "big": (1024, 4096, 16, 6, 6, 0.3, "post", "all", *ours),
        "decoder_only": (128, 512, 4, 4, 0.1, "pre", "all"),
        "opus_mt": (512, 2048, 8, 6, 6, 0.1, "post", "all", "swish", "marian", 1024),
        "m2m100": (1024, 4096, 16, 12, 12, 0.1, "pre", "all", "relu", "m2m100", 1024),
        "mbart": (1024, 4096, 16, 12, 12, 0.1, "pre", "all", "gelu", "mbart", 1024),
    }
    found = {name: tuple(getattr(preset, field.name) for field in fields(preset)) for name, preset in PRESETS.items()}
    assert found == table


@pytest.mark.parametrize("name", ["d_model", "d_ff", "heads", "encoder_layers", "decoder_layers"])
@pytest.mark.parametrize("value", [0, -2])
def test_a_size_below_one_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}, below 1: choose 1 or more"):
        replace(CONFIG, **{name: value})


def test_what_is_advised_in_place_of_an_impossible_configuration_is_possible() -> None:
    for d_model, heads in ((15, 3), (16, 3), (10, 7), (20, 6), (2, 3), (4, 5), (6, 9)):
        with pytest.raises(ValueError, match="choose") as caught:
            replace(CONFIG, d_model=d_model, heads=heads)
        if "odd" not in str(caught.value):
            advised = str(caught.value).partition("choose d_model ")[2].partition(",")[0].split(" or ")
            for width in map(int, advised):
                assert replace(CONFIG, d_model=width, heads=heads).d_model == width
    for dropout in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="dropout is"):
            replace(CONFIG, dropout=dropout)
