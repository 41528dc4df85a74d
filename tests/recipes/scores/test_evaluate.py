"""Scores are sacreBLEU's, and translations come back in order."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from models import greedy
from recipes.translation.data.batches import TokenBatches
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.run_folder.translator import Translator
from recipes.translation.scores.evaluate import evaluate
from recipes.translation.scores.scores import scores_in_words
from recipes.translation.text.bleu_tokenizers import tokenizer_for
from recipes.translation.text.subwords import BOS, EOS
from recipes.translation.train import train
from recipes.translation.translating.translate import translate
from tests.recipes.scores.examples import damaged
from tests.recipes.scores.examples import references as sentences
from tests.recipes.scores.scored import score
from tests.recipes.tiny import LEARNS, tiny

HYPOTHESES = ["The cat sat on the mat.", "A Dog barks at the red moon, loudly!", "It costs 3.50 euros now."]
REFERENCES = ["The cat sat on the mat.", "a dog barks at the big red moon loudly!", "It costs 3.50 Euros now."]


def test_scores_are_sacrebleus() -> None:
    found = score(HYPOTHESES, REFERENCES)
    assert found["bleu"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert found["chrf"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert found["ter"] == sacrebleu.corpus_ter(HYPOTHESES, [REFERENCES]).score
    assert found["bleu_lowercase"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], lowercase=True).score
    assert len({found["bleu"], found["bleu_lowercase"]}) == 2
    assert found["exact_match"] == pytest.approx(100 / 3)
    assert found["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert found["bleu_lowercase_signature"].startswith("nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:")
    assert found["chrf_signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")
    assert found["ter_signature"].startswith("nrefs:1|case:lc|tok:tercom|norm:no|punct:yes|asian:no|version:")


def test_each_score_has_its_own_interval_and_says_where_it_comes_from() -> None:
    references = sentences(30)
    found = score(damaged(references, 0.3, seed=1), references, tokenize="none")
    names = ("bleu", "bleu_lowercase", "multi_bleu_lowercase", "chrf", "ter", "exact_match")
    assert sorted(found["intervals"]) == sorted(names)
    lines = scores_in_words(found).splitlines()
    for line, name in zip(lines, names, strict=False):
        low, high = found["intervals"][name]
        assert low < found[name] < high
        assert f" {found[name]:.2f}  [{low:.2f}, {high:.2f}]  " in line
    assert len({line.split("[")[1] for line in lines}) == 7
    assert lines[-1] == "  [ ] is the 95 % confidence interval: bootstrap, 1,000 resamples, seed 12345"


@pytest.mark.parametrize("tokenize", ["none", "intl", "char"])
def test_the_tokeniser_asked_for_is_used_and_signed(tokenize: str) -> None:
    found = score(HYPOTHESES, REFERENCES, tokenize=tokenize)
    expected = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], tokenize=tokenize, lowercase=True, force=True)
    assert found["bleu_lowercase"] == expected.score
    assert f"|tok:{tokenize}|" in found["bleu_lowercase_signature"]


def test_lower_case_models_are_scored_without_case() -> None:
    found = score(HYPOTHESES, REFERENCES, lowercase=True)
    assert found["bleu"] == found["bleu_lowercase"]
    assert "case:lc" in found["bleu_signature"]
    assert found["chrf"] == score([text.lower() for text in HYPOTHESES], [text.lower() for text in REFERENCES])["chrf"]


def multi_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """BLEU-4 of lower-cased, tokenised text, after Papineni et al. 2002, in percent; no smoothing."""
    correct, total = [0] * 5, [0] * 5
    ours, theirs = ([text.lower().split() for text in texts] for texts in (hypotheses, references))
    for hypothesis, reference in zip(ours, theirs, strict=True):
        for n in range(1, 5):
            there = Counter(tuple(reference[start : start + n]) for start in range(len(reference) - n + 1))
            here = Counter(tuple(hypothesis[start : start + n]) for start in range(len(hypothesis) - n + 1))
            correct[n] += (here & there).total()
            total[n] += here.total()
    if not all(correct[1:]):
        return 0.0
    brevity = min(1.0, math.exp(1 - sum(map(len, theirs)) / sum(map(len, ours))))
    return 100 * brevity * math.prod(correct[n] / total[n] for n in range(1, 5)) ** 0.25


TOKENS = st.text(alphabet="aAbÄ ,.", min_size=1, max_size=30)


@settings(max_examples=settings.default.max_examples // 3)  # each draws its thousand resamples
@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6), st.data())
def test_multi_bleu_of_tokenised_text_is_the_papers(pairs: list[tuple[str, str]], data: st.DataObject) -> None:
    references = [reference for _, reference in pairs]
    hypotheses = [data.draw(st.sampled_from([hypothesis, reference])) for hypothesis, reference in pairs]
    found = score(hypotheses, references, tokenize="none")["multi_bleu_lowercase"]
    assert found == pytest.approx(multi_bleu(hypotheses, references), rel=1e-12)


def test_multi_bleu_is_not_smoothed_and_signed_as_it_is_computed() -> None:
    found = score(["a b c d e F", "a b x"], ["a b c d e f g", "b a x"], tokenize="none")
    assert found["multi_bleu_lowercase"] == pytest.approx(
        100 * math.exp(1 - 10 / 9) * (9 * 5 * 4 * 3 / (9 * 7 * 5 * 3)) ** 0.25
    )
    signature = found["multi_bleu_lowercase_signature"]
    assert signature.startswith("nrefs:1|case:lc|eff:no|tok:none|smooth:none|version:")
    low, high = found["intervals"]["multi_bleu_lowercase"]
    shown = f"{found['multi_bleu_lowercase']:6.2f}  [{low:.2f}, {high:.2f}]"
    assert re.search(rf"multi-bleu -lc     {re.escape(shown)} +{re.escape(signature)}", scores_in_words(found))
    nothing = score(["a b c x"], ["a b c d"], tokenize="none")  # not one 4-gram
    assert nothing["bleu_lowercase"] > 0
    assert nothing["multi_bleu_lowercase"] == 0


@pytest.mark.parametrize("tokenize", ["intl", "13a", "char"])
def test_multi_bleu_is_shown_for_tokenised_text_alone(tokenize: str) -> None:
    found = score(HYPOTHESES, REFERENCES, tokenize=tokenize)
    assert "multi-bleu" not in scores_in_words(found)
    assert found["multi_bleu_lowercase"] is found["multi_bleu_lowercase_signature"] is None
    assert list(found) == [
        *("sentences", "bleu", "bleu_signature", "bleu_lowercase", "bleu_lowercase_signature"),
        *("multi_bleu_lowercase", "multi_bleu_lowercase_signature", "chrf", "chrf_signature", "ter", "ter_signature"),
        *("metric_command", "metric_command_signature", "exact_match", "intervals", "resamples", "seed"),
    ]


@settings(max_examples=settings.default.max_examples // 3)  # likewise
@given(st.lists(st.text(alphabet="ab ä.\u2028", min_size=1, max_size=8), min_size=1, max_size=6))
def test_a_perfect_translation_is_always_an_exact_match(sentences: list[str]) -> None:
    assert score(sentences, sentences)["exact_match"] == 100


@pytest.mark.parametrize(
    "almost", ["Ein  Hund", "EinHund", "Ein Hund ", " Ein Hund", "ein Hund", "Ein Hund.", "Ein\u00a0Hund"]
)
def test_an_exact_match_is_one_character_for_character(almost: str) -> None:
    assert score([almost, "Ein Hund"], ["Ein Hund", "Ein Hund"])["exact_match"] == 50


@pytest.mark.parametrize(("hypotheses", "references"), [(3, 2), (2, 3), (0, 1), (1, 0)])
def test_unequal_numbers_are_refused_where_sacrebleu_would_cut(hypotheses: int, references: int) -> None:
    with pytest.raises(DataError, match=f"^{hypotheses} hypotheses but {references} references"):
        score(HYPOTHESES[:hypotheses], REFERENCES[:references])


def test_nothing_to_evaluate_is_an_error() -> None:
    with pytest.raises(DataError, match="nothing to evaluate"):
        score([], [])


def test_an_unknown_tokeniser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no tokeniser '13b'; it has .*13a"):
        tokenizer_for("13b", "")


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    """A model that has learned a little, so that sentences differ in their translations."""
    run = tmp_path_factory.mktemp("evaluate") / "run"
    train(tiny(run, LEARNS))
    return load_translator(run / "best")


def test_a_sentence_is_translated_alike_in_any_company_and_order(translator: Translator) -> None:
    decoding = replace(translator.config.decoding, batch_sentences=3)
    pairs = load_pairs(translator.config.data, "test")[:7]
    sentences = [pair.source for pair in pairs]
    alone = [translate(translator.with_decoding(decoding), [sentence])[0] for sentence in sentences]
    assert len(set(alone)) > 2
    assert translate(translator.with_decoding(decoding), sentences) == alone
    assert translate(translator.with_decoding(decoding), sentences[::-1]) == alone[::-1]


def test_the_model_sees_a_sentence_as_it_did_in_training(translator: Translator) -> None:
    pairs = load_pairs(translator.config.data, "test")[:20]
    sentences = [pair.source for pair in pairs]
    batches = TokenBatches(translator.source.encode(sentences), [[]] * 20, batch_tokens=10_000, seed=0)
    found = greedy(translator.model, batches.batch(range(20)).src, bos=BOS, eos=EOS, max_length=30)
    assert translate(translator, sentences) == translator.target.decode(found)


def test_an_empty_line_stays_an_empty_line(translator: Translator) -> None:
    found = translate(translator, ["", "The number is six.", "   ", ""])
    assert [bool(text) for text in found] == [False, True, False, False]
    assert translate(translator, []) == []


def test_a_wider_beam_is_used_where_it_is_asked_for(translator: Translator) -> None:
    sentences = [pair.source for pair in load_pairs(translator.config.data, "test")[:20]]
    greedy, beam = (
        translate(translator.with_decoding(replace(translator.config.decoding, beam=width)), sentences)
        for width in (1, 4)
    )
    assert greedy != beam


def test_no_translation_is_longer_than_max_length(translator: Translator) -> None:
    short = replace(translator.config.decoding, max_length=3)
    for text in translate(translator.with_decoding(short), ["The number is six.", "The teacher is thirty years old."]):
        assert len(translator.target.encode([text])[0]) <= 3


def test_a_lower_case_model_sees_lower_case_text(translator: Translator) -> None:
    config = translator.config
    lowercase = replace(translator, config=replace(config, subwords=replace(config.subwords, lowercase=True)))
    texts = ["the number is six.", "THE Number Is SIX."]
    one, other = translate(lowercase, texts)
    assert one == other


def sha256_of_lines(lines: list[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def test_an_evaluation_scores_its_split_and_writes_what_it_translated(
    translator: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = evaluate(translator, "valid")
    pairs = load_pairs(translator.config.data, "valid")
    references = [pair.target for pair in pairs]
    assert found.translations == translate(translator, [pair.source for pair in pairs])
    assert found.scores == score(found.translations, references)
    texts, scores = replace(found, digests=("abc", "def")).write(tmp_path)
    assert texts.read_text().split("\n")[:-1] == found.translations
    assert json.loads(scores.read_text()) == {
        **found.scores,
        "intervals": {name: list(bounds) for name, bounds in found.scores["intervals"].items()},
        "unfinished": found.unfinished,
        "weights": ["abc", "def"],
        "sources": {"sha256": sha256_of_lines([pair.source for pair in pairs])},
        "references": {"sha256": sha256_of_lines(references)},
    }
    assert found.scores["bleu_signature"] in scores_in_words(found.scores)
