"""Tiny random models of Hugging Face, made from configurations, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor

from seqpar.integrations.transformers_model import decoder_inputs, lacks_decoder_inputs

VOCAB, PAD, START = 37, 1, 2

SIDES = ("encoder", "decoder")
ENDS = {"bos_token_id": 0, "eos_token_id": 3}
SEQ2SEQ = {"vocab_size": VOCAB, "d_model": 16, "pad_token_id": PAD, "decoder_start_token_id": START}
ENCODER_DECODER = {
    **SEQ2SEQ,
    **ENDS,
    "max_position_embeddings": 32,
    **{f"{side}_layers": 1 for side in SIDES},
    **{f"{side}_attention_heads": 2 for side in SIDES},
    **{f"{side}_ffn_dim": 24 for side in SIDES},
    **{f"{side}_layerdrop": 0.0 for side in SIDES},
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
}
T5 = SEQ2SEQ | {"d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": PAD,
    "attention_dropout": 0.0,
}
GPT2 = {
    **ENDS,
    **{"vocab_size": VOCAB, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2},
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
GEMMA2 = DECODER | {"head_dim": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 5.0}

MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "marian": (hf.MarianMTModel, hf.MarianConfig, ENCODER_DECODER | {"share_encoder_decoder_embeddings": True}),
    "bart": (hf.BartForConditionalGeneration, hf.BartConfig, ENCODER_DECODER),
    "mbart": (hf.MBartForConditionalGeneration, hf.MBartConfig, ENCODER_DECODER),
    "pegasus": (hf.PegasusForConditionalGeneration, hf.PegasusConfig, ENCODER_DECODER),
    "m2m100": (hf.M2M100ForConditionalGeneration, hf.M2M100Config, ENCODER_DECODER),
    "t5": (hf.T5ForConditionalGeneration, hf.T5Config, T5 | {"tie_word_embeddings": True}),
    "t5-untied": (hf.T5ForConditionalGeneration, hf.T5Config, T5 | {"tie_word_embeddings": False}),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, DECODER | {"tie_word_embeddings": False}),
    "llama-tied": (hf.LlamaForCausalLM, hf.LlamaConfig, DECODER | {"tie_word_embeddings": True}),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, DECODER | {"tie_word_embeddings": False}),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT2),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, GEMMA2),
    "cohere": (hf.CohereForCausalLM, hf.CohereConfig, DECODER | {"logit_scale": 0.25}),
    "granite": (hf.GraniteForCausalLM, hf.GraniteConfig, DECODER | {"logits_scaling": 3.0}),
    "bart-decoder": (hf.BartForCausalLM, hf.BartConfig, ENCODER_DECODER),
    "bert": (
        hf.BertForMaskedLM,
        hf.BertConfig,
        DECODER | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "mixtral": (
        hf.MixtralForCausalLM,
        hf.MixtralConfig,
        DECODER | {"num_local_experts": 2, "router_aux_loss_coef": 0.3, "experts_implementation": "eager"},
    ),
    "qwen3-moe": (
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig,
        DECODER
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
        | {"router_aux_loss_coef": 0.3, "experts_implementation": "eager"},
    ),
    "switch": (
        hf.SwitchTransformersForConditionalGeneration,
        hf.SwitchTransformersConfig,
        T5
        | {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
        | {"router_jitter_noise": 0.0, "router_aux_loss_coef": 0.3},
    ),
}


def tiny(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model in training mode whose weights are large enough for its predictions to differ from token to token."""
    model_class, config_class, settings = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**(settings | changes))).to(dtype)
    if name == "t5-untied":  # this version of the package ties them, whatever the configuration says
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + (1.0 if parameter.dim() == 1 else 0.0))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model.train()


def is_seq2seq(model: Any) -> bool:
    return bool(model.config.is_encoder_decoder)


def shifts(model: Any) -> bool:
    """Whether a model is meant to predict the label after each position."""
    return not is_seq2seq(model) and model.config.model_type != "bert"


def batch_of(model: Any, lengths: list[int], seed: int = 0, source: int = 5) -> dict[str, Tensor]:
    """Sentences of so many labels each, padded to the longest, and for a model with an encoder their sources."""
    g = torch.Generator().manual_seed(seed)
    rows, time = len(lengths), max(lengths)
    labels = torch.randint(4, VOCAB, (rows, time), generator=g)
    labels[torch.arange(time) >= torch.tensor(lengths).unsqueeze(1)] = -100
    if not is_seq2seq(model):
        return {"input_ids": labels.clamp(min=PAD), "attention_mask": (labels != -100).long(), "labels": labels}
    sources = torch.randint(4, VOCAB, (rows, source), generator=g)
    return {"input_ids": sources, "attention_mask": torch.ones_like(sources), "labels": labels}


def shifted_right(labels: Tensor) -> Tensor:
    """What a decoder reads, for all of these models but mBART."""
    return F.pad(labels[:, :-1], (1, 0), value=START).masked_fill(F.pad(labels[:, :-1], (1, 0)) == -100, PAD)


def plain_loss(model: Any, batch: dict[str, Tensor], smoothing: float = 0.0) -> Tensor:
    """The summed loss of the model's own logits, in their dtype, written out."""
    inputs = dict(batch)
    labels = inputs.pop("labels")
    if is_seq2seq(model):
        own = getattr(model, "prepare_decoder_input_ids_from_labels", shifted_right)
        inputs["decoder_input_ids"] = own(labels)
    logits, target = model(**inputs).logits, labels
    if shifts(model):
        logits, target = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=smoothing, reduction="sum")


def predicted(model: Any, labels: Tensor) -> int:
    """How many labels are predicted."""
    return int((labels[:, shifts(model) :] != -100).sum())


def without_labels(model: Any, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """What a Trainer with a loss function passes to the model, and the labels that it keeps."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if lacks_decoder_inputs(model, inputs):
        inputs["decoder_input_ids"] = decoder_inputs(model, batch["labels"])
    return inputs, batch["labels"]


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def taken(model: Any, loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss, and its gradients, which the model no longer has."""
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    return loss.detach(), found


def relative_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any parameter's gradient, relative to the largest entry of that gradient.

    A gradient that is 0 but for rounding, as that of the keys' biases, counts as a thousandth of the largest.
    """
    assert got.keys() == expected.keys()
    least = max(g.abs().max().item() for g in expected.values()) / 1000
    return max((got[n] - g).abs().max().item() / max(least, g.abs().max().item()) for n, g in expected.items())


def assert_alike(
    got: tuple[Tensor, dict[str, Tensor]],
    expected: tuple[Tensor, dict[str, Tensor]],
    error: float = 1e-12,
    of_gradients: float | None = None,
) -> None:
    """Losses and their gradients differ by no more than relative errors."""
    torch.testing.assert_close(got[0], expected[0], rtol=error, atol=0)
    assert relative_error(got[1], expected[1]) < (of_gradients or error)


cache = {}


def model_of(name):
    """One model for all examples: only its gradients change."""
    if name not in cache:
        cache[name] = tiny(name)
    cache[name].zero_grad()
    return cache[name]
