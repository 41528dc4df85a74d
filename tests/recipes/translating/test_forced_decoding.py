"""Forced decoding gives a translation the score that the search reports for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models import EncoderDecoder, beam_search, length_normaliser
from models.decoding import LengthNorm
from recipes.translation.commands import main
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.errors import DataError
from recipes.translation.processes.ranks import joined
from recipes.translation.run_folder.checkpoint import load_translator, save_model
from recipes.translation.run_folder.translator import Translator, build_model, model_sizes
from recipes.translation.text.subwords import BOS, EOS, Subwords, train_subwords
from recipes.translation.translating.alignments import align
from recipes.translation.translating.forced_decoding import PairScore, log_probabilities, score_pairs
from seqpar.testing.ranks import ranks
from tests.models.examples import small_transformer
from tests.recipes.command_line import refusal
from tests.recipes.tiny import tiny

SENTENCE = st.lists(st.integers(4, 10), max_size=6)
TARGET = st.lists(st.integers(4, 10), max_size=6).map(lambda ids: [*ids, EOS])


def plain(model: EncoderDecoder, source: list[int], target: list[int]) -> float:
    """One pair alone, all logits at once."""
    hidden = model(torch.tensor([[*source, EOS]]), torch.tensor([[BOS, *target[:-1]]]))
    log_p = model.generator(hidden[0]).log_softmax(-1)
    return float(log_p.gather(-1, torch.tensor(target)[:, None]).sum())


@given(st.lists(st.tuples(SENTENCE, TARGET), min_size=1, max_size=4), st.integers(0, 20))
def test_the_log_probability_is_the_plain_models(batch: list[tuple[list[int], list[int]]], seed: int) -> None:
    model = small_transformer(seed, spread=2.0).eval()
    found = log_probabilities(model, [source for source, _ in batch], [target for _, target in batch])
    with torch.no_grad():
        assert found == pytest.approx([plain(model, *pair) for pair in batch], rel=1e-12)


@pytest.mark.parametrize(("alpha", "norm"), [(0.0, "gnmt"), (0.6, "gnmt"), (1.0, "length")])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_n_best_of_a_search_score_as_the_search_says(
    alpha: float, norm: LengthNorm, dtype: torch.dtype, tolerance: float
) -> None:
    model = small_transformer(5, spread=2.0).to(dtype)
    with torch.no_grad():
        model.generator.bias[EOS] += 4
    sources = [[5, 6, 7, 8], [9, 4], [10, 10, 4, 5]]
    src = torch.tensor([[*ids, EOS, *[0] * (4 - len(ids))] for ids in sources])
    found = beam_search(
        model, src, bos=BOS, eos=EOS, beam=5, n_best=5, length_penalty=alpha, length_norm=norm, max_length=12
    )
    compared = 0
    for source, hypotheses in zip(sources, found, strict=True):
        for hypothesis in hypotheses:
            finished = len(hypothesis.tokens) < 12
            ids = hypothesis.tokens
            if finished:  # the log-probability of an unfinished one has no end symbol
                ids = [*ids, EOS]
            (found_here,) = log_probabilities(model.eval(), [source], [ids])
            assert found_here == pytest.approx(hypothesis.log_probability, rel=tolerance)
            score = found_here / length_normaliser(len(ids), alpha, norm)
            assert score == pytest.approx(hypothesis.score, rel=tolerance)
            compared += finished
    assert compared >= 4


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    """Random weights, in float64."""
    folder = tmp_path_factory.mktemp("forced")
    config = tiny(folder / "run", {"training.precision": "float64", "decoding.batch_sentences": 3})
    train_subwords([side for pair in pairs(200, 1) for side in pair], folder / "joint", config.subwords)
    subwords = Subwords.load(folder / "joint.model")
    torch.manual_seed(1)
    model = build_model(model_sizes(config.model), subwords, subwords).double().eval()
    return Translator(config, model, subwords, subwords)


TEXTS = [(pair.source, pair.target) for pair in pairs(7, 5, "test")] + [("", "Ein Wort"), ("A word", "")]


def expected_of(translator: Translator, source: str, target: str) -> PairScore:
    config = translator.config.decoding
    ids = [*translator.target.encode([target])[0], EOS]
    with torch.no_grad():
        total = plain(translator.model, translator.source.encode([source])[0], ids)
    norm = length_normaliser(len(ids), config.length_penalty, config.length_norm)
    return PairScore(total, len(ids), total / norm)


def test_pairs_come_back_in_order_whatever_their_company(translator: Translator) -> None:
    found = score_pairs(translator, *zip(*TEXTS, strict=True))
    for pair, score in zip(TEXTS, found, strict=True):
        assert score == pytest.approx(expected_of(translator, *pair), rel=1e-12)
        assert score.per_token == score.log_prob / score.tokens
    assert len({score.log_prob for score in found}) == len(TEXTS)


def test_a_lower_case_model_scores_lower_case_text(translator: Translator) -> None:
    config = translator.config
    lowercase = replace(translator, config=replace(config, subwords=replace(config.subwords, lowercase=True)))
    one, other = score_pairs(lowercase, ["A word", "a WORD"], ["Ein Wort", "EIN wort"])
    assert one == pytest.approx(other, rel=1e-12)


def test_a_target_that_is_not_unicode_is_refused(translator: Translator) -> None:
    broken = b"caf\xe9".decode("utf-8", "surrogateescape")
    with pytest.raises(DataError, match=r"^sentence 1 is not UTF-8 text"):
        score_pairs(translator, ["A"], [broken])


def test_score_prints_a_line_for_each_pair(
    translator: Translator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "best", translator, {"step": 1})
    for name, side in (("a", 0), ("b", 1)):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in TEXTS))
    files = ["--sources", str(tmp_path / "a"), "--targets", str(tmp_path / "b")]
    for more, decoding in (
        ([], translator.config.decoding),
        (["--length-penalty", "1", "--length-norm", "length"], None),
    ):
        assert main(["score", "--run", str(tmp_path), *files, *more]) == 0
        printed = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
        assert len(printed) == len(TEXTS)
        for pair, (total, per_token, score, tokens) in zip(TEXTS, printed, strict=True):
            expected = expected_of(translator, *pair)
            assert float(total) == pytest.approx(expected.log_prob, rel=1e-5)
            assert float(per_token) == pytest.approx(expected.per_token, rel=1e-5)
            assert int(tokens) == expected.tokens
            assert float(score) == pytest.approx(expected.score if decoding else expected.per_token, rel=1e-5)


def test_files_that_are_missing_or_not_aligned_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").write_text("eins\n")
    assert "both are needed" in refusal(capsys, "score", "--sources", "a")
    assert "a has 2 lines, " in refusal(
        capsys, "score", "--sources", str(tmp_path / "a"), "--targets", str(tmp_path / "b")
    )


def divided(rank: int, world: int, folder: Path) -> tuple[list[PairScore], list[list[tuple[int, int]]]]:
    """The scores and alignments that each rank returns."""
    with joined(60) as group:
        assert group.world == world
        translator = load_translator(folder)
        sides = [source for source, _ in TEXTS], [target for _, target in TEXTS]
        return score_pairs(translator, *sides, group), align(translator, *sides, group)


def test_every_rank_returns_the_scores_and_alignments_of_all(translator: Translator, tmp_path: Path) -> None:
    save_model(tmp_path / "best", translator, {"step": 1})
    expected_scores, expected_links = divided(0, 1, tmp_path / "best")
    for scores, links in ranks(2, divided, tmp_path / "best"):
        assert links == expected_links
        for found, expected in zip(scores, expected_scores, strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
