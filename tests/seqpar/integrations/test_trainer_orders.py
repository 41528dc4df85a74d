"""A Trainer made before, after or inside, or a callback: the gradient is that of the whole step, or it is refused."""

import copy
import logging
from contextlib import nullcontext
from itertools import pairwise

import datasets
import numpy as np
import pytest
import torch
from transformers import Seq2SeqTrainer, Trainer
from trl import SFTConfig, SFTTrainer

from seqpar.integrations import say_once
from seqpar.integrations.transformers import SeqparLoss, apply_seqpar_loss, compute_loss_func, remove_seqpar_loss
from seqpar.integrations.transformers_trainer import Facts, trainer_facts
from tests.seqpar.integrations.tiny_models import (
    batch_of,
    plain_loss,
    predicted,
    relative_error,
    taken,
    tiny,
    without_labels,
)
from tests.seqpar.integrations.trainer_runs import (
    ONE_STEP,
    ORDERS,
    Gradients,
    made,
    micro_batches,
    model_last,
    trained_in_order,
)
from tests.seqpar.integrations.trl_runs import words

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def without_division(name):
    """A model whose class says that it does not divide by the step's labels, as Qwen2.5-VL and 26 others do."""
    model = tiny(name)
    model.__class__ = type(type(model).__name__, (type(model),), {"accepts_loss_kwargs": False})
    return model


def batches_of(model):
    return micro_batches(batch_of(model, [7, 5]))


def rows_projected(model):
    """The rows of each call of a model's output embeddings from now on."""
    rows = []
    model.lm_head.register_forward_hook(lambda _, args, output: rows.append(output.shape[:-1].numel()))
    return rows


MODELS = {"marian": tiny, "llama": tiny, "gpt2": tiny, "bert": tiny, "qwen2": without_division, "t5": without_division}


def expected_of(model, batches):
    """The gradient of the model's own logits over all batches."""
    loss = sum(plain_loss(model, batch) for batch in batches)
    return taken(model, loss / sum(predicted(model, batch["labels"]) for batch in batches))[1]


SLOWER = [pytest.param(name, marks=pytest.mark.hf_models) for name in ("llama", "bert", "t5")]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["marian", "gpt2", "qwen2", *SLOWER])
def test_in_every_order_the_gradient_is_that_of_the_whole_step(name, order):
    model = MODELS[name](name)
    batches = batches_of(model)
    expected = expected_of(model, batches)
    assert relative_error(trained_in_order(model, batches, ORDERS[order]), expected) < 1e-12
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen2", r"^this Trainer was made before apply_seqpar_loss and gives Qwen2ForCausalLM no num_items_in_batch"),
        ("t5", r"^this Trainer was made before .* gives T5ForConditionalGeneration no num_items_in_batch"),
        (
            "gpt2",
            r"^this Trainer was made before .* counts the first label of every sequence, which GPT2LMHeadModel does",
        ),
    ],
)
def test_applied_to_the_model_alone_of_a_trainer_that_has_read_otherwise_it_is_refused_in_one_line(name, said):
    model = MODELS[name](name)
    with pytest.raises(RuntimeError, match=said) as raised:
        trained_in_order(model, batches_of(model), model_last)
    assert "apply_seqpar_loss(trainer)" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "count"), [("marian", 4), ("llama", 4), ("bert", 4), ("qwen2", 1)])
def test_applied_to_the_model_alone_of_a_trainer_that_has_read_the_same_or_has_one_batch_it_is_exact(name, count):
    model = MODELS[name](name)
    batches = batches_of(model)[:count]
    expected = expected_of(model, batches)
    assert relative_error(trained_in_order(model, batches, model_last), expected) < 1e-12


class Forgetting(Trainer):
    """Whose loss is the model's own mean, as many write it."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_a_trainer_that_keeps_the_number_of_labels_to_itself_is_refused_where_the_class_would_have_been_right(tmp_path):
    model = without_division("qwen2")
    trainer = made(model, batches_of(model), str(tmp_path), Forgetting)
    with (
        apply_seqpar_loss(trainer),
        pytest.raises(RuntimeError, match=r"Forgetting.compute_loss does not pass num_items"),
    ):
        trainer.train()


def test_after_remove_a_trainer_goes_by_what_the_class_says(tmp_path):
    model = without_division("t5")
    batches = batches_of(model)
    stock = made(copy.deepcopy(model), batches, str(tmp_path))
    before = trainer_facts(stock)
    assert before == Facts(False, False)
    with apply_seqpar_loss(model):
        inside = made(model, batches, str(tmp_path))
        inside.train()
        assert trainer_facts(inside) == Facts(True, False)
    assert trainer_facts(inside) == before
    with apply_seqpar_loss(stock):
        assert trainer_facts(stock) == Facts(True, False)
    assert trainer_facts(stock) == before


def test_a_second_trainer_of_the_same_model_takes_the_callbacks_loss_over(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(say_once, "_said", set())
    model = tiny("gpt2")
    batches = batches_of(model)
    with caplog.at_level(logging.INFO, "seqpar.integrations.transformers"):
        first = made(model, batches, str(tmp_path), callbacks=[SeqparLoss(label_smoothing=0.1, chunk_tokens=6)])
        first.train()
    said = "seqpar computes the loss in Trainer: 3 products, at most 6 tokens a chunk"
    assert caplog.messages == [said]
    second = made(model, batches, str(tmp_path), callbacks=[SeqparLoss()])
    second.train()
    losses = []
    for trainer in (first, second):
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] != losses[1]
    remove_seqpar_loss(first)
    remove_seqpar_loss(second)
    assert not model._forward_hooks


def test_a_callback_in_a_loop_of_ones_own_and_a_loss_that_is_there_already_are_refused(tmp_path):
    model = tiny("llama")
    with pytest.raises(RuntimeError, match="the callback was called by no Trainer; use apply_seqpar_loss"):
        SeqparLoss().on_train_begin(None, None, None)
    with pytest.raises(ValueError, match="label_smoothing is 2"):
        SeqparLoss(label_smoothing=2)
    with (
        apply_seqpar_loss(model),
        pytest.raises(ValueError, match=r"has the loss already; remove_seqpar_loss\(model\)"),
    ):
        made(model, batches_of(model), str(tmp_path), callbacks=[SeqparLoss()])


def test_a_model_that_is_made_for_each_run_has_the_callbacks_loss(tmp_path):
    batches = batches_of(tiny("gpt2"))
    expected, kept = expected_of(tiny("gpt2"), batches), Gradients()
    callbacks = [SeqparLoss(chunk_tokens=5), kept]
    trainer = made(None, batches, str(tmp_path), model_init=lambda: tiny("gpt2"), callbacks=callbacks)
    for _ in range(2):
        kept.seen = {}
        trainer.train()
        assert relative_error(kept.seen, expected) < 1e-12


@pytest.mark.parametrize(
    ("settings", "more", "said"),
    [
        (
            {"label_smoothing_factor": 0.1},
            {},
            r"has label_smoothing_factor=0\.1, which needs all logits; leave that at 0",
        ),
        ({}, {"compute_loss_func": print}, r"has a compute_loss_func, and takes the labels away"),
    ],
)
def test_a_trainer_with_a_loss_of_its_own_is_refused(tmp_path, settings, more, said):
    model = tiny("llama")
    trainer = made(model, batches_of(model), str(tmp_path), settings=settings, **more)
    with pytest.raises(ValueError, match=said):
        apply_seqpar_loss(trainer)
    assert not model._forward_hooks


def test_a_trainer_of_trls_is_refused_by_name(tmp_path):
    model = tiny("llama")
    trainer = made(model, batches_of(model), str(tmp_path))
    trainer.__class__ = SFTTrainer
    with pytest.raises(TypeError, match=r"this SFTTrainer computes its loss itself; use \S+apply_seqpar_scores"):
        apply_seqpar_loss(trainer)


def evaluated(model, batches, folder, smoothing, metrics, kind=Trainer, **settings):
    """What a Trainer logs with its own smoothing, and what with ours."""
    found = []
    for ours in (False, True):
        own = {"label_smoothing_factor": 0.0 if ours else smoothing, **settings}
        trainer = made(model, batches, folder, kind, settings=own, compute_metrics=metrics)
        with apply_seqpar_loss(trainer, label_smoothing=smoothing, chunk_tokens=3) if ours else nullcontext():
            found.append(trainer.evaluate())
    return found


@pytest.mark.parametrize("with_metrics", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", ["marian", "llama", "gemma2", "mixtral"])
def test_the_evaluation_loss_is_the_stock_trainers_and_its_logits_are_computed_where_somebody_looks_at_them(
    name, smoothing, with_metrics, tmp_path
):
    # The Trainer's own smoothing leaves an auxiliary loss out
    model = tiny(name, **({"output_router_logits": True} if name == "mixtral" and not smoothing else {}))
    batches = batches_of(model)
    if name == "marian":
        batches = [batch | without_labels(model, batch)[0] for batch in batches]
    seen = []

    def metrics(prediction):
        seen.append(prediction.predictions)
        return {}

    stock, ours = evaluated(model, batches, str(tmp_path), smoothing, metrics if with_metrics else None)
    assert ours["eval_loss"] == pytest.approx(stock["eval_loss"], rel=1e-6)
    assert len(seen) == 2 * with_metrics
    for theirs, with_ours in pairwise(seen):
        for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (theirs, with_ours)), strict=True):
            assert np.array_equal(one, other)


def test_where_nobody_looks_at_them_evaluation_computes_a_window_of_logits(tmp_path):
    model = tiny("llama")
    batches = batches_of(model)
    rows = rows_projected(model)
    for metrics, few in [(None, True), (lambda prediction: {}, False)]:
        trainer = made(model, batches, str(tmp_path), compute_metrics=metrics)
        with apply_seqpar_loss(trainer, label_smoothing=0.1):
            trainer.evaluate()
            rows.clear()
            trainer.evaluate()
        assert rows == [12 if few else 14] * 4


class Looking(Trainer):
    """Whose loss looks at the logits, as some do for an accuracy in evaluation."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if not model.training:
            self.looked = outputs["logits"].argmax(-1)
        return (loss, outputs) if return_outputs else loss


def test_a_trainer_whose_own_loss_looks_at_the_logits_gets_them(tmp_path):
    model = tiny("llama")
    trainer = made(model, batches_of(model), str(tmp_path), Looking)
    with apply_seqpar_loss(trainer):
        trainer.evaluate()
    assert trainer.looked.shape == (2, 7)


def test_where_predictions_are_generated_the_loss_is_chunked_and_the_predictions_are_the_models_own(tmp_path):
    model = tiny("marian")
    batches = batches_of(model)
    seen, rows = [], rows_projected(model)

    def metrics(prediction):
        seen.append(prediction.predictions)
        return {"rows": rows[-1]}

    settings = {"predict_with_generate": True, "generation_max_length": 9}
    stock, ours = evaluated(model, batches, str(tmp_path), 0.0, metrics, Seq2SeqTrainer, **settings)
    assert (stock["eval_rows"], ours["eval_rows"]) == (14, 12)
    assert ours["eval_loss"] == pytest.approx(stock["eval_loss"], rel=1e-6)
    assert np.array_equal(*seen)


@pytest.mark.parametrize("with_metrics", [False, True])
def test_the_evaluation_loss_of_a_loss_function_is_that_of_the_model(with_metrics, tmp_path):
    model = tiny("llama")
    batches = batches_of(model)
    losses, rows = [], rows_projected(model)
    for function in (False, True):
        with apply_seqpar_loss(model, label_smoothing=0.1) as applied:
            given = {"compute_loss_func": compute_loss_func(applied)} if function else {}
            given["compute_metrics"] = (lambda prediction: {}) if with_metrics else None
            losses.append(made(model, batches, str(tmp_path), **given).evaluate()["eval_loss"])
        assert rows[-1] == (14 if with_metrics else 12)
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def trainer_of(way, folder):
    """A Trainer that makes its model itself when it begins to train, of a class that takes no num_items_in_batch."""
    make = type(tiny("gpt2"))

    class Plain(make):
        def forward(self, input_ids=None, attention_mask=None, labels=None, return_dict=None):
            given = {"input_ids": input_ids, "attention_mask": attention_mask}
            return super().forward(**given, labels=labels, return_dict=return_dict)

    # By the name of the class a stock Trainer with smoothing decides whether to shift the labels
    Plain.__name__ = make.__name__

    def model_init():
        torch.manual_seed(0)
        return Plain(tiny("gpt2").config).double()

    batches = batches_of(tiny("gpt2"))
    smoothing = 0.3
    given = {"callbacks": [SeqparLoss(label_smoothing=smoothing)]} if way == "callback" else {}
    settings = {"label_smoothing_factor": smoothing} if way == "stock" else {}
    settings["learning_rate"] = 0.1
    return made(None, batches[:1], folder, model_init=model_init, settings=settings, **given)


def test_a_callback_follows_a_trainer_that_makes_its_model_anew(tmp_path):
    losses = {}
    for way in ("stock", "callback", "none"):
        trainer = trainer_of(way, str(tmp_path))
        trainer.train()
        losses[way] = trainer.evaluate()["eval_loss"]
        remove_seqpar_loss(trainer)
        assert trainer_facts(trainer) == Facts(divides=False, shifts=False)
    assert losses["callback"] == pytest.approx(losses["stock"], rel=1e-5)
    assert abs(losses["none"] - losses["stock"]) > 1e-3


def test_applied_to_a_trainer_that_makes_its_model_anew_it_is_refused(tmp_path):
    trainer = trainer_of("none", str(tmp_path))
    with pytest.raises(ValueError, match=r"has a model_init, .*use callbacks=\[SeqparLoss"):
        apply_seqpar_loss(trainer)


def test_a_trainer_that_got_another_model_meanwhile_has_that_ones_facts(tmp_path):
    model, other = without_division("qwen2"), without_division("t5")
    trainer = made(model, batches_of(model), str(tmp_path))
    before = trainer_facts(trainer)
    with apply_seqpar_loss(trainer):
        assert trainer_facts(trainer) != before
        trainer.model = other
    assert trainer_facts(trainer) == Facts(divides=False, shifts=False)


def trained_by_trl(way, folder):
    """The gradients of one step of two micro-batches of TRL's SFTTrainer, which takes its loss in chunks of its own."""
    torch.manual_seed(2)
    model, kept = tiny("llama", torch.float32), Gradients()
    applied = None if way == "stock" else apply_seqpar_loss(model)
    sentences = [{"input_ids": torch.randint(4, 37, (n,)).tolist()} for n in (5, 9, 7, 3)]
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": False}
    SFTTrainer(
        model,
        SFTConfig(str(folder), gradient_checkpointing=False, **ONE_STEP | given),
        train_dataset=datasets.Dataset.from_list(sentences),
        processing_class=words(),
        compute_loss_func=compute_loss_func(applied) if way == "function" else None,
        callbacks=[kept],
    ).train()
    return kept.seen


def test_by_trl_with_compute_loss_func_the_gradient_is_the_trainers_own(tmp_path):
    assert relative_error(trained_by_trl("function", tmp_path), trained_by_trl("stock", tmp_path)) < 1e-5


def test_by_trl_the_loss_in_the_model_alone_is_refused_in_one_line(tmp_path):
    said = r"TRL's trainer computes the loss of LlamaForCausalLM.*compute_loss_func"
    with pytest.raises(TypeError, match=said) as raised:
        trained_by_trl("applied", tmp_path)
    assert "\n" not in str(raised.value)
