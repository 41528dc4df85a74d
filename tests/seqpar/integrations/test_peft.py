"""Adapters of PEFT: those beside the output embeddings have the model's own loss, those on them are refused."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model

from seqpar.integrations.transformers import apply_seqpar_loss, compute_loss_func
from tests.seqpar.integrations.tiny_models import batch_of, gradients, relative_error, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
LORA = {"r": 2, "task_type": TaskType.CAUSAL_LM, "init_lora_weights": False}


def adapted(settings):
    model = tiny("llama", torch.float32)
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
