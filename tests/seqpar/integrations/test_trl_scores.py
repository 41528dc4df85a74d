"""One forward of TRL's with `apply_seqpar_scores`: every field and gradient is that of the model's own logits."""

import contextlib

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer import utils as trl_utils

from seqpar.integrations.peft_adapters import base_of
from seqpar.integrations.trl import AppliedScores
from tests.seqpar.integrations.tiny_models import DECODER, VOCAB, gradients, relative_error, tiny
from tests.seqpar.integrations.trl_forwards import adapted, batch, biased, compared, fused
from tests.seqpar.integrations.trl_runs import plain_outputs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

EVERY_HEAD = ["llama", "llama-tied", "gpt2", "gemma2", "cohere", "granite"]
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


def test_an_adapter_that_is_not_active_does_not_count():
    model = adapted(target_modules=["q_proj", "lm_head"])
    model.add_adapter("trunk", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("trunk")
    compared(fused(model.double()), *batch())


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


def test_a_model_that_calls_its_decoder_itself_has_the_scores_of_its_own_logits():
    config = hf.OPTConfig(
        vocab_size=VOCAB, hidden_size=16, ffn_dim=24, num_hidden_layers=1, num_attention_heads=2, dropout=0.0
    )
    torch.manual_seed(0)
    model = fused(hf.OPTForCausalLM(config).double())
    compared(model, *batch())


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
