"""xtuner's own output head and contexts around the loss: value and gradients are those of one batch."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seqpar.integrations.small_seq2seq import whole_gradients, wrapped
from tests.seqpar.integrations.tiny_models import assert_alike

with warnings.catch_warnings(action="ignore"):
    from xtuner.v1.module.lm_head import LMHead

    from seqpar.integrations.xtuner import SeqparCrossEntropyConfig

pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB, WIDTH = 23, 8
LENGTHS = [3, 4]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(VOCAB, WIDTH), LMHead(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, loss_context=None):
        return self.lm_head(torch.tanh(self.embedding(tokens)), loss_context)


def decoder():
    torch.manual_seed(0)
    return Decoder().double()


def batch(rank, index):
    """Two packed sequences."""
    g = torch.Generator().manual_seed(10 * rank + index)
    tokens, labels = torch.randint(VOCAB, (2, 1, sum(LENGTHS)), generator=g)
    labels[0, 5 - rank - index : 6] = -100
    return tokens, labels


def one_batch(ranks, reduction):
    model, total, weights = decoder(), 0, 0
    for tokens, labels in (batch(rank, index) for rank in range(ranks) for index in range(2)):
        logits = torch.tanh(model.embedding(tokens)) @ model.lm_head.weight.T
        losses = F.cross_entropy(logits[0], labels[0], label_smoothing=0.1, reduction="none")
        for part, kept in zip(losses.split(LENGTHS), (labels[0] != -100).split(LENGTHS), strict=True):
            weight = {"token": 1.0, "sample": 1 / kept.sum(), "square": kept.sum() ** -0.5}[reduction]
            total = total + weight * part.sum()
            weights += weight * kept.sum()
    (total / weights).backward()
    return (total / weights).detach(), whole_gradients(model)


def trained(rank, world, wrapping, reduction):
    """Two micro-batches: contexts of all, then a forward and a backward of each."""
    model = decoder()
    whole = wrapped(model, wrapping, model.lm_head)
    config = SeqparCrossEntropyConfig(label_smoothing=0.1, chunk_tokens=3, loss_reduction=reduction)
    batches = [batch(rank, index) for index in range(2)]
    contexts = [config.build({"shifted_labels": labels}) for _, labels in batches]
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    contexts = config.loss_ctx_cls.build_batches(contexts, cu_seq_lens_list=[bounds, bounds])
    total = 0
    for (tokens, _), context in zip(batches, contexts, strict=True):
        loss, (logits, _) = whole(tokens, context)
        assert logits is None
        loss.backward()
        total = total + loss.detach()
    return total, whole_gradients(model)


@pytest.mark.parametrize("reduction", ["token", "sample", "square"])
@pytest.mark.parametrize("wrapping", ["ddp", "fsdp2"])
def test_a_step_on_two_ranks_has_loss_and_gradients_of_the_whole_batch(wrapping, reduction, own_ranks):
    """The weights of tokens are xtuner's, in float32."""
    for got in own_ranks(2, trained, wrapping, reduction):
        assert_alike(got, one_batch(2, reduction), 3e-7)


def test_a_mode_in_which_xtuner_cuts_the_loss_itself_is_refused():
    with pytest.raises(ValueError, match="mode is 'chunk', xtuner's own way to cut the loss"):
        SeqparCrossEntropyConfig(mode="chunk")
