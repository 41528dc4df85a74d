"""Minimum-risk training: the risk, its gradient, and its estimate from samples, in plain PyTorch and by enumeration."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from torch import Tensor, nn

import seqpar
from models import default_limit
from recipes.translation.data.corpus import load_corpus
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.run_folder.start import run_subwords
from recipes.translation.scores.statistics import sentence_bleu
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.subwords import BOS, EOS, PAD
from recipes.translation.train import dropout_seed, train
from recipes.translation.training.minimum_risk import RiskLoss, Rows, SentenceBleu, WithSamples, advantages
from recipes.translation.training.progress import read_metrics
from seqpar.testing.ranks import ranks
from tests.recipes.processes.test_recipe import LAYOUTS, assert_same_weights
from tests.recipes.saved import saved_file
from tests.recipes.tiny import LEARNS, few_held_out, tiny
from tests.recipes.training.test_lstm import tiny_lstm

pytestmark = pytest.mark.usefixtures("short_validations")

BASE: dict[str, Any] = {
    "data.builtin_pairs": 120,
    "training.batch_tokens": 300,
    "training.steps": 2,
    "training.precision": "float64",
}
RISK: dict[str, Any] = {
    **BASE,
    "model.d_model": 32,
    "training.chunk_tokens": 40,
    "training.risk_samples": 3,
    "training.risk_weight": 0.6,
    "training.risk_temperature": 0.7,
}

LONGEST = 1000
"""More subwords than any sample has here."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose samples are not all equally bad."""
    run = tmp_path_factory.mktemp("risk") / "base"
    with few_held_out():
        train(tiny(run, LEARNS))
    return run


def log_p(logits: Tensor, target: Tensor) -> Tensor:
    """The log-probability of each row's target, of whole logits (R, T, V)."""
    found = logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]
    return found.masked_fill(target == PAD, 0).sum(-1)


@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(2, 9),
    st.sampled_from([0.1, 0.75, 1.0]),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.0, 0.1]),
    st.integers(1, 20),
    st.integers(0, 3),
    st.integers(0, 2**16),
)
def test_value_and_every_gradient_are_those_of_plain_pytorch(
    rows: int,
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
    shares = max(1, devices)
    hidden = torch.randn(shares, time, 3, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, vocab, (shares, time))  # 0 is padding
    # Each device has samples of its own, of another length
    sampled = [torch.randn(rows, time + n, 3, dtype=torch.float64, requires_grad=True) for n in range(shares)]
    targets = [torch.randint(0, vocab, (rows, time + n)) for n in range(shares)]
    factors = [torch.randn(rows, dtype=torch.float64) for _ in range(shares)]
    risks = [torch.rand((), dtype=torch.float64) for _ in range(shares)]
    criterion = seqpar.LabelSmoothing(smoothing, "torch", ignore_index=PAD)
    usual = seqpar.LossCompute(generator, criterion, ["cpu"] * devices or None, chunk)
    engine = RiskLoss(usual, generator, weight=weight, temperature=temperature, chunk_tokens=chunk)
    samples = {"sampled": sampled, "sampled_target": targets, "factor": factors, "risk": risks}
    if devices:
        found = engine(list(hidden.split(1)), target, **samples)
    else:
        found = engine(hidden, target, **{name: one for name, (one,) in samples.items()})
    ce = criterion(generator(hidden).flatten(0, 1), target.flatten())
    surrogate = -sum(
        (factor * log_p(generator(states) / temperature, ids)).sum()
        for states, ids, factor in zip(sampled, targets, factors, strict=True)
    )
    assert int(found.tokens) == int((target != PAD).sum())
    value = (1 - weight) * ce + weight * sum(risks)
    torch.testing.assert_close(found.total, value, rtol=1e-12, atol=1e-13)
    leaves = [hidden, *sampled, *generator.parameters()]
    expected = torch.autograd.grad((1 - weight) * ce + weight * surrogate, leaves)
    for ours, theirs in zip(torch.autograd.grad(found.total, leaves, allow_unused=True), expected, strict=True):
        if ours is None:
            assert weight == 1
            assert not theirs.any()
        else:
            assert float((ours - theirs).abs().max()) <= 1e-12 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("samples", [2, 3])
def test_the_estimate_has_the_gradient_of_the_expected_risk(samples: int) -> None:
    """It is the mean of the estimates of all draws of N from four translations, weighted by their probability."""
    torch.manual_seed(samples)
    logits = torch.randn(4, dtype=torch.float64, requires_grad=True)
    utility = torch.rand(4, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(((1 - utility) * logits.softmax(0)).sum(), logits)
    mean = torch.zeros(4, dtype=torch.float64)
    for drawn in itertools.product(range(4), repeat=samples):
        chosen = list(drawn)
        factors = advantages(utility[chosen], samples) / samples
        (estimate,) = torch.autograd.grad(-(factors * logits.log_softmax(0)[chosen]).sum(), logits)
        mean += logits.detach().softmax(0)[chosen].prod() * estimate
    torch.testing.assert_close(mean, wanted, rtol=1e-12, atol=1e-13)


def test_a_sample_that_occurs_twice_is_computed_once_with_both_factors() -> None:
    drawn = [[7, 8], [9], [7, 8], [9], [7, 8], [9]]
    ended = [True, True, True, True, True, False]
    rows = Rows.of(drawn, ended, torch.arange(1.0, 7.0), 3)
    assert rows.sentences == [0, 0, 1, 1, 1]
    assert rows.targets == [[7, 8, EOS], [9, EOS], [9, EOS], [7, 8, EOS], [9]]
    assert rows.factors == [1 + 3, 2, 4, 5, 6]


def test_start_symbols_are_read_and_not_predicted() -> None:
    rows = Rows.of([[7, 8], [9]], [True, True], torch.ones(2), 2)
    inputs, targets = rows.tensors((EOS, 5))
    assert inputs.tolist() == [[EOS, 5, 7, 8], [EOS, 5, 9, PAD]]
    assert targets.tolist() == [[PAD, 7, 8, EOS], [PAD, 9, EOS, PAD]]


def test_the_utility_is_sacrebleus_sentence_bleu_of_the_joined_text(base: Path) -> None:
    translator = load_translator(base / "best")
    corpus = load_corpus(tiny(base, BASE), subwords_of=lambda _: (translator.source, translator.target))
    references = [list(corpus.train.targets[number]) for number in range(8)]  # type: ignore[attr-defined]
    translations = [ids[: len(ids) // 2 + number] for number, ids in enumerate(references)]
    found = SentenceBleu(translator.target, translator.config.data)(translations, references)
    metric = BLEU(effective_order=True)
    texts, wanted = (translator.target.decode(ids) for ids in (translations, references))
    scores = [metric.sentence_score(text, [reference]).score for text, reference in zip(texts, wanted, strict=True)]
    assert found.tolist() == pytest.approx([score / 100 for score in scores], rel=1e-12)
    assert len(set(scores)) > 4


@pytest.mark.parametrize("weight", [0.6, 1.0])
def test_a_step_follows_the_gradient_of_its_own_samples(weight: float, base: Path, tmp_path: Path) -> None:
    changes = {"training.steps": 1, "training.clip": 0, "training.risk_weight": weight, "decoding.max_length": 20}
    config = tiny(tmp_path / "run", {**RISK, **changes, "training.start_from": str(base)})
    train(config)
    translator = load_translator(base / "best")
    model = translator.model.double()
    corpus = load_corpus(config, subwords_of=run_subwords)
    batch = corpus.train.batch(corpus.train.epoch(0)[0])
    torch.manual_seed(dropout_seed(config.training.seed, 0, 0))
    model.train()
    module = WithSamples(model, SentenceBleu(translator.target, config.data), 3, 0.7, (BOS,), 20)
    hidden, samples = module(batch.src, batch.tgt_in)
    assert model.training
    usual = seqpar.LabelSmoothing(0.1, "torch", ignore_index=PAD)(
        model.generator(hidden).flatten(0, 1), batch.tgt_out.flatten()
    )
    logits = model.generator(samples["sampled"])
    surrogate = -(samples["factor"] * log_p(logits / 0.7, samples["sampled_target"])).sum()
    risk = float(samples["risk"])
    assert 0 < risk < len(batch.src)
    ((1 - weight) * usual + weight * surrogate).div(batch.tokens).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert records[0]["loss"] == pytest.approx(((1 - weight) * usual.item() + weight * risk) / batch.tokens, rel=1e-10)
    assert records[0]["gradient_norm"] == pytest.approx(norm.item(), rel=1e-10)


def test_samples_are_drawn_without_dropout_from_the_whole_distribution(base: Path) -> None:
    """By their frequencies: those of a first token are the model's probabilities, and the limit is the search's."""
    translator = load_translator(base / "best")
    model = translator.model.double().train()
    src = translator.source.encode(["the big dog sees a cat"])
    src_1S = torch.tensor([[*src[0], EOS]])
    torch.manual_seed(0)
    module = WithSamples(
        model, lambda drawn, _: torch.zeros(len(drawn), dtype=torch.float64), 1000, 0.7, (BOS,), LONGEST
    )
    drawn, ended = module.drawn(src_1S)
    limit = default_limit(src_1S.size(1))
    assert [len(ids) < limit for ids in drawn] == ended
    model.eval()
    with torch.no_grad():
        p_V = model.generator(model(src_1S, torch.tensor([[BOS]])))[0, 0].div(0.7).softmax(-1)
    first = torch.tensor([ids[0] if ids else EOS for ids in drawn])
    counts_V = torch.bincount(first, minlength=len(p_V))
    # Four standard deviations of a binomial
    assert bool(((counts_V / 1000 - p_V).abs() <= 4 * (p_V * (1 - p_V) / 1000).sqrt() + 5e-3).all())
    again, _ = module.drawn(src_1S)
    assert again != drawn


def without_chance(module: WithSamples, src: Tensor, tgt: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The same, with samples that depend on the sentence alone and not on how the sentences are distributed."""
    drawn = [[int(token) + shift for token in row[row != PAD][:-1] % 50 + 260] for row in src for shift in range(3)]
    module.drawn = lambda _: (drawn, [True] * len(drawn))  # type: ignore[method-assign]
    return ORIGINAL(module, src, tgt)


ORIGINAL = WithSamples.forward


def trained(rank: int, world: int, config: RunConfig) -> int:
    with few_held_out() as patch:  # undone, for ranks live on
        patch.setattr(WithSamples, "forward", without_chance)
        return train(config).state.step


def test_every_layout_gives_the_weights_of_one_device(base: Path, tmp_path: Path) -> None:
    changes = {**RISK, "training.accumulate": 2, "model.dropout": 0, "training.start_from": str(base)}
    trained(0, 1, tiny(tmp_path / "one", {**changes, "training.devices": "[cpu]"}))
    trained(0, 1, tiny(tmp_path / "three", {**changes, "training.devices": "[cpu, cpu, cpu]"}))
    assert_same_weights(tmp_path / "three", tmp_path / "one", 1e-10)
    world, sizes = LAYOUTS["data 2"]
    ranks(world, trained, tiny(tmp_path / "data", {**changes, **sizes, "training.devices": "auto"}))
    assert_same_weights(tmp_path / "data", tmp_path / "one", 1e-10)


@pytest.mark.parametrize("made", [tiny, tiny_lstm], ids=["Transformer", "LSTM"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(made: Any, tmp_path: Path) -> None:
    start = tmp_path / "start"
    train(made(start, {**BASE, "model.d_model": 32, "training.precision": "float32"}))
    changes = {**RISK, "training.precision": "float32", "model.dropout": 0.2, "training.devices": "[cpu, cpu]"}
    changes |= {"training.accumulate": 2, "training.start_from": str(start), "training.risk_samples": 2}
    train(made(tmp_path / "through", {**changes, "training.steps": 2}))
    train(made(tmp_path / "resumed", {**changes, "training.steps": 1}))
    train(made(tmp_path / "resumed", {**changes, "training.steps": 2}))
    for name in ("model.safetensors", "training.safetensors"):
        one, other = (saved_file(tmp_path / run, "last", name).read_bytes() for run in ("through", "resumed"))
        assert one == other, name


def test_autocast_changes_no_sample(base: Path) -> None:
    translator = load_translator(base / "best")
    src = torch.tensor([[*ids, EOS] for ids in translator.source.encode(["a cat sees the dog"])])
    module = WithSamples(
        translator.model, SentenceBleu(translator.target, translator.config.data), 50, 1.0, (BOS,), LONGEST
    )
    torch.manual_seed(0)
    drawn = module.drawn(src)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        assert module.drawn(src) == drawn


def test_a_translation_that_reaches_the_limit_of_a_search_has_no_end(base: Path) -> None:
    translator = load_translator(base / "best")
    with torch.no_grad():
        translator.model.generator.bias[EOS] = -1e4
    src = torch.tensor([[270, 280, EOS, PAD], [270, 280, 290, EOS]])
    bleu = SentenceBleu(translator.target, translator.config.data)
    for longest, limits in ((LONGEST, [default_limit(3), default_limit(4)]), (17, [16, 17])):
        drawn, ended = WithSamples(translator.model, bleu, 2, 1.0, (BOS,), longest).drawn(src)
        assert ended == [False] * 4
        assert [len(ids) for ids in drawn] == [limits[0]] * 2 + [limits[1]] * 2


def test_a_reference_whose_tokeniser_was_not_checked_is_scored_by_characters(base: Path) -> None:
    subwords = load_translator(base / "best").target
    texts = ["これは猫です", "これは犬です", "Der Zug hat acht Wagen."]
    said, wanted = ([subwords.encode([text])[0] for text in some] for some in (texts, texts[:1] * 2 + texts[2:]))
    data = tiny(base).data
    expected = [*sentence_bleu(texts[:2], texts[:1] * 2, "char"), *sentence_bleu(texts[2:], texts[2:], "13a")]
    assert SentenceBleu(subwords, data)(said, wanted).tolist() == pytest.approx([each / 100 for each in expected])


@pytest.mark.parametrize(("name", "other"), [("data.tokenize", "char"), ("decoding.max_length", 9)])
def test_what_the_risk_depends_on_stays_when_a_run_is_resumed(
    name: str, other: object, base: Path, tmp_path: Path
) -> None:
    changes = {**RISK, "training.start_from": str(base), "training.steps": 1}
    train(tiny(tmp_path / "run", changes))
    with pytest.raises(ConfigError, match=rf"^{name} is .* was trained with .* --fresh$"):
        train(tiny(tmp_path / "run", {**changes, name: other}))


def test_samples_become_better(base: Path, tmp_path: Path) -> None:
    """A few steps on the risk alone raise the mean BLEU of the sentences' samples."""
    changes = {"training.risk_weight": 1.0, "training.steps": 12, "training.risk_samples": 8, "training.clip": 0}
    changes |= {"training.learning_rate": 2e-3, "training.precision": "float32", "training.start_from": str(base)}
    changes |= {"training.risk_temperature": 1.0, "decoding.max_length": LONGEST}
    config = tiny(tmp_path / "run", {**RISK, **changes})
    train(config)
    risks = []
    for run in (base, tmp_path / "run"):
        translator = load_translator(run / "best")
        corpus = load_corpus(config, subwords_of=run_subwords)
        batch = corpus.train.batch(corpus.train.epoch(0)[0])
        torch.manual_seed(0)
        module = WithSamples(translator.model, SentenceBleu(translator.target, config.data), 64, 1.0, (BOS,), LONGEST)
        with torch.no_grad():
            _, samples = module(batch.src, batch.tgt_in)
        risks.append(float(samples["risk"]) / len(batch.src))
    assert 1 - risks[1] > 1.15 * (1 - risks[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training.risk_samples": 1}, r"^training\.risk_samples is 1: a sample is compared with the others"),
        ({"training.risk_samples": 0}, r"^training\.risk_weight is 0\.6, but training\.risk_samples is 0: set"),
        (
            {"training.risk_samples": 0, "training.risk_weight": 0.9},
            r"^training\.risk_temperature is 0\.7, but training\.risk_samples is 0: set",
        ),
        ({"training.risk_weight": 0}, r"^training\.risk_weight is 0: it is the share of the risk in the loss, above"),
        ({"training.risk_weight": 1.5}, r"^training\.risk_weight is 1\.5: it is the share of the risk in the loss"),
        ({"training.start_from": ""}, r"^training\.risk_samples is 3, but training\.start_from names no model"),
        ({"training.r_drop": 5}, r"^training\.risk_samples is 3 and training\.r_drop 5: each has a loss of its own"),
        ({"training.teacher": "b"}, r"^training\.risk_samples is 3 and training\.teacher b: each has a loss of its o"),
        (
            {"layout.shard": 2},
            r"^training\.risk_samples is 3 and layout\.shard 2: translations are sampled from a whol",
        ),
        ({"layout.sequence": 2}, r"^training\.risk_samples is 3 and layout\.sequence 2: translations are sampled from"),
        ({"layout.vocab": 2}, r"^training\.risk_samples is 3 and layout\.vocab 2: translations are sampled from"),
    ],
)
def test_what_it_cannot_be_had_with_is_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(tmp_path, {**RISK, "training.start_from": "a", **changes})


def test_the_utility_of_a_sample_depends_on_its_own_reference_alone(base: Path) -> None:
    translator = load_translator(base / "best")
    chinese = "\u732b\u5728\u57ab\u5b50\u4e0a\u7761\u89c9\u4e86"
    said, wanted = (translator.target.encode([text])[0] for text in (f"{chinese[:6]}\u8dd1", chinese))
    german = translator.target.encode(["Der Hund sieht eine Katze und einen Zug."])[0]
    utility = SentenceBleu(translator.target, translator.config.data)
    alone = utility([said], [wanted])
    assert 0.1 < float(alone) < 1
    together = utility([german, said, german], [german, wanted, wanted])
    assert together[1] == alone[0]
    assert float(together[0]) == pytest.approx(1)
