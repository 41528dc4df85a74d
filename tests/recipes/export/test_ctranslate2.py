"""A model in CTranslate2's format translates as it does in torch."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from pathlib import Path

import ctranslate2
import pytest
import torch
import torch.nn.functional as F

from models import length_normaliser
from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.export import ctranslate2_model
from recipes.translation.run_folder.translator import Translator, tensors_of
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.text.subwords import BOS, EOS, PAD, Subwords
from recipes.translation.translating import ctranslate2_engine
from recipes.translation.translating.translate import translate
from tests.recipes.export.translators import SENTENCES, as_saved, random_translator, recorded, under
from tests.recipes.plain_scores import log_probability
from tests.recipes.random_translator import fingerprint, subwords_in
from tests.recipes.tiny import tiny

pytestmark = pytest.mark.formats


@pytest.fixture(scope="module")
def subwords(tmp_path_factory: pytest.TempPathFactory) -> Subwords:
    folder = tmp_path_factory.mktemp("subwords")
    return subwords_in(folder, tiny(folder))


def exported(
    translator: Translator, folder: Path, quantization: str | None = None
) -> ctranslate2_engine.ExportedTranslator:
    ctranslate2_model.write(as_saved(translator), folder, quantization)
    return ctranslate2_engine.load(folder)


def test_each_thread_translates_batches_of_its_own(subwords: Subwords, tmp_path: Path) -> None:
    translator = random_translator(subwords, tmp_path / "run", {}, end=0.0)
    alone = exported(translator, tmp_path / "exported")
    torch.set_num_threads(3)
    three = ctranslate2_engine.load(tmp_path / "exported")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert threads == 3  # torch keeps them, for the next model
    assert alone.engine.num_translators == 1
    assert three.engine.num_translators == 3
    for count in (1, 2, 7, len(SENTENCES)):
        some = SENTENCES[:count]
        found = ctranslate2_engine.translate(three, some)
        assert found == translate(translator, some)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("tie", ["none", "target", "all"])
def test_log_probabilities_and_greedy_translations_are_those_of_the_model(
    norm: str, tie: str, subwords: Subwords, tmp_path: Path
) -> None:
    translator = random_translator(subwords, tmp_path / "run", {"model.norm": norm, "model.tie": tie}, end=0.0, seed=1)
    found = exported(translator, tmp_path / "exported")
    ours = translate(translator, SENTENCES)
    assert ctranslate2_engine.translate(found, SENTENCES) == ours
    assert len(set(ours)) > 1
    pieces = subwords.pieces()
    sources = subwords.encode(SENTENCES[:8])
    targets = subwords.encode(SENTENCES[8:16])
    scored = found.engine.score_batch(
        [[pieces[token] for token in source] for source in sources],
        [[pieces[token] for token in target] for target in targets],
    )
    for source, target, result in zip(sources, targets, scored, strict=True):
        with torch.no_grad():
            hidden = translator.model(torch.tensor([[*source, EOS]]), torch.tensor([[BOS, *target]]))
            log_probs = F.log_softmax(translator.model.generator(hidden)[0], -1)
        expected = log_probs.gather(-1, torch.tensor([[*target, EOS]]).T)[:, 0]
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [{"min_length": 7}, {"no_repeat_ngram": 1}, {"no_repeat_ngram": 2, "min_length": 9}])
def test_minimum_length_and_ngrams_are_those_of_the_model(
    rule: dict[str, int], subwords: Subwords, tmp_path: Path
) -> None:
    translator = random_translator(subwords, tmp_path / "run", {"decoding.max_length": 30}, end=1.0)
    found = exported(translator, tmp_path / "exported")
    decoding = translator.config.decoding
    ours = translate(translator.with_decoding(replace(decoding, **rule)), SENTENCES)
    assert ctranslate2_engine.translate(under(found, replace(decoding, **rule)), SENTENCES) == ours
    assert ours != translate(translator.with_decoding(decoding), SENTENCES)


def test_no_setting_of_decoding_is_passed_over(subwords: Subwords, tmp_path: Path) -> None:
    translator = random_translator(subwords, tmp_path / "run", {})
    decoding, read = recorded(translator.config.decoding)
    ctranslate2_engine.translate(under(exported(translator, tmp_path / "exported"), decoding), SENTENCES)
    assert read == {each.name for each in fields(DecodingConfig)}


@pytest.mark.parametrize("norm", ["gnmt", "length"])
def test_of_the_hypotheses_the_best_by_our_own_normalisation_is_taken(
    norm: str, subwords: Subwords, tmp_path: Path
) -> None:
    translator = random_translator(subwords, tmp_path / "run", {})
    found = exported(translator, tmp_path / "exported")
    decoding = replace(translator.config.decoding, beam=4, length_penalty=2.0, length_norm=norm)
    ours = ctranslate2_engine.translate(under(found, decoding), SENTENCES)
    without = ctranslate2_engine.translate(under(found, replace(decoding, length_penalty=0.0)), SENTENCES)
    assert ours != without
    pieces = subwords.pieces()
    for sentence, translation in zip(SENTENCES[:8], ours, strict=False):
        (source,) = subwords.encode([sentence])
        (result,) = found.engine.translate_batch(
            [[pieces[token] for token in source]],
            beam_size=4,
            num_hypotheses=4,
            length_penalty=0,
            return_scores=True,
            suppress_sequences=[[pieces[PAD]], [pieces[BOS]]],
            max_decoding_length=12,
            min_decoding_length=0,
        )
        scores = [
            score / length_normaliser(len(tokens) + 1, 2.0, norm)
            for tokens, score in zip(result.hypotheses, result.scores, strict=True)
        ]
        best = result.hypotheses[scores.index(max(scores))]
        assert subwords.decode([[pieces.index(piece) for piece in best]]) == [translation]


def test_the_n_best_are_distinct_sorted_and_scored_as_the_model_scores_them(subwords: Subwords, tmp_path: Path) -> None:
    translator = random_translator(subwords, tmp_path / "run", {})
    with torch.no_grad():
        translator.model.generator.bias[[PAD, BOS]] = -1e4  # CTranslate2 shares out what is forbidden
    found = exported(translator, tmp_path / "exported")
    decoding = replace(translator.config.decoding, beam=4, length_penalty=1.0, length_norm="length")
    some = SENTENCES[:6]
    rows = ctranslate2_engine.alternatives(under(found, decoding), ["", *some], n_best=3)
    assert [one.text for one in rows[0]] == [""]
    assert [row[0].text for row in rows[1:]] == ctranslate2_engine.translate(under(found, decoding), some)
    pieces = subwords.pieces()
    ids = subwords.encode(some)
    sources = [[pieces[token] for token in source] for source in ids]
    searched = ctranslate2_engine.search(found.engine, subwords, sources, [12] * len(some), decoding, 3)
    for source, row, hypotheses in zip(ids, rows[1:], searched, strict=True):
        assert [one.text for one in row] == subwords.decode([one.tokens for one in hypotheses])
        assert len({tuple(one.tokens) for one in hypotheses}) == len(hypotheses) == 3
        assert [one.score for one in row] == sorted((one.score for one in row), reverse=True)
        for hypothesis, one in zip(hypotheses, row, strict=True):
            if len(hypothesis.tokens) < 12:  # one that was cut has no end symbol
                expected = log_probability(translator.model, source, [*hypothesis.tokens, EOS])
                assert one.log_probability == pytest.approx(expected, rel=1e-4)
                assert one.score == pytest.approx(expected / (len(hypothesis.tokens) + 1), rel=1e-4)


def test_a_short_sentence_keeps_its_own_limit_beside_a_long_one(subwords: Subwords, tmp_path: Path) -> None:
    translator = random_translator(subwords, tmp_path / "run", {"decoding.max_length": 60})
    with torch.no_grad():
        translator.model.generator.bias[EOS] = -1e4  # only the limit ends a translation
    found = exported(translator, tmp_path / "exported")
    decoding = translator.config.decoding
    short = min(SENTENCES, key=len)
    both = ctranslate2_engine.translate(under(found, decoding), [short, " ".join(SENTENCES[:3])])
    assert both[0] == ctranslate2_engine.translate(under(found, decoding), [short])[0]
    assert both[0] == translate(translator.with_decoding(decoding), [short])[0]


@pytest.mark.parametrize("beam", [1, 2, 3, 5])
def test_a_translation_does_not_depend_on_its_batch(beam: int, subwords: Subwords, tmp_path: Path) -> None:
    """Whatever its own limit is, also one that cuts hypotheses which the batch's limit would let end and be dropped."""
    translator = random_translator(subwords, tmp_path / "run", {}, end=0.5)
    found = exported(translator, tmp_path / "exported")
    decoding = replace(translator.config.decoding, beam=beam)
    pieces = subwords.pieces()
    draw = random.Random(1)
    encoded = subwords.encode(SENTENCES)
    sources = [[pieces[token] for token in ids[: draw.randint(1, len(ids))]] for ids in encoded]
    lengths = set()
    for limit in range(1, 9):
        own = [limit] * len(sources) + [60]
        drawn = [limit] + [draw.randint(limit, 12) for _ in sources]
        for limits in (own, drawn):
            together = ctranslate2_engine.search(found.engine, subwords, [*sources, sources[0]], limits, decoding, beam)
            for source, limit_alone, beside in zip(sources, limits, together, strict=False):
                (alone,) = ctranslate2_engine.search(found.engine, subwords, [source], [limit_alone], decoding, beam)
                assert [one.tokens for one in beside] == [one.tokens for one in alone]
                assert [one.score for one in beside] == pytest.approx([one.score for one in alone], abs=1e-5)
                lengths.add(len(alone[0].tokens) - limit_alone)
    assert {-2, -1, 0} <= lengths


@pytest.mark.parametrize("longer", [0, 3])
def test_a_source_and_a_translation_of_the_longest_lengths_are_translated(
    longer: int, subwords: Subwords, tmp_path: Path
) -> None:
    """Each has one symbol more than its subwords, which needs a position too."""
    (ids,) = subwords.encode([SENTENCES[0]])
    lengths = {"training.max_length": len(ids), "decoding.max_length": len(ids) + longer}
    translator = random_translator(subwords, tmp_path / "run", lengths)
    with torch.no_grad():
        translator.model.generator.bias[EOS] = -1e4  # only the limit ends a translation
    found = exported(translator, tmp_path / "exported")
    decoding = translator.config.decoding
    for sentence in (SENTENCES[0], " ".join(SENTENCES[:3])):
        ours = translate(translator.with_decoding(decoding), [sentence])
        assert ctranslate2_engine.translate(under(found, decoding), [sentence]) == ours


def test_an_empty_sentence_stays_empty(subwords: Subwords, tmp_path: Path) -> None:
    translator = random_translator(subwords, tmp_path / "run", {})
    found = exported(translator, tmp_path / "exported")
    assert ctranslate2_engine.translate(found, ["", SENTENCES[0], ""])[::2] == ["", ""]
    assert ctranslate2_engine.translate(found, []) == []


def test_padding_and_the_start_symbol_are_never_output(subwords: Subwords, tmp_path: Path) -> None:
    translator = random_translator(subwords, tmp_path / "run", {})
    with torch.no_grad():
        translator.model.generator.bias[[PAD, BOS]] = 100
    found = exported(translator, tmp_path / "exported")
    decoding = translator.config.decoding
    assert ctranslate2_engine.translate(under(found, decoding), SENTENCES) == translate(
        translator.with_decoding(decoding), SENTENCES
    )


def test_eight_bits_make_the_folder_smaller_and_the_numbers_others(subwords: Subwords, tmp_path: Path) -> None:
    translator = random_translator(subwords, tmp_path / "run", {"model.d_model": 64, "model.d_ff": 128})
    exported(translator, tmp_path / "float32")
    found = exported(translator, tmp_path / "int8", "int8")
    sizes = {name: (tmp_path / name / "model.bin").stat().st_size for name in ("float32", "int8")}
    assert sizes["int8"] < 0.4 * sizes["float32"]
    assert found.engine.compute_type.startswith("int8")


def test_quantization_leaves_the_weights_of_a_model_in_memory_as_they_are(subwords: Subwords, tmp_path: Path) -> None:
    translator = random_translator(subwords, tmp_path / "run", {})
    before = fingerprint(tensors_of(translator.model))
    ctranslate2_model.write(as_saved(translator), tmp_path / "exported", "int8")
    assert fingerprint(tensors_of(translator.model)) == before


def test_a_damaged_folder_is_refused_in_one_line(subwords: Subwords, tmp_path: Path) -> None:
    translator = random_translator(subwords, tmp_path / "run", {})
    ctranslate2_model.write(as_saved(translator), tmp_path / "exported", None)
    (tmp_path / "exported" / "model.bin").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"model\.bin"):
        ctranslate2_engine.load(tmp_path / "exported")


def test_the_folder_opens_in_ctranslate2_itself(subwords: Subwords, tmp_path: Path) -> None:
    translator = random_translator(subwords, tmp_path / "run", {})
    ctranslate2_model.write(as_saved(translator), tmp_path / "exported", None)
    engine = ctranslate2.Translator(str(tmp_path / "exported"), intra_threads=1)
    (source,) = subwords.encode([SENTENCES[0]])
    (result,) = engine.translate_batch([[subwords.pieces()[token] for token in source]], beam_size=1)
    assert result.hypotheses[0]


def test_longer_translations_than_an_export_has_positions_for_are_refused(subwords: Subwords, tmp_path: Path) -> None:
    changes = {"training.max_length": 20, "decoding.max_length": 30}
    translator = random_translator(subwords, tmp_path / "run", changes, end=-50.0)
    exported(translator, tmp_path / "exported")
    longest = ctranslate2_engine.load(tmp_path / "exported", {"decoding.max_length": 30, "decoding.max_ratio": 99})
    long = " ".join(SENTENCES)
    (found,) = ctranslate2_engine.translate(longest, [long])
    assert found
    with pytest.raises(
        ConfigError, match=r"^decoding\.max_length is 31, but .* was exported with positions for 30 sub"
    ):
        ctranslate2_engine.load(tmp_path / "exported", {"decoding.max_length": 31})
