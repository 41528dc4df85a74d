"""Objectives: distillation is its equation in plain PyTorch, over devices and ranks, and all keep to their chunks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import seqpar
from models import EncoderDecoder
from recipes.translation.data.corpus import load_corpus
from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.processes.ranks import ALONE, join_ranks
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.run_folder.other_model import load_teacher
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.run_folder.translator import build_model, model_sizes
from recipes.translation.settings.config import RunConfig
from recipes.translation.settings.training import TrainingConfig
from recipes.translation.text.subwords import PAD
from recipes.translation.train import dropout_seed, train
from recipes.translation.training.beginning import first_model
from recipes.translation.training.layout import Layout
from recipes.translation.training.objective import DistillationLoss, Objective, Teacher, WithTeacher
from recipes.translation.training.parts import local_of, open_model
from seqpar.testing.ranks import ranks
from tests.models.examples import EOS, random_batch, small_transformer
from tests.recipes.plain_scores import plain_logits, plain_sums
from tests.recipes.processes.layouts import LAYOUTS, assert_same_weights, trained
from tests.recipes.saved import assert_same_last
from tests.recipes.tiny import tiny

BASE: dict[str, Any] = {"data.builtin_pairs": 120, "training.batch_tokens": 300, "training.steps": 2}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a larger model, with so much dropout that a pass with it would be another."""
    run = tmp_path_factory.mktemp("teacher") / "run"
    larger = {"model.d_model": 24, "model.decoder_layers": 2, "model.dropout": 0.5, "training.learning_rate": 0.05}
    train(tiny(run, {**BASE, **larger}))
    return run


def plain(
    student: Tensor, teacher: Tensor, target: Tensor, weight: float, temperature: float, smoothing: float
) -> Tensor:
    """The loss of whole logits (N, V), summed over the tokens, term by term."""
    kept = target != PAD
    student, teacher, target = student[kept], teacher[kept].detach(), target[kept]
    usual = F.cross_entropy(student, target, reduction="sum", label_smoothing=smoothing)
    log_q = (teacher / temperature).log_softmax(-1)
    log_p = (student / temperature).log_softmax(-1)
    return (1 - weight) * usual + weight * temperature**2 * (log_q.exp() * (log_q - log_p)).sum()


class Head(nn.Module):
    """A teacher of which only the projection matters."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.generator = nn.Linear(width, vocab).double()


@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(2, 9),
    st.sampled_from([0.1, 0.9, 1.0]),
    st.sampled_from([0.5, 1.0, 4.0]),
    st.sampled_from([0.0, 0.1]),
    st.integers(1, 20),
    st.integers(0, 3),
    st.integers(0, 2**16),
)
def test_value_and_every_gradient_are_those_of_plain_pytorch(
    sentences: int,
    time: int,
    vocab: int,
    weight: float,
    temperature: float,
    smoothing: float,
    chunk: int,
    devices: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    generator = nn.Linear(3, vocab).double()
    head = Head(4, vocab)
    hidden = torch.randn(sentences, time, 3, dtype=torch.float64, requires_grad=True)
    states = torch.randn(sentences, time, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, vocab, (sentences, time))  # 0 is padding
    expected = plain(
        generator(hidden).flatten(0, 1),
        head.generator(states).flatten(0, 1),
        target.flatten(),
        weight,
        temperature,
        smoothing,
    )
    leaves = [hidden, *generator.parameters()]
    grads = torch.autograd.grad(expected, leaves)
    cpus = [torch.device("cpu")] * devices  # without any, hidden states are one tensor
    criterion = seqpar.LabelSmoothing(smoothing, "torch", ignore_index=PAD)
    usual = seqpar.LossCompute(generator, criterion, cpus or None, chunk)
    beside = Teacher(head, cpus or [torch.device("cpu")])  # type: ignore[arg-type]
    engine = DistillationLoss(usual, beside, weight=weight, temperature=temperature)
    if devices:
        shards = seqpar.scatter((hidden, states), cpus)
        found = engine([shard[0] for shard in shards], target, teacher=[shard[1] for shard in shards])
    else:
        found = engine(hidden, target, teacher=states)
    assert int(found.tokens) == int((target != PAD).sum())
    torch.testing.assert_close(found.total, expected, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(torch.autograd.grad(found.total, leaves, retain_graph=True), grads, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-12 * max(1.0, float(theirs.abs().max()))
    assert not any(parameter.requires_grad for parameter in head.parameters())


def distilled(teacher: Path, **changes: Any) -> dict[str, Any]:
    """A student of another width, over the teacher's data."""
    settings = {"teacher": str(teacher), "teacher_weight": 0.7, "teacher_temperature": 2.0, "chunk_tokens": 40}
    return {**BASE, **{f"training.{name}": value for name, value in settings.items()}, **changes}


def test_a_step_follows_the_gradient_of_the_teacher_without_and_the_student_with_dropout(
    teacher: Path, tmp_path: Path
) -> None:
    changes = {"training.steps": 1, "training.clip": 0, "model.dropout": 0.3, "training.precision": "float64"}
    config = tiny(tmp_path / "run", {**distilled(teacher), **changes})
    train(config)
    corpus = load_corpus(config, subwords_of=lambda _: (load_translator(teacher / "best").source,) * 2)
    torch.manual_seed(config.training.seed)
    model = build_model(model_sizes(config.model), corpus.source, corpus.target).double()
    theirs = load_translator(teacher / "best").model.double()
    batch = corpus.train.batch(corpus.train.epoch(0)[0])
    torch.manual_seed(dropout_seed(config.training.seed, 0, 0))
    logits, wanted = plain_logits(model, batch), plain_logits(theirs, batch)
    loss = plain(logits, wanted, batch.tgt_out.flatten(), 0.7, 2.0, 0.1) / batch.tokens
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert records[0]["loss"] == pytest.approx(loss.item(), rel=1e-10)
    assert records[0]["gradient_norm"] == pytest.approx(norm.item(), rel=1e-10)
    # Validation has the usual loss, with the references
    made = load_translator(tmp_path / "run" / "best").model
    usual, _, _, tokens = plain_sums(made, corpus.valid[0].batches)
    assert records[1]["valid_loss"] == pytest.approx(usual / tokens, rel=1e-5)


def test_the_teacher_is_no_part_of_the_model_in_training(teacher: Path, tmp_path: Path) -> None:
    """It has no gradient, no dropout and no weight among the student's, and does not move a random number."""
    config = tiny(tmp_path / "run", distilled(teacher))
    corpus = load_corpus(config, subwords_of=lambda _: (load_translator(teacher / "best").source,) * 2)
    torch.manual_seed(5)
    drawn = torch.get_rng_state()
    beside = open_model(lambda: load_teacher(config.training.teacher, False, corpus.source, corpus.target), ALONE)
    assert torch.equal(torch.get_rng_state(), drawn)
    model, weights = first_model(config, corpus, None, ALONE)
    layout = Layout(model, weights, config.training, config.layout, [torch.device("cpu")] * 2, ALONE, beside)
    before = {name: tensor.clone() for name, tensor in beside.model.state_dict().items()}
    own = {id(parameter) for parameter in layout.model.parameters()}
    both = WithTeacher(layout.model, Teacher(beside.model, layout.devices))
    assert {id(parameter) for parameter in both.parameters()} == own
    model.train()
    loss = layout.loss_of(corpus.train.batch(corpus.train.epoch(0)[0]))
    (loss.total / loss.tokens).backward()
    assert not any(module.training for module in beside.model.modules())
    for name, parameter in beside.model.named_parameters():
        assert id(parameter) not in own
        assert not parameter.requires_grad
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


def test_in_bfloat16_the_loss_is_that_of_float32_up_to_rounding(teacher: Path, tmp_path: Path) -> None:
    for precision in ("bf16", "float32"):
        changes = {"training.precision": precision, "training.steps": 1, "model.dropout": 0}
        train(tiny(tmp_path / precision, {**distilled(teacher), **changes}))
    one, other = (read_metrics(tmp_path / name / "metrics.jsonl")[0] for name in ("bf16", "float32"))
    assert one["loss"] == pytest.approx(other["loss"], rel=0.01)
    assert one["loss"] != other["loss"]


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit_though_its_teacher_was_moved(
    teacher: Path, tmp_path: Path
) -> None:
    changes = {"model.dropout": 0.2, "training.accumulate": 3, "training.devices": "[cpu, cpu]"}
    train(tiny(tmp_path / "through", {**distilled(teacher), **changes, "training.steps": 3}))
    train(tiny(tmp_path / "resumed", {**distilled(teacher), **changes, "training.steps": 1}))
    moved = shutil.copytree(teacher, tmp_path / "moved")
    train(tiny(tmp_path / "resumed", {**distilled(moved), **changes, "training.steps": 3}))
    assert_same_last(tmp_path / "through", tmp_path / "resumed", "joint.model")


def test_a_resumed_run_refuses_another_teacher_or_none(teacher: Path, tmp_path: Path) -> None:
    changes = {**distilled(teacher), "training.steps": 1}
    train(tiny(tmp_path / "run", changes))
    train(tiny(tmp_path / "other", {**BASE, "training.steps": 1, "training.seed": 2}))
    other = {"training.teacher": str(tmp_path / "other" / "last")}
    with pytest.raises(ConfigError, match=r"^training\.teacher is .*last, but .*run learned from another model"):
        train(tiny(tmp_path / "run", {**changes, **other, "training.steps": 2}))
    with pytest.raises(ConfigError, match=r"^training\.teacher_weight is 0\.0 but .* was trained with 0\.7"):
        train(tiny(tmp_path / "run", {**changes, "training.teacher_weight": 0.0}))
    without = {name: value for name, value in changes.items() if "teacher" not in name}
    train(tiny(tmp_path / "without", without))
    weight = {"training.teacher": str(teacher)}
    with pytest.raises(ConfigError, match=r"^training\.teacher is .*, but .*without learned from no teacher"):
        train(tiny(tmp_path / "without", {**without, **weight, "training.steps": 2}))


def test_a_teacher_that_does_not_fit_is_refused_in_one_line(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^subwords\.kind is 'bpe', but the teacher .*best has 'unigram'"):
        train(tiny(tmp_path / "kind", distilled(teacher, **{"subwords.kind": "bpe"})))
    with pytest.raises(CheckpointError, match=r"^training\.teacher is nowhere, but there is no trained model in nowhe"):
        train(tiny(tmp_path / "none", distilled(Path("nowhere"))))
    train(tiny(tmp_path / "start", {**BASE, "data.builtin_pairs": 150, "training.steps": 1}))
    with pytest.raises(ConfigError, match=r"^the source subwords of training\.teacher .*best differ from this run"):
        train(tiny(tmp_path / "both", distilled(teacher, **{"training.start_from": str(tmp_path / "start")})))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training.teacher_weight": 1.5}, r"^training\.teacher_weight is 1\.5: it is the share"),
        ({"training.teacher": ""}, r"^training\.teacher_weight is 0\.7, but training\.teacher names no model"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_in_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(tmp_path, distilled(Path("a"), **changes))


EXACT: dict[str, Any] = {
    "training.precision": "float64",
    "training.accumulate": 2,
    "training.steps": 3,
    "model.dropout": 0,
}


def test_the_devices_of_one_process_give_the_weights_of_one_device(teacher: Path, tmp_path: Path) -> None:
    changes = {**distilled(teacher), **EXACT, "training.steps": 2}
    trained(0, 1, tiny(tmp_path / "one", {**changes, "training.devices": "[cpu]"}))
    trained(0, 1, tiny(tmp_path / "three", {**changes, "training.devices": "[cpu, cpu, cpu]"}))
    assert_same_weights(tmp_path / "three", tmp_path / "one", 1e-10)


OF_WEIGHT = {
    0.7: ["data 2", "shard 2", "vocab 2", "data 2 x vocab 2", "shard 2 x vocab 2"],
    1.0: ["shard 2", "data 2 x vocab 2"],  # without the usual loss
}


@pytest.mark.launched
@pytest.mark.parametrize("weight", OF_WEIGHT)
def test_every_layout_gives_the_weights_of_one_device(weight: float, teacher: Path, tmp_path: Path) -> None:
    changes = {**distilled(teacher), **EXACT, "training.teacher_weight": weight}
    trained(0, 1, tiny(tmp_path / "one", {**changes, "training.devices": "[cpu]"}))
    for layout in OF_WEIGHT[weight]:
        world, sizes = LAYOUTS[layout]
        ranks(world, trained, tiny(tmp_path / layout, {**changes, **sizes, "training.devices": "auto"}))
        assert_same_weights(tmp_path / layout, tmp_path / "one", 1e-10)


def held(rank: int, world: int, config: RunConfig, teacher: Path) -> tuple[int, int]:
    """How many of the teacher's numbers are in this rank's memory after a step, and how many it has."""
    with join_ranks(30) as every:
        subwords = load_translator(teacher / "best").source
        corpus = load_corpus(config, every, subwords_of=lambda _: (subwords, subwords))
        beside = open_model(lambda: load_teacher(config.training.teacher, False, subwords, subwords), every)
        model, weights = first_model(config, corpus, None, every)
        layout = Layout(model, weights, config.training, config.layout, [torch.device("cpu")], every, beside)
        loss = layout.loss_of(corpus.train.batch(corpus.train.epoch(0)[0]))
        (loss.total / loss.tokens).backward()
        own = [local_of(weight).numel() for weight in beside.model.parameters()]
        return sum(own), sum(weight.numel() for weight in beside.model.parameters())


@pytest.mark.launched
def test_the_teacher_is_sharded_as_the_student_is(teacher: Path, tmp_path: Path) -> None:
    for layout in ("shard 2", "shard 2 x vocab 2"):
        world, sizes = LAYOUTS[layout]
        changes = {**distilled(teacher), **sizes, "training.devices": "auto"}
        for own, whole in ranks(world, held, tiny(tmp_path / "run", changes), teacher):
            assert own == pytest.approx(whole / 2, rel=0.02)


def test_a_teacher_with_fewer_learned_positions_than_the_training_sentences_is_refused(tmp_path: Path) -> None:
    positions = {"model.preset": "mbart", "model.max_positions": 100, "training.max_length": 90, "training.steps": 1}
    train(tiny(tmp_path / "teacher", positions))
    taught = {"training.teacher": str(tmp_path / "teacher"), "training.teacher_weight": 0.5, "training.steps": 1}
    with pytest.raises(ConfigError, match=r"^training\.max_length is 150, but the model has learned positions for 99"):
        train(tiny(tmp_path / "run", {**taught, "training.max_length": 150}))
    train(tiny(tmp_path / "run", {**taught, "training.max_length": 90}))


CHUNK, VOCAB = 9, 41
SETTINGS = TrainingConfig(chunk_tokens=CHUNK, teacher_weight=0.5)


def objective_of(kind: str, settings: TrainingConfig) -> Objective:
    """The objective, with what else it needs."""
    if kind == "teacher":
        return Objective(settings, Teacher(small_transformer(9, VOCAB, d_model=2, heads=2), [torch.device("cpu")]))
    return Objective(settings)


class Largest(TorchFunctionMode):
    """Note the most rows of a tensor as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() > 1 and result.size(-1) == VOCAB:
            self.rows = max(self.rows, result.numel() // result.size(-1))
        return result


def rows_at_once(kind: str, model: EncoderDecoder, settings: TrainingConfig) -> int:
    """The most tokens whose logits exist at once in the loss of a batch and its gradient."""
    torch.manual_seed(0)
    src, tgt = random_batch(1), random_batch(2)
    one = objective_of(kind, settings)
    found = one.passes(model)(src, tgt)
    hidden, more = found if isinstance(found, tuple) else (found, {})
    target = tgt.roll(-1, 1).where(tgt != EOS, EOS)
    loss = one.loss(model, None, None)
    # The first call asks the pair about rows of its own
    loss(hidden.detach().requires_grad_(), target, **more)
    with Largest() as largest:
        loss(hidden, target, **more).total.backward()
    return largest.rows


@pytest.mark.parametrize("kind", ["usual", "teacher"])
def test_no_objective_has_more_logits_at_once_than_it_is_told(kind: str) -> None:
    model = small_transformer(
        1, VOCAB, d_model=2, heads=2, dropout=0.1
    )  # narrower than a chunk: its weights are no logits
    # One more, of a buffer that is not filled
    assert rows_at_once(kind, model, SETTINGS) <= CHUNK + 1
    assert rows_at_once(kind, model, replace(SETTINGS, chunk_tokens=None)) > CHUNK + 1
