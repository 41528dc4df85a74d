"""What the encoder-decoder promises: masking, causality, ties, shapes, errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models import (
    PRESETS,
    DecoderOnlyConfig,
    EncoderDecoder,
    TransformerConfig,
    make_decoder_only,
    make_transformer,
    padding_mask,
    sinusoidal_positions,
    subsequent_mask,
)
from models.attention import KeyValues, added_scores, attend
from models.embedding import TABLE, Embedding, compute_positions, positions_table
from tests.models.examples import PAD, TINY, batch, pad_to, random_batch, small_transformer

NORMS = pytest.mark.parametrize("norm", ["pre", "post"])
MODELS = {norm: small_transformer(norm=norm, spread=1.5) for norm in ("pre", "post")}


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@NORMS
@settings(deadline=None, max_examples=25)
@given(src=batch(), tgt=st.data(), more_src=st.integers(0, 4), more_tgt=st.integers(0, 4), empty=st.booleans())
def test_hidden_states_do_not_depend_on_the_batch_or_its_padding(
    norm: str, src: list[list[int]], tgt: st.DataObject, more_src: int, more_tgt: int, empty: bool
) -> None:
    model = MODELS[norm]
    if empty:
        src[0] = []
    targets = [tgt.draw(batch())[0] for _ in src]
    src_width, tgt_width = max(1, *map(len, src)) + more_src, max(map(len, targets)) + more_tgt
    hidden = model(pad_to(src, src_width), pad_to(targets, tgt_width))
    assert hidden.shape == (len(src), tgt_width, 16)
    for row, (one, target) in enumerate(zip(src, targets, strict=True)):
        alone = model(pad_to([one], max(1, len(one))), pad_to([target], len(target)))
        close(hidden[row, : len(target)], alone[0])


@NORMS
def test_parameter_gradients_do_not_depend_on_padding(norm: str) -> None:
    model, src, tgt = small_transformer(norm=norm), random_batch(1), random_batch(2)
    real = (tgt != PAD)[..., None]
    gradients = []
    for extra in (0, 3):
        more = torch.zeros(len(src), extra, dtype=torch.long)
        hidden = model(torch.cat((src, more), 1), torch.cat((tgt, more), 1))[:, : tgt.size(1)]
        gradients.append(torch.autograd.grad((hidden.sin() * real).sum(), list(inner(model))))
    for padded, plain in zip(*reversed(gradients), strict=True):
        close(padded, plain)


def inner(model: EncoderDecoder) -> list[nn.Parameter]:
    """Every parameter that `forward` uses."""
    return [p for name, p in model.named_parameters() if not name.startswith("generator")]


@NORMS
@settings(deadline=None, max_examples=25)
@given(position=st.integers(0, 5), token=st.integers(3, 10))
def test_a_target_token_changes_no_earlier_hidden_state_and_its_own(norm: str, position: int, token: int) -> None:
    model, src, tgt = MODELS[norm], random_batch(3), torch.randint(3, 11, (5, 6))
    changed = tgt.clone()
    changed[:, position] = torch.where(tgt[:, position] == token, 3 + (token - 2) % 8, token)
    before, after = model(src, tgt), model(src, changed)
    close(after[:, :position], before[:, :position])
    difference = (after - before)[:, position:].abs().amax((0, 2))
    assert (difference > 1e-6).all(), "the token, and every later state, must see the change"


def test_the_derived_masks_are_the_annotated_transformers() -> None:
    model, src, tgt = MODELS["pre"], random_batch(4), random_batch(5)
    tgt_mask = padding_mask(tgt, PAD) & subsequent_mask(tgt.size(1))
    hidden = model(src, tgt, padding_mask(src, PAD), tgt_mask)
    real = tgt != PAD
    close(hidden[real], model(src, tgt)[real])
    assert not torch.equal(hidden, model(src, tgt, torch.ones(1, 1, 1, 6, dtype=torch.bool), tgt_mask))


def test_masks_are_true_where_attention_may_look() -> None:
    assert padding_mask(torch.tensor([[5, 6, 0]]), 0).tolist() == [[[[True, True, False]]]]
    assert padding_mask(torch.tensor([[0, 0], [0, 7]]), 0).int().tolist() == [[[[1, 0]]], [[[0, 1]]]], (
        "padding alone keeps one position: not every kernel can attend to nothing"
    )
    assert subsequent_mask(3).int().tolist() == [[[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]]


@NORMS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_all_padding_source_has_no_nan_in_value_or_gradient(norm: str, dtype: torch.dtype) -> None:
    model = small_transformer(norm=norm).to(dtype)
    src = random_batch(6)
    src[2:4] = PAD
    hidden = model(src, random_batch(7))
    assert hidden.dtype == dtype
    assert hidden.isfinite().all()
    gradients = torch.autograd.grad(hidden.float().square().sum(), inner(model))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_attention_is_the_papers_formula() -> None:
    attention, x, mask = MODELS["pre"].encoder.layers[0].self_attention, torch.randn(2, 5, 16).double(), None
    mask = padding_mask(torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]), 0)
    query = attention.query(x).view(2, 5, 4, 4)
    key, value = attention.key_value(x).view(2, 5, 2, 4, 4).unbind(2)
    scores = torch.einsum("bqhk,bshk->bhqs", query, key) / 4**0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    expected = attention.output(torch.einsum("bhqs,bshk->bqhk", weights, value).flatten(2))
    close(attention(x, attention.keys_values(x), mask), expected)


@pytest.mark.parametrize("kind", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize("width", [5, 200])
def test_short_and_long_attention_are_torchs_kernel(kind: str, width: int) -> None:
    tokens = random_batch(1, width=width)
    mask = {"padding": padding_mask(tokens, PAD), "both": padding_mask(tokens, PAD) & subsequent_mask(width)}.get(kind)
    inputs = [torch.randn(5, 4, width, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    query, lookup, causal = inputs[0], KeyValues(*inputs[1:]), kind == "causal"
    expected = nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=causal)
    actual = attend(query, lookup, mask, causal)
    close(actual, expected)
    for got, want in zip(*(torch.autograd.grad(out.sin().sum(), inputs) for out in (actual, expected)), strict=True):
        close(got, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_a_mask_adds_hides_and_is_a_number_under_autocast_too(dtype: torch.dtype) -> None:
    mask = torch.tensor([[True, False]])
    added = added_scores(mask, torch.zeros(1, dtype=dtype))
    assert added is not None
    assert added.dtype == dtype
    assert added_scores(added, torch.zeros(1)) is added
    assert added[0, 0] == 0
    under_autocast = added if dtype == torch.float16 else added.to(torch.bfloat16)
    assert under_autocast.isfinite().all()
    assert (added + torch.tensor([0.0, 1e4], dtype=dtype)).softmax(-1)[0].tolist() == [1, 0]


def test_a_model_is_the_same_by_products_and_by_torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model, src, tgt, found = MODELS["pre"], random_batch(3, width=150), random_batch(4, width=150), []
    for short in (0, 1_000):
        monkeypatch.setattr("models.attention.SHORT", short)
        hidden = model(src, tgt)
        found.append((hidden, *torch.autograd.grad(hidden.sin().mean(), inner(model))))
        with torch.autocast("cpu", torch.bfloat16):
            assert model(src, tgt).isfinite().all()
    for by_kernel, by_products in zip(*found, strict=True):
        close(by_kernel, by_products)


def test_positions_are_the_papers_formula_at_any_offset() -> None:
    like = torch.zeros((), dtype=torch.float64)
    table = sinusoidal_positions(0, 7000, 6, like=like)
    assert table.shape == (7000, 6)
    for position, dimension in ((0, 0), (1, 3), (6999, 4), (123, 5)):
        angle = torch.tensor(position / 10_000 ** (dimension // 2 * 2 / 6), dtype=torch.float64)
        close(table[position, dimension], angle.cos() if dimension % 2 else angle.sin())
    close(sinusoidal_positions(40, 43, 6, like=like), table[40:43])


@pytest.mark.parametrize("architecture", ["vaswani", "marian", "m2m100"])
@pytest.mark.parametrize(("start", "steps"), [(0, 7), (5, 1), (TABLE - 3, 3), (TABLE - 3, 4), (TABLE + 1, 2)])
def test_positions_from_the_table_are_those_that_are_computed(architecture: str, start: int, steps: int) -> None:
    embedding = Embedding(11, TransformerConfig(16, 24, 2, 1, 1, dropout=0.0, architecture=architecture)).double()
    tokens = torch.arange(steps)[None]
    computed = compute_positions(embedding.positions, start, start + steps, 16, like=embedding.lookup.weight)
    close(embedding(tokens, start), embedding.lookup(tokens) * 4 + computed)


def test_positions_that_were_first_read_in_inference_or_by_fake_tensors_serve_training() -> None:
    positions_table.cache_clear()
    with FakeTensorMode():
        made = make_transformer(TINY, 11, 11, PAD)
        made(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 4, dtype=torch.long))
    assert not positions_table.cache_info().currsize
    model, src, tgt = MODELS["pre"], random_batch(3), random_batch(4)
    with torch.inference_mode():
        before = model(src, tgt)
    hidden = model(src, tgt)
    assert torch.equal(hidden, before)
    assert not positions_table("pairs", TINY.d_model, hidden.dtype, src.device).is_inference()
    assert positions_table.cache_info().currsize == 1
    hidden.sum().backward()
    model.zero_grad()


def test_an_encoder_without_a_mask_looks_both_ways_and_a_decoder_back() -> None:
    model = MODELS["pre"]
    x = torch.randn(2, 5, TINY.d_model, dtype=torch.float64)
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    torch.testing.assert_close(model.encoder(x, None), model.encoder(x, mask), rtol=1e-12, atol=1e-12)
    changed = x.clone()
    changed[:, -1] *= -2.0
    first = [model.decoder(each, None, x, mask)[:, :-1] for each in (x, changed)]
    torch.testing.assert_close(*first, rtol=1e-12, atol=1e-12)


def test_a_decoder_that_is_called_without_its_memory_does_not_go_on() -> None:
    with pytest.raises(AssertionError):
        MODELS["pre"].decoder(torch.randn(2, 5, TINY.d_model, dtype=torch.float64), None)


def test_word_order_matters_to_the_encoder() -> None:
    memory = MODELS["pre"].encode(torch.tensor([[3, 4, 5]]))
    swapped = MODELS["pre"].encode(torch.tensor([[4, 3, 5]]))
    assert (memory[:, 2] - swapped[:, 2]).abs().max() > 1e-3


@pytest.mark.parametrize("tie", ["none", "target", "all"])
def test_ties_share_one_parameter_and_its_gradient_is_the_sum(tie: str) -> None:
    model = small_transformer(tie=tie)
    source, target, generator = weights(model)
    assert (target is generator) == (tie != "none")
    assert (source is target) == (tie == "all")

    untied = copy.deepcopy(model)
    untied.generator.weight = nn.Parameter(generator.detach().clone())
    untied.src_embed.lookup.weight = nn.Parameter(source.detach().clone())
    for each in (model, untied):
        each.generator(each(random_batch(8), random_batch(9))).sin().sum().backward()
    parts = [weight.grad for weight in weights(untied)]
    shared = {"none": [[0], [1], [2]], "target": [[0], [1, 2], [1, 2]], "all": [[0, 1, 2]] * 3}[tie]
    for weight, indexes in zip(weights(model), shared, strict=True):
        close(weight.grad, sum(parts[index] for index in indexes))


def weights(model: EncoderDecoder) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    return model.src_embed.lookup.weight, model.tgt_embed.lookup.weight, model.generator.weight


@pytest.mark.parametrize("tie", ["none", "target", "all"])
@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_embeddings_and_first_logits_are_of_order_one(preset: str, tie: str) -> None:
    torch.manual_seed(0)
    model = make_transformer(replace(PRESETS[preset], tie=tie), 1000, 1000).eval()
    src, tgt = torch.randint(1, 1000, (4, 20)), torch.randint(1, 1000, (4, 20))
    width = model.generator.in_features
    embedded = (model.src_embed(src) - sinusoidal_positions(0, 20, width, like=model.generator.weight)).std()
    assert 0.9 < embedded < 1.1
    assert 0.2 < model.generator(model(src, tgt)).std() < 2


@NORMS
def test_layer_norm_comes_before_or_after_the_sublayer(norm: str) -> None:
    encoder, x = MODELS[norm].encoder, torch.randn(2, 3, 16).double()
    residual, layer = encoder.layers[0].residuals[1], encoder.layers[0].feed_forward
    normed = {"pre": x + layer(residual.norm(x)), "post": residual.norm(x + layer(x))}
    close(residual(x, layer), normed[norm])
    assert isinstance(encoder.norm, nn.LayerNorm) == (norm == "pre")


@NORMS
def test_a_copy_task_is_learned(norm: str) -> None:
    torch.manual_seed(0)
    model = make_transformer(replace(TINY, d_model=32, d_ff=64, norm=norm, dropout=0.1), 20, 20)
    src = torch.randint(3, 20, (8, 6))
    inputs = torch.cat((torch.ones(8, 1, dtype=torch.long), src[:, :-1]), 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        logits = model.generator(model(src, inputs))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), src.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = model.eval().generator(model(src, inputs)).argmax(-1) == src
    assert loss < 0.3
    assert right.float().mean() > 0.97


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, r"d_model 16 is not divisible by heads 3: choose d_model 18"),
        ({"d_model": 15, "heads": 3}, r"d_model 15 is odd.*choose 14 or 16"),
        ({"norm": "rms"}, r"norm is 'rms': choose one of pre, post"),
        ({"tie": "source"}, r"tie is 'source': choose one of none, target, all"),
        ({"dropout": 1.0}, r"dropout is 1.0, outside \[0, 1\)"),
        ({"encoder_layers": 0}, r"encoder_layers is 0, below 1"),
    ],
)
def test_a_configuration_that_cannot_work_says_what_would(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        replace(TINY, **change)
    assert "\n" not in str(raised.value)


def test_one_embedding_for_two_vocabularies_is_an_error() -> None:
    with pytest.raises(ValueError, match="src_vocab is 11 and tgt_vocab 12: use a joint vocabulary"):
        make_transformer(TINY, 11, 12)
    assert make_transformer(replace(TINY, tie="target"), 11, 12).generator.out_features == 12
    with pytest.raises(ValueError, match=r"pad is 11, outside \[0, 11\)"):
        make_transformer(TINY, 11, 11, pad=11)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, ids: m(ids.float(), ids), TypeError, "src is torch.float32, not torch.long"),
        (lambda m, ids: m(ids, ids[0]), ValueError, r"tgt has shape \(6,\), 1 dims, not 2"),
        (lambda m, ids: m(ids, ids[:3]), ValueError, "src has 5 sentences, tgt 3"),
        (lambda m, ids: m(ids, ids, (ids != 0)[:, None]), ValueError, r"src_mask has 3 dims, shape \(5, 1, 6\)"),
        (lambda m, ids: m(ids, ids, None, subsequent_mask(6).float()), TypeError, "tgt_mask is torch.float32"),
        (lambda m, ids: m.decode(m.encode(ids), None, ids[:3]), ValueError, "3 rows, not a multiple of memory's 5"),
    ],
)
def test_input_that_would_be_misread_is_an_error(
    call: Callable[[EncoderDecoder, Tensor], Tensor], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(MODELS["pre"], random_batch(0))


def test_base_and_big_are_as_large_as_table_3_says() -> None:
    with torch.device("meta"):
        sizes = {name: make_transformer(PRESETS[name], 37_000, 37_000) for name in ("base", "big")}
    count = {name: sum(p.numel() for p in model.parameters()) for name, model in sizes.items()}
    assert 62e6 < count["base"] < 65e6
    assert 210e6 < count["big"] < 216e6


def test_presets_are_built_and_tiny_is_small_enough_for_a_demonstration() -> None:
    for name in ("tiny", "multi30k", "student", "small"):
        model = make_transformer(PRESETS[name], 1000, 1000)
        assert sum(p.numel() for p in model.parameters()) < 5e6, name


def test_the_default_configuration_is_the_base_preset() -> None:
    assert TransformerConfig() == PRESETS["base"]


@pytest.mark.parametrize("tie", ["none", "all"])
def test_a_state_dict_restores_the_model_ties_included(tie: str) -> None:
    model, other = small_transformer(1, tie=tie), small_transformer(2, tie=tie)
    src, tgt = random_batch(1), random_batch(2)
    assert not torch.equal(model(src, tgt), other(src, tgt))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(src, tgt), other(src, tgt))
    assert (other.generator.weight is other.src_embed.lookup.weight) == (tie == "all")
    assert not list(model.buffers()), "nothing but parameters for replicas and ranks to agree on"


def test_a_structural_replica_computes_the_same_and_its_gradient_arrives() -> None:
    model, src, tgt = small_transformer(), random_batch(1), random_batch(2)
    copies: dict[nn.Parameter, Tensor] = {parameter: parameter * 1 for parameter in model.parameters()}
    hidden = replica(model, copies)(src, tgt)
    expected = model(src, tgt)
    close(hidden, expected)
    parameters = inner(model)
    through_replica = torch.autograd.grad(hidden.sin().sum(), parameters)
    for actual, plain in zip(through_replica, torch.autograd.grad(expected.sin().sum(), parameters), strict=True):
        close(actual, plain)


def replica(module: nn.Module, copies: dict[nn.Parameter, Tensor]) -> nn.Module:
    """As data parallelism makes them: shared `__dict__`, own tables, plain tensors where parameters were."""
    twin = type(module).__new__(type(module))
    twin.__dict__ = module.__dict__.copy()
    twin.__dict__["_parameters"] = {}
    twin.__dict__["_buffers"] = module._buffers.copy()
    twin.__dict__["_modules"] = {
        name: None if child is None else replica(child, copies) for name, child in module._modules.items()
    }
    for name, parameter in module._parameters.items():
        twin.__dict__[name] = None if parameter is None else copies[parameter]
    return twin


def test_autocast_to_bfloat16_stays_near_float32_with_gradients_in_float32() -> None:
    model, src, tgt = small_transformer().float(), random_batch(1), random_batch(2)
    expected = model(src, tgt)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(src, tgt)
    assert (hidden.float() - expected).abs().max() < 0.1
    hidden.float().sum().backward()
    assert {parameter.grad.dtype for parameter in inner(model) if parameter.grad is not None} == {torch.float32}


def test_an_empty_batch_has_empty_hidden_states() -> None:
    nothing = torch.zeros(0, 4, dtype=torch.long)
    assert MODELS["post"](nothing, nothing).shape == (0, 4, 16)


@pytest.mark.parametrize("keys", [3, 130])
def test_a_mask_and_causal_together_are_refused(keys: int) -> None:
    """torch's kernels combine them, or refuse them, by device and by the number of keys."""
    x = torch.randn(1, 1, keys, 4)
    with pytest.raises(ValueError, match="a mask and causal=True"):
        attend(x, KeyValues(x, x), torch.ones(1, 1, 1, keys, dtype=torch.bool), True)


def parts_of(model: EncoderDecoder) -> list[nn.Module]:
    return [model.encoder, model.decoder, model.src_embed, model.tgt_embed, model.generator]


@pytest.mark.parametrize(
    "build",
    [
        lambda **pad: make_transformer(TINY, 7, 7, **pad),
        lambda **pad: make_decoder_only(DecoderOnlyConfig(d_model=8), 7, **pad),
        lambda **pad: EncoderDecoder(*parts_of(make_transformer(TINY, 7, 7)), **pad),  # type: ignore[arg-type]
    ],
)
def test_padding_is_id_0_unless_another_is_given(build: Callable[..., EncoderDecoder]) -> None:
    assert (build().pad, build(pad=3).pad) == (PAD, 3)
