"""NeMo AutoModel's own functions around a loss, with this one: value and gradients are those of one batch."""

import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from nemo_automodel.components.loss.loss import build_loss_config
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.loss.utils import calculate_loss, prepare_lm_weight
from torch import nn
from transformers import Gemma2Config, GraniteConfig, LlamaConfig

from seqpar.integrations import say_once
from seqpar.integrations.nemo_automodel import SeqparCrossEntropy
from tests.seqpar.integrations.small_seq2seq import whole_gradients, wrapped
from tests.seqpar.integrations.tiny_models import relative_error

pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB, WIDTH = 23, 8
SETTINGS = {"label_smoothing": 0.1, "chunk_tokens": 4}


class Decoder(nn.Module):
    """Tokens to hidden states, as a recipe asks for them, and the last token's logits."""

    def __init__(self, bias=False, config=None):
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=bias)
        self.config = config or LlamaConfig()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, tokens, logits_to_keep=0):
        hidden = torch.tanh(self.embedding(tokens))
        return hidden, self.lm_head(hidden[:, -logits_to_keep:])


def decoder(**options):
    torch.manual_seed(0)
    return Decoder(**options).double()


def batch(rank, index):
    g = torch.Generator().manual_seed(10 * rank + index)
    tokens, labels = torch.randint(VOCAB, (2, 2, 7), generator=g)
    labels[: 1 + rank, 2 + index :] = -100
    return tokens, labels, 1 + torch.arange(14).view(2, 7) / 1000


def one_batch(ranks, weighted):
    model = decoder()
    total, counted = 0, 0
    for tokens, labels, weights in (batch(rank, index) for rank in range(ranks) for index in range(2)):
        logits = model(tokens)[1].flatten(0, 1)
        losses = F.cross_entropy(logits, labels.flatten(), label_smoothing=0.1, reduction="none")
        total = total + (losses * (weights.flatten() if weighted else 1)).sum()
        counted += (labels != -100).sum()
    (total / counted).backward()
    return (total / counted).detach(), whole_gradients(model), int(counted)


def trained(rank, world, wrapping, weighted, count):
    """Forward and backward of the recipe's step, with two micro-batches."""
    model = decoder()
    units = [model.lm_head] if wrapping == "fsdp2, head" else []
    whole = wrapped(model, wrapping, *units, reshard_after_forward=True)
    loss_fn = build_loss_config(SeqparCrossEntropy, **SETTINGS).build()
    group = None if wrapping == "alone" else dist.group.WORLD
    shares = 0
    for tokens, labels, weights in (batch(rank, index) for index in range(2)):
        hidden, logits = whole(tokens, logits_to_keep=1)
        options = {"loss_weights": weights} if weighted else {}
        weight = prepare_lm_weight(loss_fn, whole, grad_reduce_group=group)
        loss = calculate_loss(
            loss_fn,
            logits=logits,
            labels=labels,
            model=whole,
            hidden_states=hidden,
            lm_weight=weight,
            num_label_tokens=count,
            grad_reduce_group=group,
            **options,
        )
        (loss * world).backward()
        shares = shares + loss.detach()
    return shares, whole_gradients(model)


def check(results, ranks, weighted):
    loss, expected, _ = one_batch(ranks, weighted)
    torch.testing.assert_close(sum(share for share, _ in results), loss, rtol=1e-12, atol=0)
    for _, got in results:
        assert relative_error(got, expected) < 1e-12


@pytest.mark.parametrize("weighted", [False, True])
def test_a_step_has_loss_and_gradients_of_the_whole_batch(weighted):
    check([trained(0, 1, "alone", weighted, one_batch(1, weighted)[2])], 1, weighted)


@pytest.mark.parametrize(("wrapping", "weighted"), [("ddp", True), ("fsdp2", False), ("fsdp2, head", True)])
def test_a_step_on_two_ranks_has_loss_and_gradients_of_the_whole_batch(wrapping, weighted, own_ranks):
    check(own_ranks(2, trained, wrapping, weighted, one_batch(2, weighted)[2]), 2, weighted)


def test_a_batch_without_labels_has_loss_0_and_no_count_leaves_the_sum():
    hidden, weight = torch.randn(6, WIDTH, requires_grad=True), torch.randn(VOCAB, WIDTH)
    loss_fn = SeqparCrossEntropy()
    assert loss_fn(hidden, torch.full((6,), -100), weight, num_label_tokens=0).item() == 0
    labels = torch.arange(6)
    torch.testing.assert_close(
        loss_fn(hidden, labels, weight), F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    )


REFUSED = {
    "a bias": ({"bias": True}, "requires a plain bias-free nn.Linear"),
    "a soft cap": ({"config": Gemma2Config(final_logit_softcapping=30.0)}, "final_logit_softcapping is 30.0"),
    "a factor": ({"config": GraniteConfig(logits_scaling=8.0)}, "logits_scaling is 8.0, and the loss is given only"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_head_that_does_more_than_multiply_is_refused(name):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        prepare_lm_weight(SeqparCrossEntropy(), decoder(**options))


def test_a_factor_of_one_is_not_refused():
    prepare_lm_weight(SeqparCrossEntropy(), decoder(config=GraniteConfig(logits_scaling=1.0)))


def test_the_recipe_refuses_a_pipeline_where_it_would_replace_another_loss_of_hidden_states():
    train_ft = pytest.importorskip("nemo_automodel.recipes.llm.train_ft", exc_type=ImportError)
    with pytest.raises(ValueError, match="requires pipeline stages that can return hidden states"):
        train_ft._maybe_downgrade_loss_fn(SeqparCrossEntropy(), decoder(), pp_enabled=True)
    other = train_ft.LinearCrossEntropy()
    assert isinstance(train_ft._maybe_downgrade_loss_fn(other, decoder(), pp_enabled=True), MaskedCrossEntropy)


def test_the_log_says_once_that_the_loss_is_ours(caplog, monkeypatch):
    monkeypatch.setattr(say_once, "_said", set())
    caplog.set_level(logging.INFO)
    for _ in range(2):
        SeqparCrossEntropy(chunk_tokens=512)(
            torch.randn(6, WIDTH), torch.arange(6), nn.Parameter(torch.randn(VOCAB, WIDTH))
        )
    said = [record.message for record in caplog.records if "seqpar" in record.message]
    assert said == ["seqpar computes the loss in NeMo AutoModel: 3 products, at most 512 tokens a chunk"]
