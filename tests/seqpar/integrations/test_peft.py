"""Adapters of PEFT, on the output embeddings or not: the loss of the model's own logits, or refused by name."""

import contextlib

import pytest
import torch
from peft import (
    AdaLoraConfig,
    AdaptionPromptConfig,
    CPTConfig,
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from transformers import DynamicCache

from seqpar.integrations.transformers import apply_seqpar_loss, compute_loss_func
from tests.seqpar.integrations.tiny_models import (
    assert_alike,
    batch_of,
    plain_loss,
    predicted,
    relative_error,
    taken,
    tiny,
)
from tests.seqpar.integrations.trainer_runs import micro_batches, trained_in_order, trainer_first, whole_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
SEQ2SEQ = {"task_type": TaskType.SEQ_2_SEQ_LM}
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
    own = taken(model, model(**batch).loss)
    with apply_seqpar_loss(model.get_base_model() if base else model):
        outputs = model(**batch)
        assert_alike(taken(model, outputs.loss), own, 1e-5, of_gradients=1e-4)
    assert outputs.logits is None


ON_THE_HEAD = {
    "lora": ("llama", LoraConfig(target_modules=["q_proj", "lm_head"], lora_alpha=3, **LORA)),
    "lora on all layers": ("marian", LoraConfig(target_modules="all-linear", **(LORA | SEQ2SEQ))),
    "saved module": ("llama", LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], **LORA)),
    "saved modules that are tied": (
        "llama-tied",
        LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], **LORA),
    ),
    "trained tokens": (
        "llama",
        LoraConfig(target_modules=["q_proj"], trainable_token_indices={"lm_head": [5, 9]}, **LORA),
    ),
    "trained tokens of tied embeddings": (
        "llama-tied",
        LoraConfig(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [5, 9]}, **LORA),
    ),
    "a head with a bias": ("bert", LoraConfig(target_modules=["query", "decoder"], **(LORA | {"task_type": None}))),
}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ON_THE_HEAD)
def test_an_adapter_on_the_output_embeddings_has_the_gradient_of_the_models_own_logits(kind, smoothing):
    name, settings = ON_THE_HEAD[kind]
    torch.manual_seed(1)
    model = get_peft_model(tiny(name), settings).double().train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    batch = batch_of(model.get_base_model(), [6, 4])
    own = taken(model, plain_loss(model, batch, smoothing) / predicted(model, batch["labels"]))
    with apply_seqpar_loss(model, label_smoothing=smoothing, chunk_tokens=3):
        for _ in range(2):
            outputs = model(**batch)
            assert outputs.logits is None
            assert_alike(taken(model, outputs.loss), own)
    assert any("lm_head" in key or "decoder" in key or "token_adapter" in key for key in own[1])


@pytest.mark.parametrize("way", ["applied", "function"])
@pytest.mark.parametrize("kind", ["lora", "saved module", "trained tokens of tied embeddings"])
def test_under_a_trainer_an_adapter_on_the_output_embeddings_has_the_gradient_of_the_whole_step(kind, way):
    name, settings = ON_THE_HEAD[kind]
    torch.manual_seed(1)
    model = get_peft_model(tiny(name), settings).double().train()
    batches = micro_batches(batch_of(model.get_base_model(), [7, 5]))
    expected = whole_step(model, batches)
    if way == "function":
        with apply_seqpar_loss(model) as applied:
            function = compute_loss_func(applied)
            got = trained_in_order(model, batches, lambda _, make: make(compute_loss_func=function).train())
    else:
        got = trained_in_order(model, batches, trainer_first)
    # Its own loss is of logits in float32
    assert relative_error(got, expected) < 1e-5


def test_the_dropout_of_an_adapter_on_the_output_embeddings_is_that_of_all_tokens():
    model = adapted(LoraConfig(target_modules=["lm_head"], lora_dropout=0.5, **LORA))
    batch = batch_of(model.get_base_model(), [6, 4])
    torch.manual_seed(2)
    own = taken(model, model(**batch).loss)
    with apply_seqpar_loss(model):
        for _ in range(2):
            torch.manual_seed(2)
            assert_alike(taken(model, model(**batch).loss), own, 1e-5, of_gradients=1e-4)
            assert model.get_base_model().lm_head.lora_dropout["default"].training


def test_with_its_adapter_switched_off_a_model_has_the_loss_of_its_base():
    model = adapted(ON_THE_HEAD["lora"][1])
    batch = batch_of(model.get_base_model(), [6, 4])
    with model.disable_adapter():
        own = model(**batch).loss
        with apply_seqpar_loss(model):
            torch.testing.assert_close(model(**batch).loss, own, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (LoraConfig(target_modules=["lm_head"], use_dora=True, **LORA), "is a DoraLinearVariant; only plain LoRA"),
        (LoraConfig(target_modules=["lm_head"], lora_bias=True, **LORA), "has a bias of its own; set lora_bias=False"),
        (
            IA3Config(target_modules=["lm_head"], feedforward_modules=[], task_type="CAUSAL_LM"),
            r"are a peft\.\S+; the chunk",
        ),
    ],
)
def test_another_adapter_on_the_output_embeddings_is_refused_by_name(settings, said):
    with pytest.raises(TypeError, match=rf"output embeddings of LlamaForCausalLM .*{said}"):
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
    own = taken(model, model(**batch).loss)
    with apply_seqpar_loss(model):
        for _ in range(2):
            assert_alike(taken(model, model(**batch).loss), own, 1e-5, of_gradients=1e-4)


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
