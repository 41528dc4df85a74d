"""What `translate` can be asked for: n-best lists, samples, beginnings, phrases and ensembles."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models import beam_search, default_limit
from recipes.translation.commands import main
from recipes.translation.commands.searching import search_options
from recipes.translation.commands.translation import table
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.errors import DataError
from recipes.translation.run_folder.checkpoint import load_translator, save_model
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.text.subwords import BOS, EOS
from recipes.translation.train import train
from recipes.translation.translating.alignments import align
from recipes.translation.translating.demands import begins_anew, phrases_of
from recipes.translation.translating.translate import Sampling, SearchOptions, Translation, alternatives, translate
from tests.recipes.command_line import refusal
from tests.recipes.random_translator import random_translator
from tests.recipes.tiny import tiny
from tests.recipes.translating.test_one_search import parser_of

SENTENCES = [pair.source for pair in pairs(6, 5, "test")]
FREE: list[list[str]] = [[] for _ in SENTENCES]
"""No phrases for any sentence."""
DECODING = DecodingConfig(beam=4, max_length=20)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs, the last with other subwords."""
    folder = tmp_path_factory.mktemp("options")
    made = []
    for number, (seed, corpus) in enumerate([(1, 1), (2, 1), (3, 9)]):
        run = folder / str(number)
        translator = random_translator(run, seed, corpus)
        config = replace(translator.config, decoding=DECODING)
        save_model(run / "best", replace(translator, config=config), {"step": 1})
        made.append(run)
    return made


@pytest.fixture(scope="module")
def translator(runs: list[Path]) -> Translator:
    return load_translator(runs[0] / "best")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sentences.txt"
    path.write_text("".join(f"{sentence}\n" for sentence in SENTENCES))
    return path


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    """The lines that a command prints; it has nothing to say on stderr but that translations are cut."""
    capsys.readouterr()
    assert main(["translate", *map(str, words)]) == 0
    output, error = capsys.readouterr()
    assert all("translations are unfinished" in line for line in error.splitlines())
    return output.split("\n")[:-1]


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    return refusal(capsys, "translate", *map(str, words))


def expected_of(models: Translator, sentence: str, n_best: int) -> list[tuple[float, float, str]]:
    """What the search itself finds for one sentence."""
    ids = models.source.encode([sentence])[0]
    limit = min(default_limit(len(ids) + 1), DECODING.max_length)
    src = torch.tensor([[*ids, EOS]])
    (found,) = beam_search(models.models, src, bos=BOS, eos=EOS, beam=4, n_best=n_best, max_length=limit)
    texts = [" ".join(text.split()) for text in models.target.decode([one.tokens for one in found])]
    return [(one.score, one.log_probability, text) for one, text in zip(found, texts, strict=True)]


def test_a_line_is_numbered_after_those_of_earlier_parts_of_a_file() -> None:
    found = [[Translation("a\tb", -0.5, -1.25)], [Translation("c", -2.0, -8.0), Translation("d", -3.0, -12.0)]]
    assert table(found, scores=False, before=40) == ["41\ta b", "42\tc", "42\td"]
    assert table(found, scores=True)[0] == "1\t-0.500000\t-1.250000\ta b"


def test_n_best_lines_have_number_score_log_probability_and_text(
    runs: list[Path], translator: Translator, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, "--run", runs[0], "--file", file, "--n-best", 3, "--scores")
    assert len(lines) == 3 * len(SENTENCES)
    for row, sentence in enumerate(SENTENCES):
        expected = expected_of(translator, sentence, 3)
        for line, (score, log_probability, text) in zip(lines[3 * row : 3 * row + 3], expected, strict=True):
            number, *columns, shown = line.split("\t")
            assert number == str(row + 1)
            assert [float(column) for column in columns] == pytest.approx([score, log_probability], abs=1e-4)
            assert " ".join(shown.split()) == text
    without = printed(capsys, "--run", runs[0], "--file", file, "--n-best", 3)
    assert without == ["\t".join([line.split("\t")[0], line.split("\t")[3]]) for line in lines]


def test_scores_alone_are_those_of_the_plain_translations(
    runs: list[Path], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for beam in (1, 4):
        plain = printed(capsys, "--run", runs[0], "--file", file, "--beam", beam)
        scored = printed(capsys, "--run", runs[0], "--file", file, "--beam", beam, "--scores")
        assert [line.split("\t")[3] for line in scored] == [line.replace("\t", " ") for line in plain]


def test_an_empty_sentence_stays_empty(translator: Translator) -> None:
    demands = SearchOptions(n_best=2, prefixes=["", "I"], constraints=[[], ["six"]])
    empty, full = alternatives(translator.with_decoding(replace(DECODING, min_length=3)), ["", SENTENCES[0]], demands)
    assert [tuple(one) for one in empty] == [("", 0.0, 0.0, True)]
    assert len(full) == 2


def test_each_translation_begins_as_its_line_demands(
    runs: list[Path], translator: Translator, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = ["The", "", "Nine of", "", "six", "It"]
    (tmp_path / "starts").write_text("".join(f"{start}\n" for start in starts))
    found = printed(capsys, "--run", runs[0], "--file", file, "--prefixes", tmp_path / "starts")
    plain = translate(translator.with_decoding(DECODING), SENTENCES)
    for start, one, free in zip(starts, found, plain, strict=True):
        assert one.startswith(start)
        assert start or one == free


def test_a_phrase_of_characters_that_subwords_leave_out_is_refused(translator: Translator) -> None:
    assert translator.target.encode(["\x07"]) == [[]]
    with pytest.raises(DataError, match=r"'.x07' of sentence 2 has no subwords"):
        phrases_of(translator, [["six"], ["\x07"]])


def test_each_translation_contains_its_words_as_whole_ones(
    runs: list[Path], file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [["six"], [], ["Vienna", "at half"], ["two"], ["!"], ["the", "the train"]]
    (tmp_path / "words").write_text("".join("\t".join(some) + "\n" for some in words))
    found = printed(capsys, "--run", runs[0], "--file", file, "--beam", 12, "--constraints", tmp_path / "words")
    for some, one in zip(words, found, strict=True):
        for word in some:
            assert re.search(rf"(?<!\w){word}(?!\w)", one) or (word in one and word == "!"), (word, one)


def test_a_word_stays_whole_where_the_model_would_add_letters(translator: Translator) -> None:
    model = copy.deepcopy(translator.model)
    letters = [number for number, piece in enumerate(translator.target.pieces()) if piece.isalpha()]
    with torch.no_grad():
        model.generator.bias[letters] += 20
    demands = SearchOptions(constraints=[["six"], ["Vienna"]])
    changed = replace(translator, model=model).with_decoding(replace(DECODING, beam=8))
    found = alternatives(changed, SENTENCES[:2], demands)
    for word, row in zip(("six", "Vienna"), found, strict=True):
        assert re.search(rf"(?<!\w){word}(?!\w)", row[0].text)


@pytest.mark.parametrize(
    ("shortest", "demands"),
    [
        (50, SearchOptions()),
        (50, SearchOptions(scores=False)),
        (0, SearchOptions(prefixes=["six " * 25])),
        (0, SearchOptions(constraints=[["six " * 25]])),
        (50, SearchOptions(sampling=Sampling())),
    ],
)
@pytest.mark.parametrize("beam", [1, 2])
def test_a_short_sentence_has_as_many_steps_as_is_demanded_of_it(
    translator: Translator, shortest: int, demands: SearchOptions, beam: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 * len(translator.source.encode(["six"])[0]) + 12 < 25
    decoding = DecodingConfig(beam=beam, max_length=120, min_length=shortest)
    ((found,),) = alternatives(translator.with_decoding(decoding), ["six"], demands)
    assert len(translator.target.encode([found.text])[0]) >= 25
    assert capsys.readouterr().err == ""


def test_a_phrase_that_does_not_fit_is_named(translator: Translator, capsys: pytest.CaptureFixture[str]) -> None:
    demands = SearchOptions(constraints=[["six"], ["six", "the train to Vienna leaves at half past seven"]])
    short = replace(DECODING, max_length=5)
    found = alternatives(translator.with_decoding(short), SENTENCES[:2], demands)
    assert all(found)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("[translate] sentence 2: 1 of 1 translations lack ")
    assert "'the train to Vienna leaves at half past seven'" in error


def test_a_word_ends_where_no_letter_follows(translator: Translator) -> None:
    assert all(map(begins_anew, ["▁six", "▁", ".", ",", "-", "▁."]))
    assert not any(map(begins_anew, ["s", "es", "7", "\u0301"]))
    (phrases,) = phrases_of(translator, [["six", "at 7", "six!", "六"]])
    assert [phrase.whole for phrase in phrases] == [True, True, False, False]
    # Where words are not separated, no blank is demanded before one
    assert translator.target.pieces().index("▁") != phrases[3].tokens[0]


@pytest.mark.parametrize(
    ("rule", "holds"),
    [
        ({"min_length": 15}, lambda ids: len(ids) >= 15),
        ({"no_repeat_ngram": 1}, lambda ids: len(set(ids)) == len(ids)),
    ],
)
@pytest.mark.parametrize(
    "options",
    [SearchOptions(), SearchOptions(scores=False), SearchOptions(sampling=Sampling()), SearchOptions(constraints=FREE)],
)
@pytest.mark.parametrize("beam", [1, 4])
def test_minimum_length_and_ngrams_hold_and_change_something(
    translator: Translator,
    rule: dict[str, int],
    holds: Callable[[list[int]], bool],
    options: SearchOptions,
    beam: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoding = replace(DECODING, beam=beam)
    seen: list[list[int]] = []

    def spelled(ids: list[list[int]]) -> list[str]:
        seen.extend(ids)
        return ["" for _ in ids]

    monkeypatch.setattr(translator.target, "decode", spelled)
    alternatives(translator.with_decoding(decoding), SENTENCES, options)
    free = seen.copy()
    seen.clear()
    alternatives(translator.with_decoding(replace(decoding, **rule)), SENTENCES, options)
    assert all(map(holds, seen))
    assert not all(map(holds, free))


def test_samples_depend_on_seed_and_place_and_not_on_the_batch(translator: Translator) -> None:
    def draw(seed: int, size: int = 64, samples: int = 2) -> list[list[str]]:
        how = SearchOptions(sampling=Sampling(samples, temperature=1.3, seed=seed))
        found = alternatives(translator.with_decoding(replace(DECODING, batch_sentences=size)), SENTENCES, how)
        return [[one.text for one in row] for row in found]

    first = draw(0)
    assert first == draw(0, size=2)
    assert first == [row[:2] for row in draw(0, samples=3)]
    assert first != draw(1)
    assert all(len(row) == 2 for row in first)


def test_sampling_is_printed_like_n_best_lists(
    runs: list[Path], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--run", runs[0], "--file", file, "--sample", 2, "--top-k", 5, "--top-p", 0.9, "--scores"]
    lines = printed(capsys, *words, "--temperature", 0.8, "--seed", 3)
    assert [line.split("\t")[0] for line in lines] == [str(row) for row in range(1, 7) for _ in range(2)]
    assert lines == printed(capsys, *words, "--temperature", 0.8, "--seed", 3)
    assert lines != printed(capsys, *words, "--temperature", 0.8, "--seed", 4)
    assert lines != printed(capsys, *words, "--temperature", 3, "--seed", 3)
    plain = printed(capsys, "--run", runs[0], "--file", file, "--beam", 1)
    for alone in (["--top-k", 1], ["--top-p", 1e-9]):
        greedy = printed(capsys, "--run", runs[0], "--file", file, "--sample", 1, *alone)
        assert [line.split("\t")[1] for line in greedy] == [line.replace("\t", " ") for line in plain]


def test_an_ensemble_of_runs_translates_with_all_of_them(
    runs: list[Path], translator: Translator, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = load_translator(runs[1] / "best")
    both = replace(translator, others=(other.model,))
    words = ["--run", runs[0], "--file", file]
    found = printed(capsys, *words, "--ensemble", runs[1], "--scores")
    for line, sentence in zip(found, SENTENCES, strict=True):
        ((score, _, text),) = expected_of(both, sentence, 1)
        assert float(line.split("\t")[1]) == pytest.approx(score, abs=1e-4)
        assert " ".join(line.split("\t")[3].split()) == text
    together = printed(capsys, *words, "--ensemble", runs[1])
    assert together != printed(capsys, *words)
    assert [line.replace("\t", " ") for line in together] == [line.split("\t")[3] for line in found]


def test_a_translation_may_be_required_to_be_longer_than_the_default_allows(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--max-length", "270", "--min-length", "265", "--beam", "1"]
    (line,) = printed(capsys, "--run", runs[0], *words, "six")
    assert len(line.split()) >= 265


def test_runs_with_other_subwords_make_no_ensemble(
    runs: list[Path], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, "--run", runs[0], "--file", file, "--ensemble", runs[1], "--ensemble", runs[2])
    assert f"--ensemble {runs[2]} differs from {runs[0]} in its source subwords" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--n-best", "5"], "--n-best 5 is above the beam of 4"),
        (["--n-best", "0"], "'0' is not a whole number from 1 up"),
        (["--sample", "2", "--n-best", "2"], "--n-best has no effect on --sample"),
        (["--sample", "2", "--beam", "2"], "--beam has no effect on --sample"),
        (["--sample", "2", "--constraints", "x"], "--constraints has no effect on --sample"),
        (["--temperature", "2"], "--temperature has no effect on a search: add --sample N"),
        (["--seed", "2"], "--seed has no effect on a search"),
        (["--sample", "1", "--seed", "-1"], "'-1' is not a whole number from 0 up"),
        (["--sample", "1", "--temperature", "0"], "'0' is not a number above 0"),
        (["--sample", "1", "--temperature", "nan"], "'nan' is not a number above 0"),
        (["--sample", "1", "--top-p", "1.5"], "'1.5' is not a number above 0 and at most 1"),
        (
            ["--min-length", "300", "--max-length", "300"],
            "decoding.min_length is 300, but a translation has at most",
        ),
        (["--min-length", "20"], "decoding.min_length is 20, but a translation has at most 20 steps"),
        (["--prefixes", "{one line}"], "--prefixes has 1 lines for 6 sentences"),
        (["--constraints", "{one line}"], "--constraints has 1 lines for 6 sentences"),
        (["--prefixes", "{long}"], "line 2 has 41 subwords, but a translation has at most 20 steps"),
        (["--constraints", "{tabs}"], "line 1 has nothing before, between or after its tabs"),
        (["--prefixes", "{repeats}", "--no-repeat-ngram", "1"], "sentence 3 has no translation under these options"),
        (["--prefixes", "missing"], "missing: No such file"),
        (["--ensemble", "missing"], "there is no trained model in missing/best"),
    ],
)
def test_a_bad_combination_is_answered_with_one_line(
    words: list[str], message: str, runs: list[Path], file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {
        "{one line}": "a\n",
        "{long}": "\n" + "a " * 41 + "\n\n\n\n\n",
        "{tabs}": "a\t\tb\n\n\n\n\n\n",
        "{repeats}": "\n\nsix six\n\n\n\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    given = [str(tmp_path / word) if word in texts else word for word in words]
    assert message in refused(capsys, "--run", runs[0], "--file", file, *given)


def test_demands_on_an_empty_sentence_are_refused(translator: Translator) -> None:
    for demands in (SearchOptions(prefixes=["a", ""]), SearchOptions(constraints=[["a"], []])):
        with pytest.raises(DataError, match="line 1 is not empty, but sentence 1 has no subwords"):
            alternatives(translator.with_decoding(DECODING), [" ", "six"], demands)


def test_typed_sentences_have_no_lines_in_files(
    runs: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    starts = runs[0].parent / "starts"
    starts.write_text("a\n")
    assert "give sentences or --file" in refused(capsys, "--run", runs[0], "--prefixes", starts)
    typed = iter([SENTENCES[0], ""])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    lines = printed(capsys, "--run", runs[0], "--n-best", 2)
    assert [line.split("\t")[0] for line in lines[1:]] == ["1", "1"]


def test_the_defaults_of_sampling_are_those_that_are_documented() -> None:
    assert Sampling() == Sampling(samples=1, temperature=1.0, top_k=None, top_p=1.0, seed=0)


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ([], {}),
        (["--seed", "3"], {"seed": 3}),
        (["--top-p", "0.5"], {"top_p": 0.5}),
        (["--top-p", "1"], {"top_p": 1.0}),
    ],
)
def test_what_is_not_asked_of_sampling_has_its_default(
    words: list[str], changed: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser, _ = parser_of("translate", monkeypatch)
    found = search_options(parser.parse_args(["--sample", "2", *words]))
    assert found.sampling == replace(Sampling(2), **changed)


def test_an_ensemble_with_fewer_learned_positions_than_the_first_model_reads_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each alone, and the shorter one first, translate."""
    positions = {"model.preset": "mbart", "training.steps": 1, "decoding.max_length": 20, "training.max_length": 90}
    train(tiny(tmp_path / "long", {**positions, "model.max_positions": 200, "training.max_length": 150}))
    train(tiny(tmp_path / "short", {**positions, "model.max_positions": 100}))
    error = refused(capsys, "--run", tmp_path / "long", "--ensemble", tmp_path / "short", "six")
    assert f"{tmp_path / 'short'} has learned positions for 99 subwords, but {tmp_path / 'long'} reads" in error
    runs = ["--run", str(tmp_path / "short"), "--ensemble", str(tmp_path / "long")]
    assert main(["translate", *runs, "six " * 200]) == 0


def test_a_translation_that_divides_into_more_subwords_than_positions_is_aligned_as_far(tmp_path: Path) -> None:
    positions = {"model.preset": "mbart", "model.max_positions": 100, "training.max_length": 90, "training.steps": 1}
    train(tiny(tmp_path / "run", positions))
    translator = load_translator(tmp_path / "run" / "best")
    (links,) = align(translator, ["A train leaves."], ["q " * 300])
    assert links
