"""Hugging Face models whose own loss is another than the chunked one are refused by name, before the first step."""

import copy

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from seqpar.integrations.transformers import apply_seqpar_loss
from seqpar.integrations.transformers_check import RefusedModelError
from seqpar.testing.ranks import ranks
from tests.seqpar.integrations.tiny_models import (
    batch_of,
    model_of,
    tiny,
)


def sharded_head(rank, world):
    model = tiny("llama")
    apply_seqpar_loss(model)
    fully_shard(model.lm_head)
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"weight is sharded .* do not make the output embeddings a unit"):
        model(**batch_of(model, [5, 3]))
    return True


def test_output_embeddings_that_are_a_unit_of_fsdp2_are_refused():
    assert ranks(2, sharded_head) == [True, True]


def test_a_forward_that_raises_leaves_the_output_embeddings_as_they_are():
    model = model_of("marian")
    batch = batch_of(model, [4])
    with apply_seqpar_loss(model):
        with pytest.raises(IndexError, match="target 99 at position"):
            model(**(batch | {"labels": batch["labels"].clamp(min=99)}), decoder_input_ids=torch.full((1, 4), 5))
        assert model.lm_head(torch.zeros(2, 5, 16, dtype=torch.float64)).shape == (2, 5, 37)


def scaled(module, args, output):
    return output * 1.5


def test_logits_that_the_configuration_does_not_explain_are_refused():
    model = copy.deepcopy(model_of("llama"))
    model.lm_head.register_forward_hook(scaled)
    with apply_seqpar_loss(model), pytest.raises(RuntimeError, match="own logits of a few tokens differ by up to"):
        model(**batch_of(model, [4]))


@pytest.mark.parametrize("name", ["marian", "gemma2", "granite", "cohere"])
def test_a_change_of_the_logits_that_is_kept_from_us_is_refused(name):
    model = copy.deepcopy(model_of(name))
    with apply_seqpar_loss(model):
        model(**batch_of(model, [4]))
        if name == "marian":
            bias = model.final_logits_bias
            model.lm_head.register_forward_hook(lambda module, args, output: output + bias)
        else:
            model.lm_head.register_forward_hook(scaled)
        with pytest.raises(RuntimeError, match="own logits of a few tokens differ by up to"):
            model(**batch_of(model, [4]))


def test_a_model_that_does_not_shift_as_its_kind_does_is_refused():
    model = tiny("bart-decoder")
    with apply_seqpar_loss(model), pytest.raises(RuntimeError, match=r"own loss of a few tokens is [\d.]+, that of"):
        model(**batch_of(model, [6]))


@pytest.mark.parametrize(
    ("name", "dtype"), [("mixtral", torch.float32), ("mixtral", torch.bfloat16), ("switch", torch.float64)]
)
def test_an_auxiliary_loss_is_refused_in_any_precision(name, dtype):
    model = tiny(name, dtype)
    with apply_seqpar_loss(model), pytest.raises(RuntimeError, match="adds an auxiliary loss"):
        model(**batch_of(model, [6]), output_router_logits=True)


def test_a_loss_that_is_not_known_is_refused():
    model = copy.deepcopy(model_of("llama"))
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    with apply_seqpar_loss(model), pytest.raises(RuntimeError, match="own loss of a few tokens"):
        model(**batch_of(model, [6]))


def doubled_loss(model):
    own = model.loss_function
    model.loss_function = lambda *args, **kwargs: 2 * own(*args, **kwargs)


def own_forward(model):
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 1.5 * forward(hidden)


def hooked_input(model):
    model.lm_head.register_forward_pre_hook(lambda module, args: (1.5 * args[0],))


@pytest.mark.parametrize("change", [doubled_loss, own_forward, hooked_input])
def test_a_change_after_the_first_step_is_noticed(change):
    model = copy.deepcopy(model_of("llama"))
    with apply_seqpar_loss(model):
        model(**batch_of(model, [6]))
        change(model)
        with pytest.raises((RuntimeError, RefusedModelError), match=r"of a few tokens|do more than multiply"):
            model(**batch_of(model, [6]))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_replaced_output_embeddings_are_noticed():
    model = copy.deepcopy(model_of("marian"))
    with apply_seqpar_loss(model):
        model.lm_head = torch.nn.Linear(16, 37, bias=False, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="output embeddings were replaced"):
            model(**batch_of(model, [4]))


def test_a_second_application_and_bad_numbers_are_refused():
    model = model_of("marian")
    with apply_seqpar_loss(model), pytest.raises(ValueError, match="has the loss already"):
        apply_seqpar_loss(model)
    with pytest.raises(ValueError, match="label_smoothing is 1"):
        apply_seqpar_loss(model, label_smoothing=1.0)
    with pytest.raises(ValueError, match="chunk_tokens"):
        apply_seqpar_loss(model, chunk_tokens=0)
    assert not model._forward_hooks


def test_a_model_without_a_linear_head_is_refused():
    with pytest.raises(TypeError, match="output embeddings of MarianModel are a NoneType"):
        apply_seqpar_loss(model_of("marian").model)


@pytest.mark.parametrize("ignored", [3, -1])
def test_another_label_to_ignore_is_refused_and_the_usual_one_is_not(ignored):
    model = model_of("llama")
    batch = batch_of(model, [5, 3])
    with apply_seqpar_loss(model):
        expected = model(**batch).loss
        assert torch.equal(model(**batch, ignore_index=-100).loss, expected)
        with pytest.raises(ValueError, match=f"^ignore_index is {ignored}, and the loss ignores -100 alone"):
            model(**batch, ignore_index=ignored)


@pytest.mark.parametrize("wrapper", [torch.nn.DataParallel, lambda model: "gpt2", lambda model: None])
def test_what_is_no_hugging_face_model_is_refused(wrapper):
    wrapped = wrapper(model_of("llama"))
    with pytest.raises(TypeError, match=rf"^model is a {type(wrapped).__name__}; it must be a Hugging Face model"):
        apply_seqpar_loss(wrapped)
