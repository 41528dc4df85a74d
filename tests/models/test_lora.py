"""LoRA: losses and gradients against plain weights W + s B A, in float64, and ordinary models without it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import seqpar
from models import EncoderDecoder
from models.lora import LoraLinear, add_lora, merged_tensors, without_lora
from tests.models.examples import PAD, batch, pad_to, random_batch, small_decoder_only, small_transformer

PROJECTIONS = ("query", "key_value", "output", "inner", "outer")


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12 * float(expected.detach().abs().max()))


MADE = {"encoder-decoder": lambda: small_transformer(norm="post", tie="target"), "decoder-only": small_decoder_only}


def with_lora(model: EncoderDecoder, rank: int, alpha: float, seed: int = 5) -> EncoderDecoder:
    """A copy with LoRA whose B is not 0, as after some training."""
    adapted = copy.deepcopy(model)
    torch.manual_seed(seed)
    add_lora(adapted, rank, alpha)
    with torch.no_grad():
        for module in adapted.modules():
            if isinstance(module, LoraLinear):
                module.lora_B.normal_(std=0.3)
    return adapted


def plain_weights(model: EncoderDecoder, adapted: EncoderDecoder, scale: float) -> tuple[dict[str, Tensor], list[str]]:
    """Each weight of the plain model by its name, with s B A added by hand, and the names of those."""
    weights = dict(model.named_parameters())
    changed = []
    for name, module in adapted.named_modules():
        if not isinstance(module, LoraLinear):
            continue
        A, B = module.lora_A, module.lora_B
        if name.endswith("key_value"):  # the keys' own A and B above those of the values
            rank, width = len(A) // 2, len(B) // 2
            change = torch.cat([B[:width] @ A[:rank], B[width:] @ A[rank:]])
        else:
            change = B @ A
        weights[f"{name}.weight"] = weights[f"{name}.weight"].detach() + scale * change
        changed.append(f"{name}.weight")
    return weights, changed


@pytest.mark.parametrize("made", MADE.values(), ids=list(MADE))
@settings(deadline=None, max_examples=8)
@given(
    src=batch(),
    tgt=st.data(),
    rank=st.integers(1, 5),
    alpha=st.sampled_from([0.5, 3.0, 16.0]),
    chunk=st.integers(1, 30),
    padding=st.integers(0, 2),
    ignored=st.booleans(),
)
def test_loss_and_gradients_of_both_matrices_are_those_of_the_plain_weights(
    made: object, src: list[list[int]], tgt: st.DataObject, rank: int, alpha: float, chunk: int, padding: int,
    ignored: bool,
) -> None:  # fmt: skip
    model = made()  # type: ignore[operator]
    adapted = with_lora(model, rank, alpha)
    targets = [tgt.draw(batch())[0] for _ in src]
    rows, width = pad_to(src, max(map(len, src)) + padding), max(map(len, targets)) + padding
    given_ids, wanted = pad_to(targets, width), pad_to(targets, width).roll(1, 1)
    if ignored:
        wanted = torch.full_like(wanted, PAD)
    loss = seqpar.LossCompute(
        adapted.generator, nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum"), ["cpu"], chunk
    )([adapted(rows, given_ids)], wanted).total
    weights, _ = plain_weights(model, adapted, alpha / rank)
    hidden = torch.func.functional_call(model, weights, (rows, given_ids), tie_weights=False)
    logits = model.generator(hidden)
    expected = F.cross_entropy(logits.flatten(0, -2), wanted.flatten(), ignore_index=PAD, reduction="sum")
    close(loss, expected)
    trained = {name: each for name, each in adapted.named_parameters() if each.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"lora_A", "lora_B"}
    assert {name.split(".")[-2] for name in trained} == set(PROJECTIONS)
    found = torch.autograd.grad(loss, list(trained.values()))
    theirs = torch.autograd.grad(expected, list(trained.values()))
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    for ours, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12 * largest)


@pytest.mark.parametrize("made", MADE.values(), ids=list(MADE))
def test_a_model_begins_as_it_was_and_shares_its_weights(made: object) -> None:
    model = made()  # type: ignore[operator]
    adapted = copy.deepcopy(model, {id(each): each for each in model.parameters()})
    add_lora(adapted, 3, 16.0)
    assert torch.equal(adapted(random_batch(1), random_batch(2)), model(random_batch(1), random_batch(2)))
    kept = dict(adapted.named_parameters())
    assert all(kept[name] is each for name, each in model.named_parameters())


def test_the_first_matrix_is_drawn_as_by_the_authors_and_the_second_is_0() -> None:
    torch.manual_seed(2)
    base = nn.Linear(50, 400)
    lora = LoraLinear(base, 200, 16.0, blocks=2)
    assert lora.lora_A.shape == (400, 50)
    assert lora.lora_B.shape == (400, 200)
    bound = 50**-0.5
    drawn = lora.lora_A.detach()
    assert bound * 0.999 < float(drawn.max()) <= bound
    assert float(drawn.std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    assert not lora.lora_B.any()
    assert not base.weight.requires_grad


@pytest.mark.parametrize("made", MADE.values(), ids=list(MADE))
@pytest.mark.parametrize("rank", [1, 4])
def test_without_lora_it_is_an_ordinary_model_of_the_same_outputs(made: object, rank: int) -> None:
    model = made()  # type: ignore[operator]
    adapted = with_lora(model, rank, 3.0)
    plain = without_lora(adapted)
    assert not [module for module in plain.modules() if isinstance(module, LoraLinear)]
    assert list(plain.state_dict()) == list(model.state_dict())
    close(plain(random_batch(1), random_batch(2)), adapted(random_batch(1), random_batch(2)))
    weights, changed = plain_weights(model, adapted, 3.0 / rank)
    tensors = merged_tensors(dict(adapted.state_dict()), 3.0)
    for name, each in plain.named_parameters():
        close(each, weights[name])
        assert torch.equal(each, tensors[name])
        assert torch.equal(each, model.get_parameter(name)) == (name not in changed), name
    assert tensors.keys() == model.state_dict().keys()
    assert plain.generator.weight is adapted.generator.weight
    assert isinstance(adapted.get_submodule("decoder.layers.0.self_attention.query"), LoraLinear)


def test_tensors_without_lora_stay_as_they_are() -> None:
    tensors = dict(small_transformer().state_dict())
    assert all(merged_tensors(tensors, 3.0)[name] is each for name, each in tensors.items())


def test_it_is_trained_over_replicas_as_on_one_device() -> None:
    adapted = with_lora(small_transformer(), 2, 16.0)
    sums = []
    for devices in (["cpu"], ["cpu", "cpu"]):
        hidden = seqpar.DataParallel(adapted, devices, gather_outputs=False)(random_batch(1), random_batch(2))
        criterion = nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum")
        loss = seqpar.LossCompute(adapted.generator, criterion, devices)(list(hidden), random_batch(2)).total
        trained = [each for each in adapted.parameters() if each.requires_grad]
        sums.append(torch.autograd.grad(loss, trained))
    for one, two in zip(*sums, strict=True):
        close(two, one)


def test_a_model_without_projections_and_a_rank_below_1_are_refused() -> None:
    other = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"^Linear has no attention or feed-forward network"):
        add_lora(other, 2, 16.0)  # type: ignore[arg-type]
    assert all(each.requires_grad for each in other.parameters())
    with pytest.raises(ValueError, match=r"^rank is 0, below 1: LoRA needs at least one row"):
        add_lora(small_transformer(), 0, 16.0)


def test_lora_is_added_once_and_to_plain_projections_alone() -> None:
    adapted, strange = with_lora(small_transformer(), 2, 16.0), small_transformer()
    strange.encoder.layers[0].feed_forward.outer = nn.Identity()
    for model, said in (
        (adapted, r"self_attention.query has LoRA already: train it as it is, or merge it first with without_lora"),
        (strange, r"feed_forward.outer is a Identity, not an nn.Linear: add LoRA to a whole model"),
    ):
        before = [(name, id(tensor), tensor.requires_grad) for name, tensor in model.named_parameters()]
        with pytest.raises(ValueError, match=said):
            add_lora(model, 3, 16.0)
        assert [(name, id(tensor), tensor.requires_grad) for name, tensor in model.named_parameters()] == before
