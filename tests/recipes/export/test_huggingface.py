"""A model written for Hugging Face transformers gives there what it gives here."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.errors import ConfigError
from recipes.translation.export import huggingface_model
from recipes.translation.run_folder.translator import Translator, build_model, model_sizes
from recipes.translation.settings.config import DecodingConfig, SubwordConfig
from recipes.translation.text.subwords import BOS, EOS, PAD, Subwords, train_subwords
from recipes.translation.translating.translate import translate
from tests.recipes.export.translators import SENTENCES, as_saved, random_translator, recorded
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
    sources = [[*ids, EOS] for ids in translator.source.encode(SENTENCES[:3])]
    targets = [[BOS, *ids] for ids in translator.target.encode(SENTENCES[3:6])]
    src = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sources], True, PAD)
    tgt = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in targets], True, PAD)
    with torch.no_grad():
        expected = translator.model.generator(translator.model(src, tgt))
        found = theirs(input_ids=src, attention_mask=src != PAD, decoder_input_ids=tgt).logits
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
    torch.manual_seed(1)
    model = build_model(model_sizes(config.model), joint, german)
    return Translator(config, model.eval(), joint, german)


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


def test_no_setting_of_decoding_that_changes_translations_is_passed_over(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", {"decoding.beam": 3, "decoding.length_norm": "length"})
    decoding, read = recorded(config.decoding)
    huggingface_model.generation_config(replace(config, decoding=decoding))
    # transformers has no limit by the source's length: docs/export.md
    assert read == {each.name for each in fields(DecodingConfig)} - {"batch_sentences", "max_ratio"}


def test_the_length_penalty_is_exported_where_transformers_has_it(joint: Subwords, tmp_path: Path) -> None:
    settings = {"decoding.beam": 3, "decoding.length_penalty": 1.5, "decoding.length_norm": "length"}
    config = random_translator(joint, tmp_path / "run", settings).config
    assert huggingface_model.generation_config(config).length_penalty == 1.5
    assert huggingface_model.generation_config(config).num_beams == 3
    gnmt = random_translator(joint, tmp_path / "run", {**settings, "decoding.length_norm": "gnmt"}).config
    assert huggingface_model.generation_config(gnmt).length_penalty == 0.0
