"""OpenNMT-py's own trainer and `LossCompute` train alike with the loss in chunks and without."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from seqpar.integrations.opennmt import apply_seqpar_loss
from tests.seqpar.integrations.opennmt_trainers import (
    PAD,
    Optimizer,
    assert_trains_alike,
    assert_validates_alike,
    batch_of,
    numbers_and_gradients,
    summed_criterion,
)
from tests.seqpar.integrations.small_seq2seq import VOCAB, WIDTH, Trunk

with warnings.catch_warnings(action="ignore"):
    from onmt.modules import CopyGenerator, CopyGeneratorLoss
    from onmt.trainer import Trainer
    from onmt.utils import Statistics
    from onmt.utils.loss import LossCompute

pytestmark = pytest.mark.filterwarnings("ignore")

AUXILIARY = {"none": {}, "coverage": {"lambda_coverage": 1.0}, "align": {"lambda_align": 2.0}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.generator = Trunk(), nn.Linear(WIDTH, VOCAB)
        self.decoder = SimpleNamespace(state={})

    def forward(self, src, tgt, src_len, bptt=False, with_align=False):
        output = self.trunk(src[..., 0].clone(), tgt[..., 0].clone())[:, :-1]
        attention = torch.softmax(output[..., : src.size(1)], -1)
        return output, {"std": attention, "coverage": attention.cumsum(1), "align": attention}


def narrow_batch_of(seed):
    """Return a batch with one feature to each position."""
    batch = batch_of(seed)
    return batch | {"src": batch["src"][..., None], "tgt": batch["tgt"][..., None]}


def trainer_of(losses, zero_out_prompt_loss=False):
    torch.manual_seed(0)
    model = Model()
    computes = [LossCompute(summed_criterion(), model.generator, **losses) for _ in range(2)]
    return Trainer(
        model, *computes, None, {}, Optimizer(), n_gpu=0, gpu_rank=-1, zero_out_prompt_loss=zero_out_prompt_loss
    )


def trained(trainer):
    batches = [narrow_batch_of(0), narrow_batch_of(1)]
    return numbers_and_gradients(trainer, trainer._gradient_accumulation, Statistics, batches)


@pytest.mark.parametrize("zero_out_prompt_loss", [False, True])
@pytest.mark.parametrize("losses", AUXILIARY.values(), ids=AUXILIARY)
def test_statistics_and_gradients_are_those_of_the_trainer_without_chunks(losses, zero_out_prompt_loss):
    plain, chunked = trainer_of(losses, zero_out_prompt_loss), trainer_of(losses, zero_out_prompt_loss)
    assert_trains_alike(plain, chunked, trained)
    assert_validates_alike(plain, chunked, narrow_batch_of(2))


def test_copy_attention_is_refused():
    trainer = trainer_of({})
    trainer.train_loss.copy_attn = True
    trainer.train_loss.criterion = CopyGeneratorLoss(VOCAB, False, ignore_index=PAD)
    trainer.train_loss.generator = CopyGenerator(WIDTH, VOCAB, PAD)
    with pytest.raises(TypeError, match=r"computes CopyGeneratorLoss of CopyGenerator .copy attention"):
        apply_seqpar_loss(trainer)
