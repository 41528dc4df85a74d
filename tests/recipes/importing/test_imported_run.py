"""An imported run works with the recipe's commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from models import default_limit
from recipes.translation.commands import main
from recipes.translation.data.batches import TokenBatches
from recipes.translation.data.drawn_batches import Drawing, DrawnBatches
from recipes.translation.errors import ConfigError, DataError
from recipes.translation.importing.published_model import import_model, read_model
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.settings.config import load_config
from recipes.translation.text.subwords import EOS, PAD, UNK
from recipes.translation.train import train
from recipes.translation.translating.translate import SearchOptions, Task, alternatives, search_rows
from tests.recipes.importing import published
from tests.recipes.importing.tuned import PAIRS, files, tuning
from tests.recipes.plain_scores import log_probability
from tests.recipes.saved import load_weights, saved_file

pytestmark = pytest.mark.formats


@pytest.mark.parametrize(
    ("make", "languages"),
    [(published.marian, ("", "")), (published.mbart, ("en_XX", "de_DE"))],
    ids=["marian", "mbart"],
)
def test_training_goes_on_from_an_imported_run_with_the_loss_of_transformers(
    make: object, languages: tuple[str, str], tmp_path: Path
) -> None:
    folder = make(tmp_path / "model")
    import_model(folder, tmp_path / "run", *languages)
    config = load_config(saved_file(tmp_path / "run", "best", "config.yaml"), tuning(tmp_path / "run", tmp_path))
    train(config, insist=True)
    found, before = load_weights(tmp_path / "tuned" / "last"), load_weights(tmp_path / "run" / "best")
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    tokenizer = published.tokenizer_of(folder, *languages)
    sources, targets = zip(*PAIRS, strict=True)
    tokens = tokenizer(list(sources), text_target=list(targets), padding=True, return_tensors="pt")
    labels = tokens.pop("labels")
    pad = tokenizer.pad_token_id
    theirs = published.model_of(folder)
    with torch.no_grad():
        start = torch.full((len(PAIRS), 1), theirs.config.decoder_start_token_id)
        given = torch.cat((start, labels[:, :-1]), 1)
        expected = theirs(**tokens, decoder_input_ids=given, labels=labels.masked_fill(labels == pad, -100)).loss
    # Before the first step and after the last
    records = [each for each in read_metrics(tmp_path / "tuned" / "metrics.jsonl") if "valid_loss" in each]
    assert [each["valid_loss"] for each in records] == [pytest.approx(expected.item(), rel=1e-5)] * 2


def test_the_commands_work_on_an_imported_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = published.m2m100(tmp_path / "model")
    run = str(tmp_path / "run")
    assert main(["import", str(folder), "--run", run, "--source", "en", "--target", "de"]) == 0
    said = capsys.readouterr().out
    assert "en to de" in said
    assert f"train --config {run}/best/config.yaml --run NEW --training.start_from {run}" in said
    assert main(["translate", "--run", run, "--beam", "2", "--n-best", "2", "--scores", "A small dog!"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    source, target = files(tmp_path, PAIRS)
    assert main(["evaluate", "--run", run, "--sources", source, "--references", target, "--beam", "1"]) == 0


def test_the_score_of_a_translation_is_that_of_the_search(tmp_path: Path) -> None:
    """The tag of the target is given, and no part of either."""
    translator = read_model(published.m2m100(tmp_path / "model"), Path("run"), "en", "de").translator
    ids = translator.source.encode(["A small dog!"])
    ((best, *_),) = alternatives(translator, ["A small dog!"], SearchOptions(n_best=2))
    task = Task(ids[0])
    (((tokens, *_),),) = search_rows(translator, [task], SearchOptions(), [0])
    if len(tokens) < min(default_limit(len(ids[0]) + 1), translator.config.decoding.max_length):
        tokens = [*tokens, EOS]
    found = log_probability(translator.model, ids[0], tokens, translator.source.symbols)
    assert found == pytest.approx(best.log_probability, rel=1e-5)


def test_a_sentence_longer_than_the_learned_positions_is_refused_before_training(tmp_path: Path) -> None:
    import_model(published.mbart(tmp_path / "model"), tmp_path / "run", "en_XX", "de_DE")
    given = tuning(tmp_path / "run", tmp_path)
    best = saved_file(tmp_path / "run", "best", "config.yaml")
    with pytest.raises(
        ConfigError, match=r"^training\.max_length is 63, but the model has learned positions for 62 subwords"
    ):
        train(load_config(best, {**given, "training.max_length": 63}), insist=True)
    long = [*PAIRS, ("one " * 70, "eins")]
    given |= {"data.valid": files(tmp_path / "run", long)}
    with pytest.raises(
        DataError, match=r"^data\.valid: the source of pair 4 has \d+ subwords, but the model has learned"
    ):
        train(load_config(best, given), insist=True)


def test_a_target_language_before_the_sentence_is_one_subword(tmp_path: Path) -> None:
    folder = published.marian(tmp_path / "model")
    translator = read_model(folder, Path("run")).translator
    (found,) = translator.source.encode([">>xx<< A small dog!"])
    tokenizer = published.tokenizer_of(folder)
    expected = tokenizer([">>xx<< A small dog!", "A small dog!"]).input_ids
    pieces = translator.source.pieces()
    assert pieces[found[0]] == "\u2581>>xx<<"
    assert found[1:] == translator.source.encode(["A small dog!"])[0]
    assert (expected[0][0], expected[0][1:]) == (json.loads((folder / "vocab.json").read_text())[">>xx<<"], expected[1])


def test_sampled_subwords_of_an_imported_model_are_of_its_vocabulary_and_spell_the_same(tmp_path: Path) -> None:
    subwords = read_model(published.marian(tmp_path / "model"), Path("run")).translator.source
    text = "Two trains leave at half past seven."
    drawn = subwords.sample(subwords.encode([text] * 200), range(200), 0.2)
    assert len({tuple(row) for row in drawn}) > 100
    assert all(PAD < each < len(subwords) for row in drawn for each in row)
    known = [row for row in drawn if UNK not in row]
    assert set(subwords.decode(known)) == set(subwords.decode(subwords.encode([text])))


def test_batches_of_sampled_subwords_have_the_symbols_of_the_imported_model(tmp_path: Path) -> None:
    translator = read_model(published.m2m100(tmp_path / "model"), Path("run"), "en", "de").translator
    source, target = translator.source, translator.target
    sides = (source.encode([pair[0] for pair in PAIRS]), target.encode([pair[1] for pair in PAIRS]))
    plain = TokenBatches(*sides, batch_tokens=100, seed=0, symbols=source.symbols)
    drawn = DrawnBatches(plain, Drawing(source, 0.5), Drawing(target, 0.0))
    batch = drawn.batch([0, 1, 2])
    assert batch.src[:, 0].tolist() == [source.symbols.prefix[0]] * 3
    assert batch.tgt_in[:, :2].tolist() == [list(source.symbols.start)] * 3
    assert torch.equal(batch.tgt_out, plain.batch([0, 1, 2]).tgt_out)
