"""Eole's own trainer and `LossCompute` train alike with the loss in chunks and without."""

import warnings

import pytest
import torch
from torch import nn

from seqpar.integrations.opennmt import apply_seqpar_loss
from tests.seqpar.integrations.small_seq2seq import VOCAB, WIDTH, Trunk
from tests.seqpar.integrations.tiny_models import gradients, relative_error

with warnings.catch_warnings(action="ignore"):
    from eole.modules.sparse_losses import SparsemaxLoss
    from eole.trainer import Trainer, TrainerConfig
    from eole.utils import Statistics
    from eole.utils.loss import LossCompute

pytestmark = pytest.mark.filterwarnings("ignore")

PAD = 1
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


class Optimizer:
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
    return {
        "src": source,
        "tgt": target,
        "srclen": torch.tensor([5, 5, 5]),
        "align": align,
        "images": None,
        "prefix_len": None,
        "cid": ["a", "b", "a"],
        "cid_line_number": [1, 2, 3],
    }


def trainer_of(losses, zero_out_prompt_loss=False):
    torch.manual_seed(0)
    model = Model()
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum", label_smoothing=0.1)
    computes = [LossCompute(criterion, model.generator, vocabs=VOCABS, **losses) for _ in range(2)]
    config = TrainerConfig(n_gpu=0, gpu_rank=-1, zero_out_prompt_loss=zero_out_prompt_loss)
    return Trainer(model, *computes, None, {}, Optimizer(), config)


def trained(trainer):
    report = Statistics()
    trainer.model.zero_grad()
    trainer._train_step([batch_of(0), batch_of(1)], 11, Statistics(), report)
    numbers = {k: v for k, v in vars(report).items() if isinstance(v, int | float) and "time" not in k}
    return numbers, gradients(trainer.model)


@pytest.mark.parametrize("zero_out_prompt_loss", [False, True])
@pytest.mark.parametrize("losses", AUXILIARY.values(), ids=AUXILIARY)
def test_statistics_and_gradients_are_those_of_the_trainer_without_chunks(losses, zero_out_prompt_loss):
    plain, chunked = trainer_of(losses, zero_out_prompt_loss), trainer_of(losses, zero_out_prompt_loss)
    apply_seqpar_loss(chunked, chunk_tokens=4)
    wanted, expected = trained(plain)
    for _ in range(2):
        statistics, found = trained(chunked)
        assert statistics == pytest.approx(wanted, rel=1e-6)
        assert relative_error(found, expected) < 1e-5
    assert chunked.batch_processor.train_loss.criterion.called
    with torch.no_grad():
        batch = batch_of(2)
        got, own = (t.valid_loss(batch, *t.model(batch["src"], batch["tgt"], None))[1] for t in (chunked, plain))
    assert (got.loss, got.n_correct, got.n_tokens) == (pytest.approx(own.loss, rel=1e-6), own.n_correct, own.n_tokens)


def test_sparsemax_is_refused():
    trainer = trainer_of({})
    trainer.train_loss.criterion = SparsemaxLoss(ignore_index=PAD, reduction="sum")
    with pytest.raises(TypeError, match="computes SparsemaxLoss of Linear"):
        apply_seqpar_loss(trainer)
