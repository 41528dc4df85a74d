"""Adapters of PEFT: those beside the output embeddings have the model's own loss, those on them are refused."""

import contextlib

import pytest
import torch
from peft import (
    AdaLoraConfig,
    AdaptionPromptConfig,
    CPTConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from transformers import DynamicCache

from seqpar.integrations.transformers import apply_seqpar_loss, compute_loss_func
from tests.seqpar.integrations.tiny_models import batch_of, gradients, relative_error, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
LORA = {"r": 2, "task_type": TaskType.CAUSAL_LM, "init_lora_weights": False}


def adapted(settings, name="llama"):
    model = tiny(name, torch.float32)
    torch.manual_seed(1)
    return get_peft_model(model, settings).train()


@pytest.mark.parametrize(
    "settings",
    [
        LoraConfig(target_modules=["q_proj", "up_proj"], **LORA),
        PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3),
    ],
    ids=["lora", "prompt tuning"],
)
@pytest.mark.parametrize("base", [True, False])
def test_an_adapter_beside_the_output_embeddings_has_the_models_own_gradient(settings, base):
    model = adapted(settings)
    batch = batch_of(model.get_base_model(), [6, 4])
    own = model(**batch).loss
    own.backward()
    expected = gradients(model)
    model.zero_grad()
    with apply_seqpar_loss(model.get_base_model() if base else model):
        outputs = model(**batch)
        outputs.loss.backward()
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, own, rtol=1e-5, atol=0)
    assert relative_error(gradients(model), expected) < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        LoraConfig(target_modules=["q_proj", "lm_head"], **LORA),
        LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], **LORA),
    ],
    ids=["lora", "saved module"],
)
def test_an_adapter_on_the_output_embeddings_is_refused_by_name(settings):
    with pytest.raises(TypeError, match=r"embeddings of LlamaForCausalLM are a peft\.\S+; .* PEFT's target_modules"):
        apply_seqpar_loss(adapted(settings))


def test_soft_prompts_and_labels_that_come_after_the_forward_do_not_fit_and_say_so():
    model = adapted(PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3))
    batch = batch_of(model.get_base_model(), [6, 4])
    labels = batch.pop("labels")
    with apply_seqpar_loss(model) as applied:
        function = compute_loss_func(applied)
        with pytest.raises(ValueError, match=r"LlamaForCausalLM makes \(2, 9\) predictions for labels of shape"):
            function(model(**batch), labels)


@pytest.mark.parametrize(("name", "task"), [("llama", TaskType.CAUSAL_LM), ("bart", TaskType.SEQ_2_SEQ_LM)])
def test_prefixes_which_are_a_cache_have_the_models_own_gradient_from_the_first_step_on(name, task):
    model = adapted(PrefixTuningConfig(task_type=task, num_virtual_tokens=3), name)
    batch = batch_of(model.get_base_model(), [6, 4])
    own = model(**batch).loss
    own.backward()
    expected = gradients(model)
    with apply_seqpar_loss(model):
        for _ in range(2):
            model.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            torch.testing.assert_close(loss, own, rtol=1e-5, atol=0)
            assert relative_error(gradients(model), expected) < 1e-4


def test_a_cache_that_is_given_grows_once():
    model = tiny("llama")
    batch = batch_of(model, [6, 6])
    found = []
    for loss in (contextlib.nullcontext, apply_seqpar_loss):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(batch["input_ids"][:, :2], past_key_values=cache)
        with loss(model):
            outputs = model(batch["input_ids"][:, 2:], labels=batch["labels"][:, 2:], past_key_values=cache)
        found.append((float(outputs.loss), cache.get_seq_length()))
    assert found[1] == (pytest.approx(found[0][0], rel=1e-5), found[0][1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (AdaLoraConfig(task_type=TaskType.CAUSAL_LM, target_modules=["q_proj"], total_step=10), "without its hooks"),
        (AdaptionPromptConfig(task_type=TaskType.CAUSAL_LM, adapter_len=2, adapter_layers=1), "without its hooks"),
        (
            CPTConfig(task_type=TaskType.CAUSAL_LM, cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 1]),
            "a loss of its own",
        ),
    ],
    ids=["AdaLoRA", "AdaptionPrompt", "CPT"],
)
def test_adapters_that_do_not_call_the_model_are_refused_by_name(settings, message):
    with pytest.raises(TypeError, match=rf"PEFT's [A-Z_]+ .*{message}"):
        apply_seqpar_loss(adapted(settings))


def test_a_compiled_model_is_refused_and_the_model_inside_is_named():
    with pytest.raises(TypeError, match=r"this LlamaForCausalLM is compiled; .* \(model._orig_mod\)"):
        apply_seqpar_loss(torch.compile(tiny("llama")))
