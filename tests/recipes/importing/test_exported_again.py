"""An imported model goes back to other programs' formats, or is refused by one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import ctranslate2
import pytest
import torch
from ctranslate2.converters import TransformersConverter
from transformers import AutoTokenizer

from recipes.translation.errors import ConfigError
from recipes.translation.export import ctranslate2_model, huggingface_model, onnx_model
from recipes.translation.importing.published_model import read_model
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import load_config
from recipes.translation.text.subwords import EOS, PAD
from recipes.translation.translating import ctranslate2_engine
from recipes.translation.translating.translate import translate
from tests.recipes.export.translators import as_saved, under
from tests.recipes.importing import published
from tests.recipes.random_translator import translator_of

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
    huggingface_model.write(as_saved(imported), tmp_path / "exported")
    theirs = published.model_of(tmp_path / "exported")
    tokenizer = published.tokenizer_of(tmp_path / "exported")
    batch = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    symbols = imported.source.symbols
    there = torch.tensor(huggingface_model.ids_there(as_saved(imported))[0])
    ours = [symbols.source(row) for row in imported.source.encode(SENTENCES)]
    assert [[each for each in row if each != PAD] for row in there[batch.input_ids].tolist()] == ours
    tgt = torch.tensor([[*symbols.start, 5, 9, 40]] * len(SENTENCES))
    with torch.no_grad():
        expected = imported.model.generator(imported.model(there[batch.input_ids], tgt))[..., there]
        found = theirs(**batch, decoder_input_ids=there.argsort()[tgt]).logits
    # A tied projection adds the same to every logit
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=1e-5, atol=1e-5)
    assert theirs.generation_config.suppress_tokens == [len(there) - 1]
    assert theirs.generation_config.decoder_start_token_id == len(there) - 1


def test_imported_models_are_not_exported_as_onnx(imported: Translator, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^model\.preset opus_mt has the architecture marian with activation swish; "
    ):
        onnx_model.write(imported, tmp_path / "exported")


KINDS: dict[str, tuple[Callable[[Path], Path], tuple[str, str], str]] = {
    "marian": (published.marian, ("", ""), ""),
    "m2m100": (published.m2m100, ("en", "de"), "__de__"),
    "nllb": (published.nllb, ("eng_Latn", "deu_Latn"), "deu_Latn"),
    "mbart50": (published.mbart, ("en_XX", "de_DE"), "de_DE"),
    "mbart": (partial(published.mbart, fifty=False), ("en_XX", "de_DE"), "de_DE"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_imported_model_leaves_for_transformers_and_ctranslate2_with_the_same_translations(
    kind: str, tmp_path: Path
) -> None:
    made, languages, tag = KINDS[kind]
    folder = made(tmp_path / "model")
    translator = read_model(folder, Path("run"), *languages).translator
    with torch.no_grad():
        translator.model.generator.weight.data[9] *= 1.1  # as a training changes it
    decoding = replace(translator.config.decoding, beam=1, max_ratio=50.0, max_length=12)
    translator = translator.with_decoding(decoding)
    ours = translate(translator, SENTENCES)
    assert len(set(ours)) > 1
    ctranslate2_model.write(as_saved(translator), tmp_path / "ctranslate2", None)
    assert ctranslate2_engine.translate(ctranslate2_engine.load(tmp_path / "ctranslate2"), SENTENCES) == ours

    huggingface_model.write(as_saved(translator), tmp_path / "hf")
    with warnings.catch_warnings(action="ignore"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
        TransformersConverter(str(tmp_path / "hf")).convert(str(tmp_path / "converted"))
    batch = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    if tag:
        before = published.tokenizer_of(folder, *languages)
        assert batch.input_ids.tolist() == before(SENTENCES, padding=True).input_ids
    ids = published.model_of(tmp_path / "hf").generate(**batch)
    assert [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)] == ours
    prefix = [[tag] for _ in SENTENCES] if tag else None
    pieces = [tokenizer.convert_ids_to_tokens(row) for row in tokenizer(SENTENCES).input_ids]
    found = ctranslate2.Translator(str(tmp_path / "converted"), intra_threads=1).translate_batch(
        pieces, target_prefix=prefix, beam_size=1, max_decoding_length=13 if tag else 12
    )
    rows = [tokenizer.convert_tokens_to_ids(each.hypotheses[0])[:13] for each in found]
    texts = [tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]
    assert all(mine.startswith(text) or text.startswith(mine) for mine, text in zip(ours, texts, strict=True))


@pytest.mark.parametrize("length", [0, 3])
def test_ctranslate2_counts_a_translation_without_the_tag_it_begins_with(length: int, tmp_path: Path) -> None:
    translator = read_model(published.nllb(tmp_path / "model"), Path("run"), "eng_Latn", "deu_Latn").translator
    with torch.no_grad():
        translator.model.generator.bias[EOS] += 14
    decoding = replace(translator.config.decoding, beam=1, min_length=length)
    ctranslate2_model.write(as_saved(translator.with_decoding(decoding)), tmp_path / "exported", None)
    found = ctranslate2_engine.translate(ctranslate2_engine.load(tmp_path / "exported"), SENTENCES)
    assert found == translate(translator.with_decoding(decoding), SENTENCES)
    assert all(map(bool, found)) == bool(length)


def test_a_bias_that_transformers_has_no_place_for_is_refused(tmp_path: Path) -> None:
    translator = read_model(published.m2m100(tmp_path / "model"), Path("run"), "en", "de").translator
    with torch.no_grad():
        translator.model.generator.bias[9] = 0.1
    with pytest.raises(ConfigError, match=r"^the model's projection has a bias, .*export it --to ctranslate2"):
        huggingface_model.write(as_saved(translator), tmp_path / "exported")


def test_transformers_reads_the_tag_of_a_language_in_an_exported_model_as_in_the_published_one(
    imported: Translator, tmp_path: Path
) -> None:
    huggingface_model.write(as_saved(imported), tmp_path / "exported")
    sentence = ">>xx<< A small dog!"
    ids = published.tokenizer_of(tmp_path / "exported")(sentence).input_ids
    pieces = imported.source.pieces()
    there = huggingface_model.ids_there(as_saved(imported))[0]
    assert pieces[there[ids[0]]] == "\u2581>>xx<<"
    assert [there[each] for each in ids] == imported.source.symbols.source(imported.source.encode([sentence])[0])


def student_of(kind: str, folder: Path) -> Translator:
    """A model of this recipe's own kind with an imported teacher's subwords."""
    made, languages, _ = KINDS[kind]
    teacher = read_model(made(folder / "model"), Path("run"), *languages).translator
    config = load_config(None, {"model.preset": "tiny", "model.d_model": 16, "model.heads": 2, "run": str(folder)})
    return translator_of(config, teacher.source, teacher.target)


@pytest.mark.parametrize("kind", KINDS)
def test_a_students_symbols_of_an_imported_teacher_are_exported_or_refused(kind: str, tmp_path: Path) -> None:
    student = as_saved(student_of(kind, tmp_path))
    with pytest.raises(ConfigError, match=r"^the subwords are those of an imported model, with other symbols"):
        onnx_model.write(student, tmp_path / "onnx")
    if kind == "marian":
        huggingface_model.write(student, tmp_path / "hf")
        return
    with pytest.raises(ConfigError, match=r"^the subwords are those of an imported model with language tags"):
        huggingface_model.write(student, tmp_path / "hf")


@pytest.mark.parametrize("kind", [kind for kind, (_, _, tag) in KINDS.items() if tag])
def test_an_exported_tokenizer_has_the_models_own_languages(kind: str, tmp_path: Path) -> None:
    """Whatever the settings call them: the columns of a file with the data, say."""
    made, languages, _ = KINDS[kind]
    translator = read_model(made(tmp_path / "model"), Path("run"), *languages).translator
    columns = replace(translator, config=translator.config.with_languages("column a", "column b"))
    huggingface_model.write(as_saved(columns), tmp_path / "hf")
    with warnings.catch_warnings(action="ignore"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == languages


def test_an_exported_model_with_tags_is_imported_again(imported: Translator, tmp_path: Path) -> None:
    huggingface_model.write(as_saved(imported), tmp_path / "exported")
    again = read_model(tmp_path / "exported", Path("run")).translator
    sentences = [*SENTENCES, ">>xx<< A small dog!"]
    assert again.source.encode(sentences) == imported.source.encode(sentences)
    greedy = replace(imported.config.decoding, beam=1)
    assert translate(again.with_decoding(greedy), sentences) == translate(imported.with_decoding(greedy), sentences)
