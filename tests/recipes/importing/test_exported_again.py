"""An imported model goes back to other programs' formats, or is refused by one line."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.translation.errors import ConfigError
from recipes.translation.export import ctranslate2_engine, ctranslate2_model, huggingface_model, onnx_model
from recipes.translation.importing.published_model import read_model
from recipes.translation.run_folder.translator import Translator
from recipes.translation.text.subwords import PAD
from recipes.translation.translating.translate import translate
from tests.recipes.export.translators import as_saved, under
from tests.recipes.importing import published

pytestmark = pytest.mark.formats

SENTENCES = [
    "The train to Vienna leaves at half past seven.",
    "A small dog!",
    "abcdefg hij klmno Zw\u00f6lf",
    "one two",
]


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    folder = published.marian(tmp_path_factory.mktemp("published") / "model")
    return read_model(folder, Path("run")).translator


def test_ctranslate2_translates_an_imported_marian_model_as_torch_does(imported: Translator, tmp_path: Path) -> None:
    ctranslate2_model.write(as_saved(imported), tmp_path / "exported", None)
    found = ctranslate2_engine.load(tmp_path / "exported")
    decoding = replace(imported.config.decoding, beam=1)
    expected = translate(imported.with_decoding(decoding), SENTENCES)
    assert len(set(expected)) > 1
    assert ctranslate2_engine.translate(under(found, decoding), SENTENCES) == expected


def test_transformers_has_the_same_logits_of_an_imported_marian_model_again(
    imported: Translator, tmp_path: Path
) -> None:
    from transformers import AutoModelForSeq2SeqLM

    huggingface_model.write(as_saved(imported), tmp_path / "exported")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "exported").eval()
    tokenizer = published.tokenizer_of(tmp_path / "exported")
    batch = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    symbols = imported.source.symbols
    ours = [symbols.source(row) for row in imported.source.encode(SENTENCES)]
    assert [[each for each in row if each != PAD] for row in batch.input_ids.tolist()] == ours
    tgt = torch.tensor([[*symbols.start, 5, 9, 40]] * len(SENTENCES))
    with torch.no_grad():
        expected = imported.model.generator(imported.model(batch.input_ids, tgt))
        found = theirs(**batch, decoder_input_ids=tgt).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert theirs.generation_config.suppress_tokens == [PAD]
    assert theirs.generation_config.decoder_start_token_id == PAD


def test_imported_models_are_not_exported_as_onnx(imported: Translator, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^model\.preset opus_mt has the architecture marian with activation swish; "
    ):
        onnx_model.write(imported, tmp_path / "exported")


@pytest.mark.parametrize("write", [huggingface_model.write, lambda *each: ctranslate2_model.write(*each, None)])
def test_other_architectures_are_not_exported(write: object, tmp_path: Path) -> None:
    translator = read_model(published.m2m100(tmp_path / "model"), Path("run"), "en", "de").translator
    with pytest.raises(
        ConfigError, match=r"^model\.preset m2m100 has the architecture m2m100, which is not exported; "
    ):
        write(as_saved(translator), tmp_path / "exported")  # type: ignore[operator]


def test_transformers_reads_the_tag_of_a_language_in_an_exported_model_as_in_the_published_one(
    imported: Translator, tmp_path: Path
) -> None:
    huggingface_model.write(as_saved(imported), tmp_path / "exported")
    sentence = ">>xx<< A small dog!"
    ids = published.tokenizer_of(tmp_path / "exported")(sentence).input_ids
    pieces = imported.source.pieces()
    assert pieces[ids[0]] == "\u2581>>xx<<"
    assert ids == imported.source.symbols.source(imported.source.encode([sentence])[0])
