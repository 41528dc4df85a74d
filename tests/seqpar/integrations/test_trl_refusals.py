"""Models, adapters and options that `apply_seqpar_scores` does not support: one line, before the first step."""

import functools
import types

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import nn
from trl.trainer import distillation_trainer
from trl.trainer import utils as trl_utils

from seqpar.integrations.peft_adapters import base_of
from seqpar.integrations.trl import AppliedScores, allow_head_adapter, apply_seqpar_scores
from tests.seqpar.integrations.tiny_models import DECODER, tiny
from tests.seqpar.integrations.trl_forwards import adapted, batch
from tests.seqpar.integrations.trl_runs import Run, examples, made, words

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


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


def in_the_heads_own_forward(model):
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden: own(hidden) + 0.01


def twice(model):
    def forward(self, *args, own=model.forward, **kwargs):
        self.lm_head(torch.zeros(1, DECODER["hidden_size"], dtype=torch.float64))
        return own(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


def failing(error):
    """A change of a model that makes it fail on text alone."""

    def forward(self, **kwargs):
        raise error

    return lambda model: setattr(model, "forward", types.MethodType(forward, model))


def with_trained_tokens(model):
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [5, 6]}))


def hooked(hook):
    return lambda model: model.lm_head.register_forward_hook(hook)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (twice, r"LlamaForCausalLM calls its output embeddings 2 times in a forward"),
        (
            lambda model: setattr(model, "base_model_prefix", "none"),
            r"LlamaForCausalLM changes its hidden states between",
        ),
        (
            lambda model: setattr(model, "get_output_embeddings", lambda: None),
            "^LlamaForCausalLM has no output embeddings; ",
        ),
        (
            failing(ValueError("pixel_values\nare missing")),
            r"LlamaForCausalLM fails on a text of a few tokens \(ValueError: pixel",
        ),
        (with_trained_tokens, r"are a peft\.utils\.other\.TrainableTokensWrapper; the scores"),
        (without_config_name, r"LlamaForCausalLM's own logits of a few tokens differ by up to 2\.\d+"),
        (
            through_a_subclass,
            r"embeddings of LlamaForCausalLM are a \S+Scaled; the scores need a torch.nn.Linear",
        ),
        (between_backbone_and_head, r"LlamaForCausalLM changes its hidden states between its backbone and its output"),
        (hooked(lambda module, args, output: output * 0.5), r"own logits of a few tokens differ by up to"),
        # In place
        (
            hooked(lambda module, args, output: output.index_fill_(-1, torch.tensor([5]), -1e9)),
            r"differ by up to 1e\+09",
        ),
        (in_the_heads_own_forward, r"output embeddings of LlamaForCausalLM do more than multiply and add a bias"),
    ],
)
def test_a_model_that_does_something_else_to_its_logits_is_refused_by_name(change, message):
    model = tiny("llama-tied" if change is with_trained_tokens else "llama")
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
        ({"use_dora": True}, None, "is a DoraLinearVariant; only plain LoRA is supported"),
        ({"lora_bias": True}, None, "has a bias of its own; set lora_bias=False"),
        ({}, lambda model: model.merge_adapter(), "have a LoRA adapter that is merged"),
        ({}, two_active, r"have 2 active LoRA adapters \(default, second\)"),
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


def test_a_model_that_runs_out_of_memory_says_so_itself():
    model = tiny("llama")
    failing(torch.OutOfMemoryError("no memory is left"))(model)
    with pytest.raises(torch.OutOfMemoryError, match=r"^no memory is left$"):
        AppliedScores([model], None)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return made(Run("sft", ""), str(tmp_path_factory.mktemp("sft")))


CONTEXT_PARALLEL = types.SimpleNamespace(cp_enabled=True)


@pytest.mark.parametrize(
    ("place", "name", "value", "option", "reason"),
    [
        ("args", "use_liger_kernel", True, "use_liger_kernel=True", "replaces parts of the model's forward"),
        ("args", "torch_compile", True, "torch_compile=True", "outside the compiled graph"),
        ("args", "label_smoothing_factor", 0.1, "label_smoothing_factor=0.1", "logits of all tokens"),
        ("", "compute_loss_func", len, "compute_loss_func", "logits of all tokens"),
        ("", "compute_metrics", len, "compute_metrics", "logits of all tokens"),
        ("", "preprocess_logits_for_metrics", len, "preprocess_logits_for_metrics", "logits of all tokens"),
        ("", "is_fsdp_enabled", True, "FSDP1", "set fsdp_config="),
        ("accelerator.state", "parallelism_config", CONTEXT_PARALLEL, "cp_size > 1", "not tested"),
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
    with pytest.raises(TypeError, match=r"got a Linear; it supports SFTTrainer, .*, DistillationTrainer, and"):
        apply_seqpar_scores(nn.Linear(2, 2))


def assert_another_version(trainer, what, changed):
    said = rf"TRL 1\.16\.0 computes {what} differently from 1\.16, .*: {changed}.*install trl==1.16.0"
    with pytest.raises(RuntimeError, match=said):
        apply_seqpar_scores(trainer)


def test_another_version_of_trl_is_refused(trainer, monkeypatch):
    own = trl_utils._ChunkedLogProbFunction

    class Hotter(own):
        @staticmethod
        def apply(hidden, weight, bias, targets, temperature, *others):
            return own.apply(hidden, weight, bias, targets, 1.0, *others)

    for changed, how in (
        (torch.autograd.Function, r"takes kwargs where it took hidden, weight"),
        (Hotter, r"returns log_probs that differ by up to 0\.\d+ from"),
    ):
        monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", changed)
        assert_another_version(trainer, "its log-probabilities", f"_ChunkedLogProbFunction {how}")
    monkeypatch.delattr(trl_utils, "_use_triton")
    assert_another_version(trainer, "its log-probabilities", "trl.trainer.utils has no _use_triton")


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


def interrupted(module, args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("left", [True, False])
def test_after_ctrl_c_in_a_forward_another_model_is_not_scored_as_this_one(left):
    model, other = (trl_utils.add_fused_lm_head(m) or m for m in (tiny("gemma2"), tiny("llama")))
    own = trl_utils._ChunkedLogProbFunction
    ids = batch()[0]
    applied = AppliedScores([model], None)
    hook = model.model.layers[0].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=ids, labels=ids, fused_lm_head=True)
    hook.remove()
    if left:
        with pytest.raises(RuntimeError, match=r"was interrupted before it ended; call its remove\(\)"):
            other(input_ids=ids, labels=ids, fused_lm_head=True)
        # The next forward of its own begins anew
        model(input_ids=ids, labels=ids, fused_lm_head=True)
        assert trl_utils._ChunkedLogProbFunction is own
    applied.remove()
    assert trl_utils._ChunkedLogProbFunction is own


def test_a_trainer_that_asks_for_logits_in_training_is_refused():
    model = tiny("llama")
    with AppliedScores([model], None):
        with torch.no_grad():
            model(input_ids=batch()[0])
        with pytest.raises(RuntimeError, match="asks LlamaForCausalLM for its logits in training and not for its"):
            model(input_ids=batch()[0])


def test_references_of_another_softcap_than_the_models_are_refused(trainer, monkeypatch):
    monkeypatch.setattr(trainer, "precompute_ref_logps", True, raising=False)
    apply_seqpar_scores(trainer).remove()
    model = trainer.model
    monkeypatch.setattr(model.config, "final_logit_softcapping", 2.0, raising=False)
    theirs = types.MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), model)
    monkeypatch.setitem(vars(model), "forward", theirs)
    capped = model.lm_head.register_forward_hook(lambda module, args, output: 2 * torch.tanh(output / 2))
    with pytest.raises(ValueError, match=r"softcap of None and a factor of 1 where LlamaForCausalLM has 2.0 and 1"):
        apply_seqpar_scores(trainer)
    capped.remove()
    assert not model._forward_pre_hooks


def test_references_of_the_models_own_softcap_are_accepted(trainer, monkeypatch):
    model = tiny("gemma2")
    trl_utils.add_fused_lm_head(model)
    monkeypatch.setattr(trainer, "model", model)
    monkeypatch.setattr(trainer, "precompute_ref_logps", True, raising=False)
    apply_seqpar_scores(trainer).remove()
    monkeypatch.setattr(model.config, "final_logit_softcapping", 0.5)
    with pytest.raises(ValueError, match=r"with a softcap of \d.* and a factor of 1 where Gemma2ForCausalLM has 0.5"):
        apply_seqpar_scores(trainer)


def test_an_adapter_past_the_hooks_and_a_compiled_model_are_refused(trainer, monkeypatch):
    adalora = get_peft_model(tiny("llama"), AdaLoraConfig(target_modules=["q_proj"], total_step=10))
    monkeypatch.setattr(trainer, "model", adalora)
    with pytest.raises(TypeError, match="PEFT's ADALORA calls the model's forward without its hooks"):
        apply_seqpar_scores(trainer)
    monkeypatch.setattr(trainer, "model", torch.compile(tiny("llama")))
    with pytest.raises(TypeError, match=r"the LlamaForCausalLM of this trainer is compiled; make the trainer"):
        apply_seqpar_scores(trainer)


def test_an_adapter_on_the_projection_is_trained_only_with_the_scores(tmp_path):
    trainer = made(Run("sft", "", lora={"target_modules": ["lm_head"]}), str(tmp_path))
    with pytest.raises(RuntimeError, match=r"TRL ignores the adapter on the output embeddings of LlamaForCausalLM"):
        trainer.train()
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        type(trainer)(trainer.model, args=trainer.args, train_dataset=examples("sft", 2), processing_class=words())


@pytest.fixture(scope="module")
def distilling(tmp_path_factory):
    return made(Run("distillation", ""), str(tmp_path_factory.mktemp("distillation")))


def loss_of_its_own(trainer):
    trainer.__class__ = type("Subclass", (type(trainer),), {"_compute_loss": lambda self, *_: 0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda trainer: setattr(trainer, "teacher_model", tiny("granite")),
            r"the student multiplies its logits by 1 and the teacher by 0\.\d+",
        ),
        (
            lambda trainer: setattr(trainer, "teacher_model", tiny("gemma2")),
            r"Gemma2ForCausalLM caps its logits at \d+, which distillation does not take",
        ),
        (
            lambda trainer: setattr(trainer, "model", adapted(target_modules=["lm_head"])),
            r"output embeddings of LlamaForCausalLM have an adapter, which .*; leave them out",
        ),
        (
            lambda trainer: setattr(trainer, "teacher_model", None),
            r"this DistillationTrainer has a loss or a teacher of another kind",
        ),
        (loss_of_its_own, r"this Subclass has a loss or a teacher of another kind"),
        (lambda trainer: setattr(trainer.args, "use_liger_kernel", True), r"DistillationTrainer with use_liger_kernel"),
    ],
)
def test_distillation_that_is_not_supported_is_refused_by_name(distilling, monkeypatch, change, message):
    for owner, name in ((distilling, "model"), (distilling, "teacher_model"), (distilling.args, "use_liger_kernel")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    kind = type(distilling)
    change(distilling)
    try:
        with pytest.raises((TypeError, ValueError), match=message) as raised:
            apply_seqpar_scores(distilling)
    finally:
        distilling.__class__ = kind
    assert "\n" not in str(raised.value)
    assert "without apply_seqpar_scores" in str(raised.value)
    assert "_compute_loss" not in vars(distilling)


def test_another_divergence_of_trl_is_refused(distilling, monkeypatch):
    own = distillation_trainer._chunked_divergence_loss

    @functools.wraps(own)
    def twice(*args, **kwargs):
        loss, entropy, tokens = own(*args, **kwargs)
        return 2 * loss, entropy, tokens

    for changed, how in (
        (lambda hidden: hidden, "takes hidden where it took student_hidden_states, "),
        (twice, r"returns losses for beta 0 that differ by up to \d\.\d+ from ours"),
    ):
        monkeypatch.setattr(distillation_trainer, "_chunked_divergence_loss", changed)
        assert_another_version(distilling, "its divergence", f"_chunked_divergence_loss {how}")
    monkeypatch.delattr(distillation_trainer, "_chunked_divergence_loss")
    assert_another_version(distilling, "its divergence", "trl.trainer.distillation_trainer has no _chunked")


@pytest.mark.parametrize(
    ("kind", "what"),
    [("trainer", "SFTTrainer has the scores"), ("distilling", "DistillationTrainer has the divergence")],
)
def test_what_is_applied_twice_is_refused_and_once_more_after_remove_is_fine(kind, what, request):
    trainer = request.getfixturevalue(kind)
    applied = apply_seqpar_scores(trainer)
    with pytest.raises(ValueError, match=rf"this {what} already; remove\(\) it"):
        apply_seqpar_scores(trainer)
    applied.remove()
    applied.remove()
    apply_seqpar_scores(trainer).remove()


def test_label_smoothing_that_trl_itself_ignores_is_accepted(trainer, monkeypatch):
    monkeypatch.setattr(trainer.args, "label_smoothing_factor", 0.1)
    monkeypatch.setattr(trainer.args, "loss_type", "dft")
    apply_seqpar_scores(trainer).remove()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adapted(target_modules=["lm_head"], use_dora=True), "DoraLinearVariant"),
        (lambda: tiny("llama"), "allow_head_adapter got a LlamaForCausalLM; it needs a PEFT model"),
        (lambda: adapted(target_modules=["q_proj"]), "output embeddings of this LlamaForCausalLM have no adapter"),
    ],
)
def test_allow_head_adapter_refuses_models_that_need_it_not_or_that_trl_would_then_train_wrongly(make, message):
    model = make()
    with pytest.raises(TypeError, match=message), allow_head_adapter(model):
        pass
