"""The loss inside trainers like OpenNMT-py's and Eole's, with stand-ins for their `LossCompute`, batches and loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from seqpar.engine.trial import PROBE_ROWS
from seqpar.integrations.opennmt import apply_seqpar_loss
from tests.seqpar.integrations.small_seq2seq import VOCAB as WORDS
from tests.seqpar.integrations.small_seq2seq import Trunk
from tests.seqpar.integrations.tiny_models import gradients, relative_error

PAD, SOURCE, TARGET, WIDTH = 1, 5, 6, 8


class LossCompute(nn.Module):
    """What both projects do with a generator and a criterion: scores, a sum, losses of attention, counts."""

    def __init__(self, generator, criterion=None, coverage=0.0, align=0.0):
        super().__init__()
        self.generator = generator
        self.criterion = criterion or cross_entropy()
        self.coverage, self.align = coverage, align

    def ignore_prompt(self, batch):
        mask = (batch["tgt"] == PAD + 1).cumsum(1)
        return batch | {"tgt": batch["tgt"] * mask + self.criterion.ignore_index * (1 - mask)}

    def forward(self, batch, output, attns, start=0, size=None):
        end = TARGET if size is None else start + size
        target = batch["tgt"][:, start + 1 : end].flatten()
        scores = self.generator(output[:, start : end - 1].flatten(0, 1))
        loss = self.criterion(scores.to(torch.float64), target)
        if self.coverage:
            # In place, as theirs
            loss += self.coverage * torch.min(attns["std"], attns["coverage"]).sum()
        if self.align:
            loss += self.align * -attns["std"].clamp(min=1e-18).log().mean()
        kept = target.ne(self.criterion.ignore_index)
        right = scores.max(1)[1].eq(target).masked_select(kept).sum().item()
        return loss, {"loss": loss.item(), "words": kept.sum().item(), "right": right}


def cross_entropy(**options):
    return nn.CrossEntropyLoss(**{"ignore_index": PAD, "reduction": "sum", "label_smoothing": 0.1} | options)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.generator = Trunk(), nn.Linear(WIDTH, WORDS)

    def forward(self, src, tgt):
        output = self.trunk(src, tgt)
        attention = torch.softmax(output[..., :SOURCE], -1)
        return output, {"std": attention, "coverage": attention.cumsum(1)}


class Processor:
    """Like Eole's, it holds the loss that it was made with."""

    def __init__(self, model, train_loss):
        self.model, self.train_loss = model, train_loss

    def step(self, batch, zero_out_prompt_loss, windows):
        results = []
        for window in windows:
            output, attns = self.model(batch["src"], batch["tgt"])
            if zero_out_prompt_loss:
                batch = self.train_loss.ignore_prompt(batch)
            loss, statistics = self.train_loss(batch, output, attns, *window)
            loss /= 7
            loss.backward()
            results.append(statistics)
        return results


class Trainer:
    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = Model().double()
        self.train_loss = LossCompute(self.model.generator, **options)
        self.valid_loss = LossCompute(self.model.generator, **options)
        self.processor = Processor(self.model, self.train_loss)


def batch_of(seed):
    g = torch.Generator().manual_seed(seed)
    source, target = (
        torch.randint(2, WORDS, (3, SOURCE), generator=g),
        torch.randint(PAD + 2, WORDS, (3, TARGET), generator=g),
    )
    target[:, 2] = PAD + 1
    target[torch.arange(TARGET) >= torch.randint(4, TARGET + 1, (3, 1), generator=g)] = PAD
    return {"src": source, "tgt": target}


@given(
    st.integers(0, 99),
    st.sampled_from([{}, {"coverage": 0.5}, {"align": 0.5}, {"coverage": 1.0, "align": 2.0}]),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([[(0, None)], [(0, 3), (3, 3)]]),
)
def test_loss_gradient_and_statistics_are_the_trainers_own(seed, losses, chunk_tokens, zero_out_prompt_loss, windows):
    plain, chunked = Trainer(**losses), Trainer(**losses)
    apply_seqpar_loss(chunked, chunk_tokens=chunk_tokens)
    for _ in range(2):
        wanted = plain.processor.step(batch_of(seed), zero_out_prompt_loss, windows)
        got = chunked.processor.step(batch_of(seed), zero_out_prompt_loss, windows)
        for ours, theirs in zip(got, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-12)
    assert relative_error(gradients(chunked.model), gradients(plain.model)) < 1e-12
    with torch.no_grad():
        batch = batch_of(seed)
        validated = [t.valid_loss(batch, *t.model(**batch))[1] for t in (chunked, plain)]
    assert validated[0] == pytest.approx(validated[1], rel=1e-12)


def test_scores_of_all_tokens_never_exist():
    trainer = Trainer()
    seen = []
    trainer.model.generator.register_forward_hook(lambda module, args, output: seen.append(output.numel()))
    apply_seqpar_loss(trainer, chunk_tokens=2)
    trainer.processor.step(batch_of(0), False, [(0, None)])
    assert batch_of(0)["tgt"].numel() > 2 * PROBE_ROWS
    assert 0 < max(seen) <= 2 * PROBE_ROWS * WORDS


class CopyGeneratorLoss(nn.CrossEntropyLoss):
    pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"criterion": CopyGeneratorLoss()}, "computes CopyGeneratorLoss of Linear .copy attention"),
        ({"criterion": cross_entropy(weight=torch.ones(WORDS))}, "has class weights"),
        ({"criterion": cross_entropy(reduction="mean")}, "reduction='mean'"),
        ({"generator": None}, "CrossEntropyLoss of NoneType .copy attention, sparsemax or no generator"),
        ({"copy_attn": True}, "copy attention"),
        ({"lm_generator": object()}, "a language model as a prior .lm_generator"),
        ({"lm_prior_model": nn.Linear(2, 2)}, "a language model as a prior .lm_prior_model"),
    ],
)
def test_a_loss_that_needs_all_scores_is_refused_before_anything_is_changed(change, message):
    trainer = Trainer()
    for name, value in change.items():
        setattr(trainer.valid_loss, name, value)
    with pytest.raises(TypeError, match=message) as raised:
        apply_seqpar_loss(trainer)
    assert str(raised.value).endswith("train it without apply_seqpar_loss")
    assert trainer.train_loss.generator is trainer.model.generator


def test_a_second_application_and_other_questions_to_the_scores_are_refused():
    trainer = Trainer()
    apply_seqpar_loss(trainer)
    with pytest.raises(TypeError, match="computes ChunkedCriterion of HiddenStates"):
        apply_seqpar_loss(trainer)
    with pytest.raises(TypeError, match=r"reads \.log_softmax of the scores"):
        trainer.train_loss.generator(torch.ones(1, WIDTH)).log_softmax(-1)


def test_a_trainer_that_trains_with_another_loss_is_told_so():
    trainer = Trainer()
    trainer.processor.train_loss = LossCompute(trainer.model.generator)
    apply_seqpar_loss(trainer)
    batch = batch_of(0)
    with torch.no_grad():
        for _ in range(3):
            trainer.model(**batch)
    trainer.processor.step(batch, False, [(0, None)])
    with pytest.raises(
        RuntimeError, match="Trainer has run its model twice without calling its train_loss, a LossCompute"
    ):
        trainer.processor.step(batch, False, [(0, None)])


def test_a_trainer_that_calls_it_is_not_watched_any_longer():
    trainer = Trainer()
    apply_seqpar_loss(trainer)
    for _ in range(2):
        trainer.processor.step(batch_of(0), False, [(0, None)])
    assert not trainer.model._forward_hooks
