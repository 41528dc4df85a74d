"""Eole's own trainer and `LossCompute` train alike with the loss in chunks and without."""

import warnings

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
    from eole.modules.sparse_losses import SparsemaxLoss
    from eole.trainer import Trainer, TrainerConfig
    from eole.utils import Statistics
    from eole.utils.loss import LossCompute

pytestmark = pytest.mark.filterwarnings("ignore")

VOCABS = {"specials": {}, "tgt": {}}
AUXILIARY = {
    "none": {},
    "coverage": {"lambda_coverage": 1.0},
    "heads": {"mtp_lambda": 0.5},
    "align": {"lambda_align": 2.0},
}


class Outputs(tuple):
    mtp_outputs = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.generator = Trunk(), nn.Linear(WIDTH, VOCAB)

    def forward(self, src, tgt, src_len, with_align=False, **ignored):
        output = self.trunk(src.clone(), tgt.clone())[:, :-1].contiguous()
        attention = torch.softmax(output[..., : src.size(1)], -1)
        outputs = Outputs((output, {"std": attention, "coverage": attention.cumsum(1), "align": attention}, None))
        outputs.mtp_outputs = [output[:, :-1].contiguous(), output[:, :-2].contiguous()]
        return outputs


def full_batch_of(seed):
    about = {"images": None, "prefix_len": None, "cid": ["a", "b", "a"], "cid_line_number": [1, 2, 3]}
    return batch_of(seed) | about


def trainer_of(losses, zero_out_prompt_loss=False):
    torch.manual_seed(0)
    model = Model()
    computes = [LossCompute(summed_criterion(), model.generator, vocabs=VOCABS, **losses) for _ in range(2)]
    config = TrainerConfig(n_gpu=0, gpu_rank=-1, zero_out_prompt_loss=zero_out_prompt_loss)
    return Trainer(model, *computes, None, {}, Optimizer(), config)


def trained(trainer):
    return numbers_and_gradients(trainer, trainer._train_step, Statistics, [full_batch_of(0), full_batch_of(1)])


@pytest.mark.parametrize("zero_out_prompt_loss", [False, True])
@pytest.mark.parametrize("losses", AUXILIARY.values(), ids=AUXILIARY)
def test_statistics_and_gradients_are_those_of_the_trainer_without_chunks(losses, zero_out_prompt_loss):
    plain, chunked = trainer_of(losses, zero_out_prompt_loss), trainer_of(losses, zero_out_prompt_loss)
    assert_trains_alike(plain, chunked, trained)
    assert chunked.batch_processor.train_loss.criterion.called
    assert_validates_alike(plain, chunked, full_batch_of(2))


def test_sparsemax_is_refused():
    trainer = trainer_of({})
    trainer.train_loss.criterion = SparsemaxLoss(ignore_index=PAD, reduction="sum")
    with pytest.raises(TypeError, match="computes SparsemaxLoss of Linear"):
        apply_seqpar_loss(trainer)
