"""A model written for Hugging Face transformers gives there what it gives here."""

from __future__ import annotations

import math
import warnings
from dataclasses import fields, replace
from pathlib import Path

import ctranslate2
import pytest
import torch
from ctranslate2.converters import TransformersConverter
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PretrainedConfig

from models import length_normaliser
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.errors import ConfigError
from recipes.translation.export import huggingface_model
from recipes.translation.export.lost_settings import lost_settings
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import DecodingConfig, SubwordConfig, load_config
from recipes.translation.text.model_text import ModelText
from recipes.translation.text.subwords import BOS, EOS, PAD, Subwords, train_subwords
from recipes.translation.translating.translate import translate
from tests.recipes.export.translators import SENTENCES, as_saved, random_translator, recorded
from tests.recipes.random_translator import translator_of
from tests.recipes.tiny import tiny

pytestmark = pytest.mark.formats


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> Subwords:
    return trained([side for pair in pairs(200, 1) for side in pair], 360, tmp_path_factory.mktemp("joint"))


@pytest.fixture(scope="module")
def german(tmp_path_factory: pytest.TempPathFactory) -> Subwords:
    return trained([pair.target for pair in pairs(200, 1)], 330, tmp_path_factory.mktemp("german"))


def trained(sentences: list[str], size: int, folder: Path) -> Subwords:
    train_subwords(sentences, folder / "model", SubwordConfig(vocab_size=size))
    return Subwords.load(folder / "model.model")


def assert_same_log_probabilities(translator: Translator, folder: Path) -> None:
    """Compare every logit of a padded batch, up to a rounding of float32."""
    theirs = AutoModelForSeq2SeqLM.from_pretrained(folder)
    source_there, target_there = map(torch.tensor, huggingface_model.ids_there(as_saved(translator)))
    sources = [[*ids, EOS] for ids in translator.source.encode(SENTENCES[:3])]
    targets = [[BOS, *ids] for ids in translator.target.encode(SENTENCES[3:6])]
    src = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sources], True, PAD)
    tgt = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in targets], True, PAD)
    with torch.no_grad():
        expected = translator.model.generator(translator.model(src, tgt))[..., target_there]
        ids = source_there.argsort()[src], target_there.argsort()[tgt]
        found = theirs(input_ids=ids[0], attention_mask=src != PAD, decoder_input_ids=ids[1]).logits
    real = tgt != PAD
    torch.testing.assert_close(found[real].log_softmax(-1), expected[real].log_softmax(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("tie", ["none", "target", "all"])
def test_log_probabilities_are_those_of_the_model(norm: str, tie: str, joint: Subwords, tmp_path: Path) -> None:
    translator = random_translator(joint, tmp_path / "run", {"model.norm": norm, "model.tie": tie}, end=0.0)
    huggingface_model.write(as_saved(translator), tmp_path / "exported")
    assert_same_log_probabilities(translator, tmp_path / "exported")


def two_vocabularies(norm: str, joint: Subwords, german: Subwords, run: Path) -> Translator:
    config = tiny(run, {"model.norm": norm, "model.tie": "target", "subwords.joint": False})
    return translator_of(config, joint, german)


def test_two_vocabularies_are_kept_apart(joint: Subwords, german: Subwords, tmp_path: Path) -> None:
    translator = two_vocabularies("post", joint, german, tmp_path / "run")
    huggingface_model.write(as_saved(translator), tmp_path / "exported")
    assert_same_log_probabilities(translator, tmp_path / "exported")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends sacremoses
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    ids = tokenizer(SENTENCES[0], text_target=pairs(1, 3)[0].target)
    assert ids["input_ids"] == [*joint.encode([SENTENCES[0]])[0], EOS]
    assert ids["labels"] == [*german.encode([pairs(1, 3)[0].target])[0], EOS]


def test_two_vocabularies_before_the_norm_are_refused_in_one_line(
    joint: Subwords, german: Subwords, tmp_path: Path
) -> None:
    translator = two_vocabularies("pre", joint, german, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"two vocabularies, of 360 and 330 subwords.*--model\.norm post"):
        huggingface_model.write(as_saved(translator), tmp_path / "exported")


@pytest.mark.parametrize("rules", [{}, {"decoding.min_length": 9, "decoding.no_repeat_ngram": 2}])
def test_text_goes_in_and_the_same_translation_comes_out(
    rules: dict[str, int], joint: Subwords, tmp_path: Path
) -> None:
    translator = random_translator(joint, tmp_path / "run", {"model.norm": "post", **rules}, end=1.0)
    huggingface_model.write(as_saved(translator), tmp_path / "exported")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "exported")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends sacremoses
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    batch = tokenizer(SENTENCES[:16], return_tensors="pt", padding=True)
    ids = model.generate(**batch)
    assert len(ids[0]) > 2
    ours = translate(translator, SENTENCES[:16])
    assert [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)] == ours
    plain = translate(
        translator.with_decoding(replace(translator.config.decoding, min_length=0, no_repeat_ngram=0)), SENTENCES[:16]
    )
    assert (plain == ours) == (not rules)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("tie", ["none", "target", "all"])
def test_ctranslate2s_own_converter_reads_the_folder_and_translates_as_the_run(
    norm: str, tie: str, joint: Subwords, tmp_path: Path
) -> None:
    translator = random_translator(joint, tmp_path / "run", {"model.norm": norm, "model.tie": tie}, end=1.0)
    huggingface_model.write(as_saved(translator), tmp_path / "exported")
    with warnings.catch_warnings(action="ignore"):
        TransformersConverter(str(tmp_path / "exported")).convert(str(tmp_path / "converted"))
    engine = ctranslate2.Translator(str(tmp_path / "converted"), intra_threads=1)
    pieces = [joint.pieces()[each] for each in range(len(joint))]
    sources = [[pieces[each] for each in (*row, EOS)] for row in joint.encode(SENTENCES)]
    never = [["<s>"], *([["<pad>"]] if norm == "pre" else [])]  # in a Marian model the converter has removed it
    found = engine.translate_batch(
        sources, beam_size=1, min_decoding_length=0, max_decoding_length=12, suppress_sequences=never
    )
    texts = joint.decode([[pieces.index(each) for each in one.hypotheses[0]] for one in found])
    greedy = translator.with_decoding(replace(translator.config.decoding, beam=1, max_ratio=50.0))
    assert texts == translate(greedy, SENTENCES)


def test_an_export_that_was_saved_again_by_transformers_translates_the_same(joint: Subwords, tmp_path: Path) -> None:
    translator = random_translator(joint, tmp_path / "run", {"model.norm": "post"}, end=0.0)
    huggingface_model.write(as_saved(translator), tmp_path / "exported")
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "exported").save_pretrained(tmp_path / "again")
    assert_same_log_probabilities(translator, tmp_path / "again")


MODEL = PretrainedConfig(pad_token_id=BOS, bos_token_id=BOS, eos_token_id=EOS)


def test_no_setting_of_decoding_that_changes_translations_is_passed_over(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", {"decoding.beam": 3, "decoding.length_norm": "length"})
    decoding, read = recorded(config.decoding)
    huggingface_model.generation_config(decoding, [BOS], MODEL)
    # transformers has no limit by the source's length: docs/export.md
    assert read == {each.name for each in fields(DecodingConfig)} - {"batch_sentences", "max_ratio"}


def test_the_length_penalty_is_exported_or_what_comes_nearest() -> None:
    def exported(decoding: DecodingConfig) -> float:
        config = huggingface_model.generation_config(decoding, [BOS], MODEL)
        return float(config.length_penalty)

    assert exported(DecodingConfig(beam=3, length_penalty=1.5, length_norm="length")) == 1.5
    gnmt = DecodingConfig(beam=3, length_penalty=0.6)
    assert exported(gnmt) == 0.5
    # Two translations of the same mean log-probability by token, around the usual length, are ranked alike
    for length in (20, 25, 30):
        ours = math.log(length_normaliser(length + 1, 0.6) / length_normaliser(length, 0.6))
        theirs = math.log(length_normaliser(length + 1, 0.5, "length") / length_normaliser(length, 0.5, "length"))
        assert abs(ours - theirs) < 0.05 * ours


@pytest.mark.parametrize(
    ("changed", "to", "named"),
    [
        ({}, "hf", "decoding.length_penalty 0.6 (gnmt): the nearest is length_penalty 0.5"),
        ({"decoding.beam": 1}, "hf", ""),
        ({"decoding.length_penalty": 0}, "hf", ""),
        ({"decoding.length_norm": "length"}, "hf", ""),
        ({"decoding.length_norm": "length"}, "ctranslate2", "pass length_penalty 0.6"),
        ({}, "ctranslate2", "beam_size=4"),
        ({}, "onnx", "your program does the search"),
        ({}, "hf", "decoding.max_ratio 2: "),
        ({"subwords.lowercase": True}, "hf", "subwords.lowercase true: "),
        ({"data.language_tags": True}, "onnx", "tags: "),
    ],
)
def test_a_setting_that_a_format_cannot_hold_is_named(changed: dict[str, object], to: str, named: str) -> None:
    config = load_config(None, changed)
    lines = list(lost_settings(config.decoding, ModelText.of(config), to))
    assert any(named in line for line in lines)
    if not named:
        assert not any("length_penalty" in line for line in lines)
    assert not list(lost_settings(config.decoding, ModelText.of(config), "safetensors"))


@pytest.mark.parametrize("beam", [1, 4])
def test_a_search_with_beams_ends_in_transformers_as_it_does_here(beam: int) -> None:
    """When as many translations are finished as there are beams; without beams transformers refuses the setting."""
    config = huggingface_model.generation_config(DecodingConfig(beam=beam), [BOS], MODEL)
    assert bool(config.early_stopping) == (beam > 1)
