"""What Eole's and OpenNMT-py's own trainers are given: batches, an optimizer that keeps the gradients, and losses."""

import pytest
import torch
from torch import nn

from seqpar.integrations.opennmt import apply_seqpar_loss
from tests.seqpar.integrations.small_seq2seq import VOCAB
from tests.seqpar.integrations.tiny_models import gradients, relative_error

PAD = 1


class Optimizer:
    """One that leaves the model as it is, so that its gradients can be read."""

    training_step, amp = 1, False

    def zero_grad(self, set_to_none=True):
        pass

    def backward(self, loss):
        loss.backward()

    def step(self):
        pass


def batch_of(seed):
    g = torch.Generator().manual_seed(seed)
    source, target = torch.randint(2, VOCAB, (2, 3, 5), generator=g)
    target[1, 3:] = PAD
    source[:, 1] = PAD
    align = torch.tensor([[0, 1, 2], [1, 2, 1], [2, 0, 3]])
    return {"src": source, "tgt": target, "srclen": torch.tensor([5, 5, 5]), "align": align}


def summed_criterion():
    return nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum", label_smoothing=0.1)


def numbers_and_gradients(trainer, accumulate, statistics, batches):
    """Let the trainer accumulate the gradients of two batches of 11 tokens."""
    report = statistics()
    trainer.model.zero_grad()
    accumulate(batches, 11, statistics(), report)
    numbers = {k: v for k, v in vars(report).items() if isinstance(v, int | float) and "time" not in k}
    return numbers, gradients(trainer.model)


def assert_trains_alike(plain, chunked, trained):
    """Hold two trainings of the chunked trainer, once seqpar is applied to it, against one of the plain trainer."""
    apply_seqpar_loss(chunked, chunk_tokens=4)
    wanted, expected = trained(plain)
    for _ in range(2):
        statistics, found = trained(chunked)
        assert statistics == pytest.approx(wanted, rel=1e-6)
        assert relative_error(found, expected) < 1e-5


def assert_validates_alike(plain, chunked, batch):
    with torch.no_grad():
        got, own = (t.valid_loss(batch, *t.model(batch["src"], batch["tgt"], None))[1] for t in (chunked, plain))
    own.loss = pytest.approx(own.loss, rel=1e-6)
    assert vars(got).items() >= {k: v for k, v in vars(own).items() if "time" not in k}.items()
