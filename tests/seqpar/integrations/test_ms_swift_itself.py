"""ms-swift's own fine-tuning trainer and template around the loss: value and gradients are those of one batch."""

import warnings
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F

from tests.seqpar.integrations.small_seq2seq import whole_gradients, wrapped
from tests.seqpar.integrations.tiny_models import relative_error, taken, tiny

with warnings.catch_warnings(action="ignore"):
    from swift.loss import loss_map
    from swift.loss_scale import get_loss_scale
    from swift.template import Template
    from swift.trainers import Seq2SeqTrainer

    from seqpar.integrations.ms_swift import SeqparLoss

pytestmark = pytest.mark.filterwarnings("ignore")


def batch(rank, index):
    g = torch.Generator().manual_seed(10 * rank + index)
    tokens = torch.randint(2, 23, (2, 7), generator=g)
    labels = tokens.clone()
    labels[: 1 + rank, 3 + index :] = -100
    return {"input_ids": tokens, "labels": labels}


def count(batches):
    return sum((b["labels"][:, 1:] != -100).sum() for b in batches)


def one_batch(batches):
    model = tiny("llama").double().train()
    losses = 0
    for b in batches:
        logits, labels = model(b["input_ids"]).logits[:, :-1], b["labels"][:, 1:]
        losses = losses + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, reduction="sum")
    return taken(model, losses / count(batches))


def trainer_of(model, **options):
    """A trainer without what its constructor needs a dataset, a template of a known model and a disk for."""
    template = SimpleNamespace(
        model=model, sequence_parallel_size=1, padding_free=False, loss_scale=get_loss_scale("default")
    )
    template.compute_sft_loss = Template.compute_sft_loss.__get__(template)
    trainer = Seq2SeqTrainer.__new__(Seq2SeqTrainer)
    trainer.__dict__.update(template=template, model=model, label_smoother="its own, which ours goes before")
    settings = {"label_smoothing_factor": 0.1, "enable_dft_loss": False, "enable_channel_loss": False}
    settings |= {"use_liger_kernel": False, "average_tokens_across_devices": True, "tuner_backend": "peft"}
    trainer.args = SimpleNamespace(**settings | {"past_index": -1} | options)
    trainer.template.__dict__.update(options.get("of_template", {}))
    return trainer


def trained(rank, world, wrapping, counted):
    """Two micro-batches through the trainer's own `compute_loss`."""
    model = tiny("llama").double().train()
    model.model_info = SimpleNamespace(is_moe_model=False)
    trainer = trainer_of(model)
    trainer.compute_loss_func = loss_map["seqpar"](trainer.args, trainer)
    whole = wrapped(model, wrapping, *model.model.layers)
    trainer.accelerator = SimpleNamespace(num_processes=world, unwrap_model=lambda m: model)
    trainer.model_accepts_loss_kwargs = model.accepts_loss_kwargs
    trainer.custom_metrics = MagicMock()
    shares = 0
    for index in range(2):
        inputs = batch(rank, index) | {"compute_loss_func": trainer.compute_loss_func}
        loss, outputs = trainer.compute_loss(whole, inputs, return_outputs=True, num_items_in_batch=counted)
        assert outputs.logits is None
        loss.backward()
        shares = shares + loss.detach() / world
    assert not trainer.custom_metrics.mock_calls
    return shares, whole_gradients(model)


@pytest.mark.parametrize(("ranks", "wrapping"), [(1, "alone"), (2, "ddp"), (2, "fsdp2")])
def test_a_step_of_the_trainer_has_loss_and_gradients_of_the_whole_batch(ranks, wrapping, own_ranks):
    batches = [batch(rank, index) for rank in range(ranks) for index in range(2)]
    results = own_ranks(ranks, trained, wrapping, count(batches))
    loss, expected = one_batch(batches)
    torch.testing.assert_close(sum(share for share, _ in results), loss, rtol=1e-12, atol=0)
    for _, got in results:
        assert relative_error(got, expected) < 1e-12


def test_evaluation_keeps_the_logits_for_the_trainers_accuracy():
    model = tiny("llama").double().eval()
    trainer = trainer_of(model)
    loss_of, b = SeqparLoss(trainer.args, trainer), batch(0, 0)
    with torch.no_grad():
        outputs = model(b["input_ids"])
        loss = loss_of(outputs, b["labels"], num_items_in_batch=count([b]))
        logits = outputs.logits[:, :-1].flatten(0, 1)
        plain = F.cross_entropy(logits, b["labels"][:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)


REFUSED = [
    ({"enable_dft_loss": True}, "does not support enable_dft_loss"),
    ({"enable_channel_loss": True}, "does not support enable_channel_loss"),
    ({"of_template": {"sequence_parallel_size": 2}}, "does not support sequence_parallel_size=2"),
    ({"of_template": {"loss_scale": get_loss_scale("react")}}, "a loss_scale with weights other than 0 and 1"),
    ({"of_template": {"model": None}}, "template.model is None"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_the_trainer_computes_from_logits_itself_is_refused(options, message):
    trainer = trainer_of(tiny("llama"), **options)
    with pytest.raises(ValueError, match=message):
        SeqparLoss(trainer.args, trainer)


def test_weights_of_tokens_that_come_later_are_refused():
    trainer = trainer_of(tiny("llama"))
    with pytest.raises(ValueError, match="does not support loss_scale"):
        SeqparLoss(trainer.args, trainer)(None, None, loss_scale=torch.ones(2))
