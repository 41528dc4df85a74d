"""Hugging Face models whose own loss is another than the chunked one are refused by name, before the first step."""

import copy
import random
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.modules.module import register_module_forward_hook

from seqpar.integrations.made_up import keep_state
from seqpar.integrations.transformers import apply_seqpar_loss, compute_loss_func
from seqpar.integrations.transformers_check import RefusedModelError
from seqpar.testing.ranks import ranks
from tests.seqpar.integrations.tiny_models import (
    VOCAB,
    batch_of,
    model_of,
    tiny,
    without_labels,
)


def sharded_head(rank, world):
    model = tiny("llama")
    function = compute_loss_func(apply_seqpar_loss(model))
    fully_shard(model.lm_head)
    fully_shard(model)
    batch = batch_of(model, [5, 3])
    labels = batch.pop("labels")
    with pytest.raises(RuntimeError, match=r"weight is sharded .* leave out compute_loss_func, which runs after"):
        function(model(**batch), labels)
    return True


def test_output_embeddings_that_are_sharded_again_before_a_loss_function_runs_are_refused():
    assert ranks(2, sharded_head) == [True, True]


def head_that_nothing_gathers(rank, world):
    model = tiny("llama")
    rows = distribute_tensor(model.lm_head.weight.detach(), init_device_mesh("cpu", (world,)), [Shard(0)])
    model.lm_head.weight = torch.nn.Parameter(rows)
    apply_seqpar_loss(model)
    with pytest.raises(RuntimeError, match=r"weight is sharded .* use a tensor-parallel plan of from_pretrained"):
        model(**batch_of(model, [5, 3]))
    return True


def test_output_embeddings_that_are_sharded_and_that_nothing_gathers_are_refused():
    assert ranks(2, head_that_nothing_gathers) == [True, True]


def test_a_forward_that_raises_leaves_the_output_embeddings_as_they_are():
    model = model_of("marian")
    batch = batch_of(model, [4])
    with apply_seqpar_loss(model):
        with pytest.raises(IndexError, match="target 99 at position"):
            model(**(batch | {"labels": batch["labels"].clamp(min=99)}), decoder_input_ids=torch.full((1, 4), 5))
        assert model.lm_head(torch.zeros(2, 5, 16, dtype=torch.float64)).shape == (2, 5, 37)


def test_a_model_that_does_not_shift_as_its_kind_does_is_refused():
    model = tiny("bart-decoder")
    with apply_seqpar_loss(model), pytest.raises(RuntimeError, match=r"own loss of a few tokens is [\d.]+, that of"):
        model(**batch_of(model, [6]))


def test_for_a_loss_function_which_would_lose_it_an_auxiliary_loss_is_refused():
    model = tiny("mixtral")
    batch = batch_of(model, [6])
    del batch["labels"]
    with apply_seqpar_loss(model) as applied:
        compute_loss_func(applied)
        with pytest.raises(
            RuntimeError, match=r"adds an auxiliary loss .* a compute_loss_func would lose; leave it out"
        ):
            model(**batch, output_router_logits=True)


def test_hooks_of_all_modules_that_change_the_logits_later_are_noticed():
    model = copy.deepcopy(model_of("llama"))
    with apply_seqpar_loss(model):
        model(**batch_of(model, [6]))
        hook = register_module_forward_hook(lambda module, _, output: 2 * output if module is model.lm_head else None)
        try:
            with pytest.raises(RefusedModelError, match="do more than multiply"):
                model(**batch_of(model, [6]))
        finally:
            hook.remove()


def test_ctrl_c_in_a_forward_leaves_nothing_behind_after_remove():
    def interrupted(*_):
        raise KeyboardInterrupt

    model = copy.deepcopy(model_of("llama"))
    with apply_seqpar_loss(model):
        hook = model.lm_head.register_forward_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(**batch_of(model, [6]))
        hook.remove()
        model.model.register_forward_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(**batch_of(model, [6]))
    assert not any("seqpar" in name for name in vars(model.lm_head))


GENERATORS = {
    "Python": (random.getstate, random.random),
    "numpy": (lambda: np.random.get_state(legacy=False), np.random.random),
    "torch": (lambda: torch.get_rng_state().tolist(), lambda: torch.rand(1)),
}


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_check_that_raises_restores_random_states_and_buffers(generator):
    state, draw = GENERATORS[generator]
    model, before = torch.nn.BatchNorm1d(2), state()

    def fail():
        draw()
        assert str(state()) != str(before)
        model(torch.ones(3, 2))
        raise IndexError

    with np.printoptions(threshold=sys.maxsize):
        with pytest.raises(IndexError), keep_state(model, torch.device("cpu")):
            fail()
        assert str(state()) == str(before)
    assert model.num_batches_tracked == 0


def test_a_second_application_and_bad_numbers_are_refused():
    model = model_of("marian")
    with apply_seqpar_loss(model), pytest.raises(ValueError, match="has the loss already"):
        apply_seqpar_loss(model)
    with pytest.raises(ValueError, match="label_smoothing is 1"):
        apply_seqpar_loss(model, label_smoothing=1.0)
    with pytest.raises(ValueError, match="chunk_tokens"):
        apply_seqpar_loss(model, chunk_tokens=0)
    assert not model._forward_hooks


@pytest.mark.parametrize("size", [20, 37, 45])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "t5", "marian"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_after_another_size_of_the_vocabulary_the_loss_is_applied_again(name, size):
    model = copy.deepcopy(model_of(name))
    batch = {key: value.clamp(max=19) for key, value in batch_of(model, [5, 3]).items()}
    replaced = pytest.raises(
        RuntimeError, match=r"replaced .* \(resize_token_embeddings does that, .*\); call remove\(\) and"
    )
    with apply_seqpar_loss(model):
        model(**batch)
        model.resize_token_embeddings(size)
        with replaced if size != VOCAB else nullcontext():
            model(**batch)
    own = model(**batch).loss
    with apply_seqpar_loss(model) as applied:
        torch.testing.assert_close(model(**batch).loss.to(own), own, rtol=1e-6, atol=0)
        inputs, labels = without_labels(model, batch)
        with torch.no_grad():
            loss = compute_loss_func(applied)(model.eval()(**inputs), labels)
        torch.testing.assert_close(loss.to(own), own, rtol=1e-6, atol=0)


def with_ignored(index):
    return lambda model, batch: model(**batch, ignore_index=index)


def with_labels(change):
    return lambda model, batch: model(**batch | {"labels": change(batch["labels"])})


def embedded(model, batch):
    return model(inputs_embeds=torch.zeros(1, 9, 16, dtype=torch.float64), labels=batch["labels"])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (with_ignored(3), ValueError, "^ignore_index is 3, and the loss ignores only -100"),
        (with_ignored(-1), ValueError, "^ignore_index is -1, and the loss ignores only -100"),
        (
            with_labels(torch.Tensor.float),
            TypeError,
            r"^labels are of torch.float32; they must be token ids: labels.long\(\)$",
        ),
        (
            with_labels(lambda labels: labels[0]),
            ValueError,
            r"^labels have shape \(5,\); they must be \(batch, time\)$",
        ),
        (
            embedded,
            ValueError,
            r"LlamaForCausalLM makes \(1, 9\) predictions for labels of shape \(2, 5\); give each a label",
        ),
    ],
)
def test_labels_that_cannot_be_meant_are_refused(call, error, message):
    model = model_of("llama")
    batch = batch_of(model, [5, 3])
    with apply_seqpar_loss(model), pytest.raises(error, match=message):
        call(model, batch)


@pytest.mark.parametrize("call", [with_ignored(-100), with_labels(torch.Tensor.int)])
def test_the_usual_label_to_ignore_and_ids_of_any_integer_dtype_are_not_refused(call):
    model = model_of("llama")
    batch = batch_of(model, [5, 3])
    with apply_seqpar_loss(model):
        assert torch.equal(call(model, batch).loss, model(**batch).loss)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.nn.DataParallel, "^model is a DataParallel; it must be a Hugging Face model"),
        (lambda model: "gpt2", "^model is the text 'gpt2'; it must be a Hugging Face model"),
        (lambda model: None, "^model is None; it must be a Hugging Face model"),
        (lambda model: model_of("marian").model, "^MarianModel has no output embeddings; "),
        (torch.compile, r"this LlamaForCausalLM is compiled; .* \(model._orig_mod\)"),
    ],
)
def test_what_is_no_hugging_face_model_with_a_linear_head_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        apply_seqpar_loss(make(model_of("llama")))
