"""One forward of TRL's with `apply_seqpar_scores`: every field and gradient is that of the model's own logits."""

import contextlib
import types

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer import utils as trl_utils
from trl.trainer.utils import add_fused_lm_head

from seqpar.integrations.transformers_check import RefusedModelError
from seqpar.integrations.trl import AppliedScores, allow_head_adapter, apply_seqpar_scores
from tests.seqpar.integrations.tiny_models import DECODER, VOCAB, gradients, relative_error, tiny
from tests.seqpar.integrations.trl_runs import Run, examples, made, plain_outputs, words

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
EVERY_HEAD = ["llama", "llama-tied", "gpt2", "gemma2", "cohere", "granite"]


def fused(model, temperature=1.0):
    add_fused_lm_head(model.get_base_model() if hasattr(model, "peft_config") else model, temperature, outputs=FIELDS)
    return model


def adapted(name="llama", **settings):
    model = tiny(name)
    torch.manual_seed(1)
    defaults = {"r": 2, "lora_alpha": 3, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**(defaults | settings)), autocast_adapter_dtype=False)


def batch(rows=2, time=5, seed=0, ignored=0.3, model=None):
    """Texts, and labels of which some are what the model would predict."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (rows, time), generator=g)
    labels = ids.clone()
    if model is not None:
        with torch.no_grad():
            predicted = model(input_ids=ids).logits.argmax(-1)
        labels[:, 1:] = predicted[:, :-1].where(torch.rand(rows, time - 1, generator=g) < 0.5, labels[:, 1:])
    return ids, labels.masked_fill(torch.rand(rows, time, generator=g) < ignored, -100)


def base_of(model):
    return model.get_base_model() if hasattr(model, "peft_config") else model


def compared(model, ids, labels, temperature=1.0, chunk_tokens=None):
    """Assert that all fields, and the gradients of log-probabilities and entropies, are those of the logits."""
    base = base_of(model)
    g = torch.Generator().manual_seed(3)
    up = torch.randn(2, len(ids), ids.size(1) - 1, dtype=torch.float64, generator=g)
    results = []
    for plain in (True, False):
        model.zero_grad()
        if plain:
            outputs = plain_outputs(model, temperature, input_ids=ids, labels=labels)
        else:
            applied = AppliedScores([base], chunk_tokens)
            with applied:
                outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (up[0] * outputs.log_probs + up[1] * outputs.entropy).sum().backward()
        results.append((outputs, gradients(model)))
    (expected, expected_grads), (got, got_grads) = results
    for field in FIELDS:
        torch.testing.assert_close(got[field], expected[field], rtol=1e-12, atol=1e-12)
    assert torch.equal(got.label_mask, expected.label_mask)
    if (labels[:, 1:] != -100).any():
        assert relative_error(got_grads, expected_grads) < 1e-11
    else:
        assert all(not grad.any() for grad in got_grads.values())
    return got


def biased(name):
    """A model whose projection has a bias, as Phi's."""
    model = tiny(name, tie_word_embeddings=False)
    torch.manual_seed(2)
    head = nn.Linear(DECODER["hidden_size"], VOCAB).double()
    nn.init.normal_(head.bias)
    model.set_output_embeddings(head)
    return model


MODELS = {name: fused(tiny(name), 0.7) for name in EVERY_HEAD}
MODELS |= {f"biased {name}": fused(biased(name), 0.7) for name in ("llama", "gemma2")}


@given(
    st.sampled_from(sorted(MODELS)),
    st.integers(1, 3),
    st.integers(2, 7),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.sampled_from([None, 1, 3]),
    st.integers(0, 999),
)
def test_every_field_and_gradient_is_that_of_the_models_own_logits(name, rows, time, ignored, chunk_tokens, seed):
    model = MODELS[name]
    ids, labels = batch(rows, time, seed, ignored, model)
    compared(model, ids, labels, 0.7, chunk_tokens)


def test_a_prediction_counts_as_right_where_the_label_is_the_most_likely_token():
    model = MODELS["llama"]
    ids, labels = batch(3, 7, 1, 0.2, model)
    assert 3 < compared(model, ids, labels, 0.7).is_top1.sum() < 15


ADAPTERS = {
    "head": {"target_modules": ["lm_head"]},
    "head and trunk": {"target_modules": ["q_proj", "lm_head"]},
    "rank-stabilised": {"target_modules": ["lm_head"], "use_rslora": True},
    "embeddings": {"target_modules": ["embed_tokens"]},
    "both ends": {"target_modules": ["embed_tokens", "lm_head"]},
    "copies": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@pytest.mark.parametrize("settings", ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_on_projection_and_embeddings_tied_or_not_count_as_in_peft(name, settings):
    model = adapted(name, **settings)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "modules_to_save" in key:
                parameter += torch.randn_like(parameter)
    compared(fused(model), *batch())
    base = base_of(model)
    with model.disable_adapter(), AppliedScores([base], None), torch.no_grad():
        ids, labels = batch()
        got = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
        expected = plain_outputs(model, 1.0, input_ids=ids, labels=labels).log_probs
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_adapters_that_share_their_weights_at_both_ends_count_as_in_peft():
    both = {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
    compared(fused(adapted("llama-tied", **both)), *batch())


def test_dropout_of_an_adapter_applies_to_what_its_first_matrix_multiplies():
    model = fused(adapted(target_modules=["lm_head"], lora_dropout=0.5)).train()
    ids, labels = batch(ignored=0.0)
    base = base_of(model)
    with AppliedScores([base], None):
        torch.manual_seed(5)
        got = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    head = base.get_output_embeddings()
    hidden = base.base_model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    torch.manual_seed(5)
    log_p = head(hidden).log_softmax(-1)
    expected = log_p.gather(1, ids[:, 1:].reshape(-1, 1)).reshape(got.shape)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def without_config_name(model):
    own = model.forward

    def forward(self, *args, **kwargs):
        outputs = own(*args, **kwargs)
        outputs.logits = outputs.logits * 0.95
        return outputs

    model.forward = types.MethodType(forward, model)


def through_a_subclass(model):
    class Scaled(nn.Linear):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    getattr(model.lm_head, "base_layer", model.lm_head).__class__ = Scaled


def between_backbone_and_head(model):
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


def behind_the_head(model):
    model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)


def in_the_heads_own_forward(model):
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden: own(hidden) + 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_config_name, r"LlamaForCausalLM's own logits of a few tokens differ by up to 2\.\d+"),
        (
            through_a_subclass,
            r"embeddings of LlamaForCausalLM are a \S+Scaled; the scores need a torch.nn.Linear",
        ),
        (between_backbone_and_head, r"LlamaForCausalLM changes its hidden states between its backbone and its output"),
        (behind_the_head, r"LlamaForCausalLM's own logits of a few tokens differ by up to"),
        (in_the_heads_own_forward, r"output embeddings of LlamaForCausalLM do more than multiply and add a bias"),
    ],
)
def test_a_model_that_does_something_else_to_its_logits_is_refused_by_name(change, message):
    model = tiny("llama")
    change(model)
    with pytest.raises((TypeError, RuntimeError), match=message) as raised:
        AppliedScores([model], None)
    assert "\n" not in str(raised.value)
    assert "train it without apply_seqpar_scores" in str(raised.value)


def two_active(model):
    model.add_adapter("second", LoraConfig(r=2, target_modules=["lm_head"]))
    model.base_model.set_adapter(["default", "second"])


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"use_dora": True}, None, "is a DoraLinearVariant; the scores need plain LoRA"),
        ({"lora_bias": True}, None, "has a bias of its own; set lora_bias=False"),
        ({}, lambda model: model.merge_adapter(), "adapter is merged into the output embeddings"),
        ({}, two_active, r"2 LoRA adapters are active on .* \(default, second\)"),
        ({}, lambda model: through_a_subclass(base_of(model)), r"LlamaForCausalLM are a \S+Scaled; the scores need"),
    ],
    ids=["dora", "bias", "merged", "two", "base"],
)
def test_adapters_of_another_kind_are_refused_by_name(settings, change, message):
    model = adapted(target_modules=["lm_head"], **settings)
    if change is not None:
        change(model)
    with pytest.raises(TypeError, match=message) as raised:
        AppliedScores([base_of(model)], None)
    assert "\n" not in str(raised.value)


def test_a_model_that_calls_its_decoder_itself_has_the_scores_of_its_own_logits():
    config = hf.OPTConfig(
        vocab_size=VOCAB, hidden_size=16, ffn_dim=24, num_hidden_layers=1, num_attention_heads=2, dropout=0.0
    )
    torch.manual_seed(0)
    model = fused(hf.OPTForCausalLM(config).double())
    compared(model, *batch())


def test_a_model_that_fails_on_text_alone_is_refused_in_one_line():
    model = tiny("llama")

    def forward(self, **kwargs):
        raise ValueError("pixel_values\nare missing")

    model.forward = types.MethodType(forward, model)
    with pytest.raises(
        RefusedModelError, match=r"LlamaForCausalLM fails on a text of a few tokens \(ValueError: pixel"
    ):
        AppliedScores([model], None)


def test_trained_tokens_of_tied_embeddings_are_refused_by_name():
    model = tiny("llama-tied")
    tokens = {"embed_tokens": [5, 6]}
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], trainable_token_indices=tokens))
    with pytest.raises(TypeError, match=r"are a peft\.utils\.other\.TrainableTokensWrapper; the scores"):
        AppliedScores([base_of(model)], None)


def test_a_softcap_under_a_name_that_trl_does_not_read_is_applied():
    torch.manual_seed(0)
    config = hf.RecurrentGemmaConfig(
        num_hidden_layers=3,
        use_cache=False,
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        lru_width=16,
        attention_window_size=8,
        logits_soft_cap=0.5,
        pad_token_id=1,
    )
    model = fused(hf.RecurrentGemmaForCausalLM(config).double().eval())
    ids, labels = batch()
    compared(model, ids, labels)
    own = plain_outputs(model, 1.0, input_ids=ids, labels=labels).log_probs
    assert (model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs - own).abs().max() > 1e-3


def test_a_setting_changed_later_counts_from_the_next_forward_on():
    model = fused(tiny("gemma2"))
    ids, labels = batch()
    with AppliedScores([model], None):
        first = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
        model.config.final_logit_softcapping = 0.5
        got = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
        expected = plain_outputs(model, 1.0, input_ids=ids, labels=labels).log_probs
    assert (got - first).abs().max() > 1e-3
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return output


@pytest.mark.parametrize("lora", [False, True])
def test_the_logits_of_all_tokens_never_exist_at_once(lora):
    wide = {"vocab_size": 4000, "tie_word_embeddings": False}
    model = tiny("llama", **wide)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]), autocast_adapter_dtype=False)
    fused(model)
    ids, _ = batch(8, 32)
    seen = {}
    for way in ("plain", "scores"):
        applied = AppliedScores([base_of(model)], 4) if way == "scores" else contextlib.nullcontext()
        with applied, LargestTensor() as largest:
            if way == "plain":
                outputs = plain_outputs(model, 1.0, input_ids=ids, labels=ids)
            else:
                outputs = model(input_ids=ids, labels=ids, fused_lm_head=True)
            (outputs.log_probs + outputs.entropy).sum().backward()
        seen[way] = largest.numbers
    rows = 8 * 31
    assert seen["plain"] >= rows * 4000
    assert seen["scores"] <= 4000 * (DECODER["hidden_size"] + 2)  # the weight's own gradient


class RowsProjected(TorchDispatchMode):
    """Counts the rows of products with as many columns as the vocabulary has classes."""

    rows = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if "mm" in str(function) and output.size(-1) == VOCAB:
            self.rows += output.size(0)
        return output


def test_rows_without_a_label_are_never_projected():
    model = fused(tiny("llama"))
    ids, labels = batch(3, 9, ignored=0.5)
    kept = int((labels[:, 1:] != -100).sum())
    with AppliedScores([model], None), torch.no_grad(), RowsProjected() as projected:
        outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
    assert 0 < kept < 24
    assert projected.rows == 2 * kept  # once for the scores, once for the weights of WPO
    assert outputs.label_mask.sum() == kept


def test_tensors_saved_for_backward_may_be_moved_away_in_between():
    model = fused(adapted(target_modules=["lm_head"]))
    ids, labels = batch()
    found = []
    for moved in (contextlib.nullcontext(), torch.autograd.graph.save_on_cpu()):
        model.zero_grad()
        with AppliedScores([base_of(model)], None), moved:
            outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (outputs.log_probs + outputs.entropy).sum().backward()
        found.append(gradients(model))
    assert relative_error(found[1], found[0]) == 0


def test_leaving_the_block_restores_trls_own_function_and_the_model():
    model = fused(tiny("llama"))
    ids, labels = batch()
    node, compact = trl_utils._ChunkedLogProbFunction, trl_utils._use_triton
    before = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    with AppliedScores([model], None):
        inside = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
        assert trl_utils._ChunkedLogProbFunction is node
        with pytest.raises(IndexError):
            model(input_ids=ids, labels=labels + VOCAB, fused_lm_head=True)
        assert trl_utils._ChunkedLogProbFunction is node
        assert trl_utils._use_triton is compact
    after = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    assert inside.dtype == torch.float64
    assert before.dtype == torch.float32
    assert torch.equal(before, after)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_the_check_leaves_random_state_modes_and_buffers_as_they_were():
    model = tiny("llama")
    model.model.layers[0].eval()
    model.register_buffer("calls", torch.zeros(()))

    def draw(module, args):
        module.calls.add_(torch.rand(()))

    model.register_forward_pre_hook(draw)
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    with AppliedScores([model], None):
        assert torch.equal(torch.get_rng_state(), state)
        assert [module.training for module in model.modules()] == modes
        assert model.calls == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_low_precision_the_error_is_at_most_twice_that_of_trls_own_scores(dtype):
    model = fused(tiny("llama", dtype))
    ids, labels = batch(3, 7, ignored=0.0)
    hidden = model.base_model(input_ids=ids).last_hidden_state[:, :-1].double()
    logits = hidden @ model.lm_head.weight.double().t()
    exact = logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    stock = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    with AppliedScores([model], None):
        ours = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().max() <= 2 * (stock - exact).abs().max()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return made(Run("sft", ""), str(tmp_path_factory.mktemp("sft")))


@pytest.mark.parametrize(
    ("place", "name", "value", "option", "reason"),
    [
        ("args", "use_liger_kernel", True, "use_liger_kernel=True", "replaces parts of the model's forward"),
        ("args", "torch_compile", True, "torch_compile=True", "outside the compiled graph"),
        ("args", "label_smoothing_factor", 0.1, "label_smoothing_factor=0.1", "logits of all tokens"),
        ("", "compute_loss_func", len, "compute_loss_func", "logits of all tokens"),
        ("", "compute_metrics", len, "compute_metrics", "logits of all tokens"),
        ("", "preprocess_logits_for_metrics", len, "preprocess_logits_for_metrics", "logits of all tokens"),
        ("", "is_deepspeed_enabled", True, "DeepSpeed", "not tested"),
        ("", "is_fsdp_enabled", True, "FSDP", "not tested"),
        (
            "accelerator.state",
            "parallelism_config",
            types.SimpleNamespace(tp_enabled=True),
            "tp_size > 1",
            "not tested",
        ),
    ],
)
def test_options_that_need_all_logits_or_are_not_supported_are_refused_by_name(
    trainer, monkeypatch, place, name, value, option, reason
):
    owner = trainer
    for part in filter(None, place.split(".")):
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, name, value, raising=False)
    with pytest.raises(ValueError, match=f"SFTTrainer with .*{option}: .*{reason}.*; leave it out") as raised:
        apply_seqpar_scores(trainer)
    assert "\n" not in str(raised.value)
    assert not trainer.model._forward_pre_hooks


def test_another_trainer_is_refused_by_name():
    with pytest.raises(TypeError, match=r"got a Linear; it supports SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer"):
        apply_seqpar_scores(nn.Linear(2, 2))


def test_another_version_of_trl_is_refused(trainer, monkeypatch):
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", torch.autograd.Function)
    with pytest.raises(RuntimeError, match=r"TRL 1\.16\.0 computes its log-probabilities in another way than 1\.16"):
        apply_seqpar_scores(trainer)


def test_the_scores_twice_are_refused_and_once_more_after_remove_are_fine(trainer):
    applied = apply_seqpar_scores(trainer)
    with pytest.raises(ValueError, match=r"this SFTTrainer has the scores already; remove\(\) the first"):
        apply_seqpar_scores(trainer)
    applied.remove()
    applied.remove()
    apply_seqpar_scores(trainer).remove()


def test_a_chunk_size_of_0_is_refused(trainer):
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        apply_seqpar_scores(trainer, chunk_tokens=0)


def test_a_forward_that_does_not_ask_for_the_scores_is_refused():
    model = tiny("llama")
    own = model.forward
    model.forward = types.MethodType(lambda self, fused_lm_head=False, **k: own(**k), model)
    with (
        AppliedScores([model], None),
        pytest.raises(RuntimeError, match="LlamaForCausalLM asked for its log-probabilities 0 times"),
    ):
        model(input_ids=batch()[0], fused_lm_head=True)


def test_an_adapter_on_the_projection_is_trained_only_with_the_scores(tmp_path):
    trainer = made(Run("sft", "", lora={"target_modules": ["lm_head"]}), str(tmp_path))
    with pytest.raises(RuntimeError, match=r"TRL ignores the adapter on the output embeddings of LlamaForCausalLM"):
        trainer.train()
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        type(trainer)(trainer.model, args=trainer.args, train_dataset=examples("sft", 2), processing_class=words())


def test_allow_head_adapter_refuses_models_that_need_it_not():
    with (
        pytest.raises(TypeError, match="allow_head_adapter got a LlamaForCausalLM; it needs a PEFT model"),
        allow_head_adapter(tiny("llama")),
    ):
        pass
    with (
        pytest.raises(TypeError, match="output embeddings of this LlamaForCausalLM have no adapter"),
        allow_head_adapter(adapted(target_modules=["q_proj"])),
    ):
        pass
