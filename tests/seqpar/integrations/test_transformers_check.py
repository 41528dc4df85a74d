"""What a model does with labels and logits is found out, in float32, by its own loss; what is not known is refused."""

import copy
import inspect
import re
from contextlib import ExitStack, nullcontext

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

from seqpar.integrations.made_up import close, same_logits
from seqpar.integrations.transformers import apply_seqpar_loss, compute_loss_func
from seqpar.integrations.transformers_check import Examined, check_added_part, own_outputs
from seqpar.integrations.transformers_model import Reading, key_of, special_labels
from seqpar.testing import assert_same_gradients, assert_same_loss
from tests.seqpar.integrations.own_loss import outcome
from tests.seqpar.integrations.shrunk_models import working
from tests.seqpar.integrations.tiny_models import (
    DECODER,
    ENCODER_DECODER,
    T5,
    batch_of,
    relative_error,
    taken,
    tiny,
    without_labels,
)

XLNET = {"vocab_size": 37, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 24, "dropout": 0.0}
XLM = {"vocab_size": 37, "n_words": 37, "emb_dim": 16, "n_layers": 1, "n_heads": 2, "dropout": 0.0}
UNSHIFTED = {
    "bart": lambda: hf.BartForCausalLM(hf.BartConfig(**ENCODER_DECODER)),
    "marian": lambda: hf.MarianForCausalLM(hf.MarianConfig(**ENCODER_DECODER)),
    "trocr": lambda: hf.TrOCRForCausalLM(hf.TrOCRConfig(**ENCODER_DECODER, use_learned_position_embeddings=True)),
    "xlnet": lambda: hf.XLNetLMHeadModel(hf.XLNetConfig(**XLNET)),
}


def ids_of(lengths):
    torch.manual_seed(0)
    return torch.randint(4, 37, (len(lengths), max(lengths)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", UNSHIFTED)
def test_without_labels_in_the_forward_a_model_that_does_not_shift_is_refused(name, training):
    torch.manual_seed(0)
    model, ids = UNSHIFTED[name]().train(training), ids_of([6, 6])
    with apply_seqpar_loss(model) as applied, torch.set_grad_enabled(training):
        function = compute_loss_func(applied)
        with pytest.raises(
            RuntimeError, match=rf"{type(model).__name__}'s own loss of a few tokens is [\d.]+, that of"
        ):
            function(model(input_ids=ids), ids)


def test_a_head_that_is_no_single_linear_layer_is_refused():
    torch.manual_seed(0)
    model, ids = hf.XLMWithLMHeadModel(hf.XLMConfig(**XLM)).train(), ids_of([6])
    with apply_seqpar_loss(model), pytest.raises((TypeError, RuntimeError), match="XLMWithLMHeadModel"):
        model(input_ids=ids, labels=ids)


@pytest.mark.parametrize("name", ["llama", "marian"])
def test_evaluated_before_it_is_trained_the_loss_is_the_models_own(name):
    model = tiny(name).eval()
    batch = batch_of(model, [5, 3])
    own = model(**batch).loss
    inputs, labels = without_labels(model, batch)
    with apply_seqpar_loss(model) as applied, torch.no_grad():
        loss = compute_loss_func(applied)(model(**inputs), labels)
        assert applied.readings.checked
    torch.testing.assert_close(loss.double(), own.double(), rtol=1e-6, atol=0)


def narrowed(module, args, output):
    return output * 0.95


def capped(module, args, output):
    return 30 * torch.tanh(output / 30)


def masked_in_place(module, args, output):
    return output.index_fill_(-1, torch.tensor([5]), -1e9)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("change", [narrowed, capped, masked_in_place])
@pytest.mark.parametrize("way", ["labels", "function"])
def test_in_bfloat16_a_change_of_the_logits_by_five_percent_or_of_one_class_is_refused(change, autocast, way):
    model = tiny("llama", torch.float32 if autocast else torch.bfloat16)
    model.lm_head.register_forward_hook(change)
    batch = batch_of(model, [4])
    labels = batch["labels"] if way == "labels" else batch.pop("labels")
    with apply_seqpar_loss(model) as applied, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        function = compute_loss_func(applied)
        with pytest.raises(RuntimeError, match="own logits of a few tokens differ by up to"):
            function(model(**batch), labels)


@pytest.mark.parametrize(
    ("model_class", "changes"),
    [
        (hf.RecurrentGemmaForCausalLM, {"logits_soft_cap": 3.0}),
        (hf.FalconH1ForCausalLM, {"lm_head_multiplier": 0.95}),
        (hf.MptForCausalLM, {"logit_scale": 0.5}),
        (hf.MptForCausalLM, {"logit_scale": "inv_sqrt_d_model"}),
    ],
)
@pytest.mark.parametrize("way", ["labels", "function"])
def test_a_soft_cap_or_factor_of_another_name_is_the_models_own(model_class, changes, way):
    if model_class is hf.FalconH1ForCausalLM:
        changes = changes | {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64}
    model, batch = working(model_class, changes)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    assert outcome(model, batch, way) == "exact"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("as_dict", [True, False])
@pytest.mark.parametrize("name", ["mixtral", "switch"])
def test_an_auxiliary_loss_of_a_later_call_is_added_also_in_tuples_and_is_not_in_others(name, as_dict, dtype):
    model = tiny(name, dtype)
    batch = batch_of(model, [6, 3])
    given = [{}, {"output_router_logits": True}, {}]
    own = [model(**batch, **each).loss for each in given]
    assert own[1] > own[0] + 0.1
    with apply_seqpar_loss(model):
        ours = [model(**batch, **each, return_dict=as_dict)["loss" if as_dict else 0] for each in given]
    torch.testing.assert_close(torch.stack(ours), torch.stack(own), rtol=1e-6, atol=8 * torch.finfo(dtype).eps)


def test_an_auxiliary_loss_that_the_configuration_turns_on_later_is_added():
    model = tiny("mixtral")
    batch = batch_of(model, [6, 3])
    with apply_seqpar_loss(model):
        before = model(**batch, return_dict=False)[0]
        model.config.output_router_logits = True
        after = model(**batch, return_dict=False)[0]
    assert after > before + 0.1
    torch.testing.assert_close(after.float(), model(**batch).loss, rtol=1e-6, atol=0)


def test_a_loss_added_under_no_name_is_known_by_its_gradient():
    model = tiny("llama")
    own, weight = model.loss_function, model.model.layers[0].mlp.up_proj.weight
    batch = batch_of(model, [6])
    with apply_seqpar_loss(model):
        _, expected = taken(model, model(**batch).loss)
        expected["model.layers.0.mlp.up_proj.weight"] += 1e-9
        model.loss_function = lambda logits, labels, **kwargs: own(logits, labels, **kwargs) + 1e-9 * weight.sum()
        _, found = taken(model, model(**batch).loss)
    assert relative_error(found, expected) < 1e-15


@pytest.mark.parametrize(("apart", "same"), [(7.9, True), (-7.9, True), (8.1, False), (-8.1, False)])
@pytest.mark.parametrize("loss", [5.0, 1.0, 0.5])
def test_what_a_model_adds_to_its_loss_may_differ_by_eight_roundings_of_the_loss_or_of_1(loss, apart, same):
    def examined(ours, theirs):
        losses = torch.tensor([ours, theirs], dtype=torch.float64)
        return Examined(Reading(None, 1.0), losses[0], losses[1], [torch.ones(())])

    certain = examined(0.0, 0.25 + apart * max(loss, 1.0) * torch.finfo(torch.float32).eps)
    said = "^a model's own loss of a few tokens is " + re.escape(f"{loss + 0.25:g}")
    with nullcontext() if same else pytest.raises(RuntimeError, match=said):
        check_added_part("a model", examined(loss, loss + 0.25), certain)


@pytest.mark.parametrize(("apart", "same"), [(7.9, True), (8.1, False)])
@pytest.mark.parametrize(
    ("dtype", "eps"),
    [(None, 2.0**-23), (torch.float64, 2.0**-23), (torch.float32, 2.0**-23), (torch.bfloat16, 2.0**-7)],
)
@pytest.mark.parametrize("largest", [0.25, 1.0, 40.0])
def test_logits_are_the_same_up_to_eight_roundings_of_the_largest_or_of_1(largest, dtype, eps, apart, same):
    ours = torch.tensor([[0.125, -largest, -float("inf")]], dtype=torch.float64)
    theirs = ours + torch.tensor([apart * eps * max(largest, 1.0), 0.0, 0.0], dtype=torch.float64)
    precision = () if dtype is None else (dtype,)
    assert close(ours, theirs, *precision) == same_logits(ours, theirs, *precision) == same
    assert not same_logits(ours, ours[:, :2], *precision)
    assert close(ours[:, 2:], ours[:, 2:], *precision)


def test_the_special_labels_are_all_tokens_of_the_vocabulary_that_the_configuration_names():
    model = tiny("llama")
    model.config.update({"pad_token_id": None, "bos_token_id": 0, "eos_token_id": [36, 5], "image_token_id": 37})
    assert special_labels(model, 37) == {0, 5, 36}


def bert_for_pretraining():
    return hf.BertForPreTraining(hf.BertConfig(**DECODER)), {"next_sentence_label": torch.tensor([1, 0])}


def sparse_modernbert():
    settings = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    config = hf.ModernBertConfig(**(DECODER | settings), sparse_prediction=True)
    return hf.ModernBertForMaskedLM(config), {}


def prophetnet():
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 2}
    config = hf.ProphetNetConfig(vocab_size=37, hidden_size=16, num_decoder_attention_heads=2, **sizes)
    return hf.ProphetNetForConditionalGeneration(config), {}


@pytest.mark.parametrize("make", [bert_for_pretraining, sparse_modernbert, prophetnet])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_that_does_more_with_labels_is_refused_by_name_in_one_line(make):
    torch.manual_seed(0)
    model, extra = make()
    ids = ids_of([6, 6])
    with apply_seqpar_loss(model.train()), pytest.raises(TypeError) as raised:
        model(input_ids=ids, labels=ids, **extra)
    message = str(raised.value)
    assert type(model).__name__ in message
    assert "use the model without apply_seqpar_loss" in message
    assert "\n" not in message


def test_an_error_of_the_batch_is_the_models_own():
    model = tiny("llama")
    batch = batch_of(model, [4])
    batch["input_ids"] = batch["input_ids"] + 40
    with apply_seqpar_loss(model), pytest.raises(IndexError, match="out of range"):
        model(**batch)


def test_the_check_leaves_random_states_and_buffers_as_they_were():
    plain, model = tiny("marian", dropout=0.3), tiny("marian", dropout=0.3)
    for part in (plain, model):
        part.model.norm = torch.nn.BatchNorm1d(16, dtype=torch.float64)
        part.model.encoder.register_forward_hook(lambda encoder, args, output, part=part: noted(part, output))
    batch, results = batch_of(plain, [5, 3]), []
    applied = apply_seqpar_loss(model)
    for part in (plain, model):
        torch.manual_seed(1)
        results.append(taken(part, part(**batch).loss)[1])
    applied.remove()
    assert relative_error(*results) < 1e-12
    assert torch.equal(plain.model.norm.running_mean, model.model.norm.running_mean)
    assert plain.model.norm.running_mean.any()


def noted(part, output):
    part.model.norm(output.last_hidden_state.flatten(0, 1))


def test_the_first_call_asks_once_and_later_ones_do_not():
    model = copy.deepcopy(tiny("llama"))
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    with apply_seqpar_loss(model):
        for lengths, asked in [([6, 4], True), ([6, 9], False), ([5, 5, 2], False), ([3], False), ([8], False)]:
            calls.clear()
            model(**batch_of(model, lengths)).loss.backward()
            assert len(calls) == 1 + asked


def test_of_labels_alone_a_decoder_gets_its_inputs_by_the_text_part_of_the_configuration():
    small = {"embed_dim": [8] * 4, "num_heads": [1] * 4, "num_groups": [1] * 4, "depths": [1] * 4}
    text = {"decoder_start_token_id": 2, "pad_token_id": 1}
    model, batch = working(hf.Florence2ForConditionalGeneration, {"vision_config": small, "text_config": text})
    for name in text:
        model.config.__dict__.pop(name, None)
    assert outcome(model, batch, "labels") == "exact"


def test_t5_keeps_its_own_start():
    torch.manual_seed(0)
    model = hf.T5ForConditionalGeneration(hf.T5Config(**T5)).double().train()
    ids = ids_of([5])
    own = model(input_ids=ids, labels=ids).loss
    with apply_seqpar_loss(model):
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, own, rtol=1e-12, atol=0)


@pytest.fixture(params=["llama", "marian", "cohere"])
def nested(request):
    """A model with another configuration inside its own."""
    model = tiny(request.param)
    model.config.text_config = hf.LlamaConfig(**DECODER)
    return model


def plain_facts(of):
    """Each flag, number and name that an object has, and another value for it."""
    for name, value in vars(of).items():
        if isinstance(value, bool):
            yield of, name, not value
        elif isinstance(value, int | float):
            yield of, name, value + 1
        elif isinstance(value, str):
            yield of, name, f"{value}!"


def facts(model):
    """All that may decide what a forward does to logits: an object, the name of its attribute, and another value."""
    head = model.get_output_embeddings()
    for of in (model, model.config, model.config.text_config):
        yield from plain_facts(of)
    yield from ((module, "forward", print) for module in (model, head))
    yield model, "_loss_function", print
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        for of, name in ((head, hooks), (torch.nn.modules.module, f"_global{hooks}")):
            yield of, name, {**vars(of)[name], -1: print}


def test_every_fact_that_a_forward_may_branch_on_is_in_the_key_of_its_check(nested):
    unnoticed, before = [], key_of(nested, {})
    for of, name, other in list(facts(nested)):
        kept = {key: value for key, value in vars(of).items() if key == name}
        vars(of)[name] = other
        if key_of(nested, {}) == before:
            unnoticed.append((type(of).__name__, name))
        del vars(of)[name]
        vars(of).update(kept)
    assert not unnoticed
    for module in (nested, nested.get_output_embeddings()):
        before = key_of(nested, {})
        module.__class__ = type("Other", (type(module),), {})
        assert key_of(nested, {}) != before


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch.nn.functional, "cross_entropy"), (torch.nn.functional, "linear"), (torch.nn.Linear, "forward")],
)
def test_a_function_of_torch_that_is_replaced_after_the_first_call_is_in_the_key(owner, name, nested, monkeypatch):
    before = key_of(nested, {})
    monkeypatch.setattr(owner, name, print)
    assert key_of(nested, {}) != before


class CountingSteps(hf.LlamaForCausalLM):
    """A model that counts its steps, as those do that warm something up."""

    steps, forwards = 0, 0

    def forward(self, *args, **kwargs):
        self.steps += 1
        type(self).forwards += 1
        return super().forward(*args, **kwargs)


def test_a_model_that_counts_its_steps_runs_once_more_in_the_first_step_only():
    model = CountingSteps(hf.LlamaConfig(**DECODER)).train()
    with apply_seqpar_loss(model):
        for _ in range(10):
            model(**batch_of(model, [6, 4])).loss.backward()
    assert (model.steps, CountingSteps.forwards) == (10, 11)


def test_every_hook_is_in_the_key_of_a_check_and_not_only_the_first(nested):
    head = nested.get_output_embeddings()
    keys = [key_of(nested, {})]
    with ExitStack() as registered:
        for hook in (print, repr):
            for register in (head.register_forward_hook, head.register_forward_pre_hook):
                registered.callback(register(hook).remove)
                keys.append(key_of(nested, {}))
            for register in ("register_module_forward_hook", "register_module_forward_pre_hook"):
                registered.callback(getattr(torch.nn.modules.module, register)(hook).remove)
                keys.append(key_of(nested, {}))
    assert len(set(keys)) == len(keys)
    assert key_of(nested, {}) == keys[0]


def test_every_argument_that_is_given_and_every_flag_is_in_the_key_of_a_check(nested):
    for name in inspect.signature(nested.forward).parameters:
        values = [None, True, False, "eager", torch.ones(2), 3]
        assert len({key_of(nested, {name: value}) for value in values}) == len(values), name


def test_a_model_that_was_checked_in_evaluation_is_checked_again_in_training():
    model = tiny("llama").eval()
    batch = batch_of(model, [4])
    own = model.loss_function
    model.loss_function = lambda *args, **kwargs: own(*args, **kwargs) * (2 if model.training else 1)
    unlabelled = {key: value for key, value in batch.items() if key != "labels"}
    with apply_seqpar_loss(model) as applied:
        function = compute_loss_func(applied)
        with torch.no_grad():
            function(model(**unlabelled), batch["labels"])
        with pytest.raises(RuntimeError, match="own loss of a few tokens"):
            model.train()(**unlabelled)


def proof(name, mode="train"):
    """The stock and the chunked loss of a model, as the page on Hugging Face models compares them."""
    model = getattr(tiny(name), mode)()
    batch = batch_of(model, [5, 3])

    def chunked():
        with apply_seqpar_loss(model, chunk_tokens=3):
            return model(**batch).loss

    return chunked, lambda: model(**batch).loss, model, batch


@pytest.mark.parametrize("name", ["t5", "marian"])
def test_an_encoder_decoder_is_proved_against_its_stock_loss(name):
    chunked, stock, model, _ = proof(name)
    assert_same_gradients(chunked, stock, dict(model.named_parameters()))


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "gpt2"])
def test_of_a_decoder_that_rounds_its_logits_the_proof_says_so_and_how_it_is_proved(name):
    chunked, stock, model, batch = proof(name)
    tensors = dict(model.named_parameters())
    with pytest.raises(AssertionError, match=r"the plain loss casts its logits to float32.*\n.*\n.*logits\.float\(\)"):
        assert_same_gradients(chunked, stock, tensors)
    assert_same_gradients(chunked, stock, tensors, rtol=1e-5)
    inputs = {key: value for key, value in batch.items() if key != "labels"}

    def uncast():
        return F.cross_entropy(model(**inputs).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    assert_same_gradients(chunked, uncast, tensors)
    with pytest.raises(
        AssertionError, match=r"Likely cause: float32 on the way.*is, which cast their logits: take the"
    ):
        assert_same_gradients(stock, uncast, tensors)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "t5", "marian"])
def test_a_proof_in_evaluation_mode_would_compare_the_stock_loss_with_itself_and_is_refused(name):
    chunked, stock, model, _ = proof(name, "eval")
    refused = rf"{type(model).__name__} is in evaluation mode, .*: call train\(\) first"
    with pytest.raises(TypeError, match=refused):
        assert_same_gradients(chunked, stock, dict(model.named_parameters()))
    hidden, target = torch.randn(2, model.config.hidden_size), torch.tensor([1, 2])
    head, criterion = model.get_output_embeddings(), torch.nn.CrossEntropyLoss(reduction="sum")
    with pytest.raises(TypeError, match=refused):
        assert_same_loss(head, criterion, hidden, target, loss=lambda *given: chunked())
    chunked()


def test_a_model_that_runs_out_of_memory_is_not_asked_again_and_says_so_itself():
    model = tiny("llama")
    batch = batch_of(model, [4])
    calls = []

    def full(module, args):
        calls.append(1)
        raise torch.OutOfMemoryError("no memory is left")

    with apply_seqpar_loss(model) as applied:
        model.model.register_forward_pre_hook(full)
        with pytest.raises(torch.OutOfMemoryError, match="no memory is left"):
            own_outputs(model, batch, applied.remove)
    assert len(calls) == 1
