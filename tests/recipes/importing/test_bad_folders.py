"""What cannot be imported is refused by one line that names the file, what is wrong in it, and what to do."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.translation.commands import main
from recipes.translation.importing.published_model import read_model
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.text.sentencepiece_file import Kind, fields_of, pieces_of
from tests.recipes.importing import published

pytestmark = pytest.mark.formats

Damage = Callable[[Path], None]


def removed(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def setting(name: str, value: Any, file: str = "config.json") -> Damage:
    def change(folder: Path) -> None:
        found = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**found, name: value}))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    def rewrite(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")

    return rewrite


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def garbled(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes(b"\xff garbled")


def without_pad(folder: Path) -> None:
    found = json.loads((folder / "vocab.json").read_text())
    del found["<pad>"]
    (folder / "vocab.json").write_text(json.dumps(found))


NORM = "model.encoder.layers.0.final_layer_norm.bias"
BAD: dict[str, tuple[Damage, str]] = {
    "no config": (removed("config.json"), "has no config.json: it needs all files"),
    "no weights": (removed("model.safetensors"), "has no model.safetensors, with weights of the model"),
    "no subwords": (removed("target.spm"), "has no target.spm: it needs all files"),
    "no vocabulary": (removed("vocab.json"), "has no vocab.json: it needs all files"),
    "pickled weights": (pickled, "pytorch_model.bin is pickled, and reading it could run any code: convert it"),
    "config that is not JSON": (garbled("config.json"), "config.json is not JSON"),
    "weights that are none": (garbled("model.safetensors"), "model.safetensors is not a file of safetensors"),
    "subwords that are none": (garbled("source.spm"), "source.spm is not a sentencepiece model"),
    "another architecture": (
        setting("model_type", "t5"),
        "model_type is 't5'; it must be one of marian, m2m_100, mbart",
    ),
    "a model that only encodes": (
        setting("architectures", ["MarianModel"]),
        "the model is a MarianModel, which does not",
    ),
    "another activation": (setting("activation_function", "gelu_new"), "activation_function is 'gelu_new'; it must be"),
    "unscaled embeddings": (setting("scale_embedding", False), "scale_embedding is false, and the models here"),
    "two widths": (setting("decoder_ffn_dim", 48), "encoder_ffn_dim is 24, decoder_ffn_dim 48; here both sides"),
    "heads that do not divide": (
        lambda folder: [setting(f"{side}_attention_heads", 3)(folder) for side in ("encoder", "decoder")] and None,
        "d_model 16 is not divisible by heads 3",
    ),
    "another width": (setting("d_model", 24), "is (480, 16), and by config.json it is (480, 24): one of the two"),
    "another vocabulary": (setting("vocab_size", 100), "has id 100, outside the 100 rows of the model's embedding"),
    "another dropout": (setting("dropout", 1.5), "dropout is 1.5, outside [0, 1)"),
    "no start": (setting("decoder_start_token_id", None, "generation_config.json"), "decoder_start_token_id is None"),
    "sizes that are no numbers": (setting("d_model", "16"), 'config.json: d_model is "16", and must be a whole number'),
    "another unknown subword": (
        setting("unk_token", "x", "tokenizer_config.json"),
        "tokenizer_config.json names other special subwords than the sentencepiece model: one of the two",
    ),
    "a beam without end": (
        setting("num_beams", 2**31 - 1, "generation_config.json"),
        "num_beams is 2147483647, and must be a whole number from 1 to 1,000",
    ),
    "no padding": (without_pad, "vocab.json has no <pad>, which every model needs"),
    "another padding": (setting("pad_token_id", 7), "config.json: pad_token_id is 7, and in"),
    "another end": (setting("eos_token_id", 9), "config.json: eos_token_id is 9, and in"),
    "a missing weight": (tensors(lambda found: found.__delitem__(NORM)), f"has no weight {NORM}"),
    "one weight too many": (
        tensors(lambda found: found.update({"model.adapter.weight": torch.ones(2)})),
        "has model.adapter.weight, and 1 such weights in all",
    ),
    "tied weights that differ": (
        tensors(lambda found: found.update({"lm_head.weight": found["model.shared.weight"] + 1})),
        "lm_head.weight and model.shared.weight differ, and by config.json they are one matrix",
    ),
    "a weight that is no number": (
        tensors(lambda found: found[NORM].__setitem__(3, math.nan)),
        f"model.safetensors: {NORM} has values that are nan or inf: download or convert",
    ),
    "an infinite weight": (
        tensors(lambda found: found["model.shared.weight"].__setitem__((3, 2), math.inf)),
        "model.safetensors: model.shared.weight has values that are nan or inf: download or convert",
    ),
    "other positions": (
        tensors(lambda found: found.update({"model.encoder.embed_positions.weight": torch.ones(64, 16)})),
        "model.encoder.embed_positions.weight is not the table of sines and cosines of marian",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published.marian(tmp_path_factory.mktemp("published") / "model")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_folder_gets_one_line_and_leaves_no_run(
    name: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, reason = BAD[name]
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    damage(folder)
    assert main(["import", str(folder), "--run", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.strip()
    assert reason in said
    assert "\n" not in said
    assert not (tmp_path / "run").exists()


def test_pickled_weights_beside_safe_ones_are_not_in_the_way(good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    shutil.copy(folder / "model.safetensors", folder / "pytorch_model.bin")
    assert main(["import", str(folder), "--run", str(tmp_path / "run")]) == 0


def test_a_folder_that_is_not_there_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(tmp_path / "nothing"), "--run", str(tmp_path / "run")]) == 2
    assert "nothing is not a folder: give one with a model as transformers saves it" in capsys.readouterr().err


def test_a_language_that_the_model_does_not_have_gets_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    m2m100 = str(published.m2m100(tmp_path / "m2m100"))
    mbart = str(published.mbart(tmp_path / "mbart", fifty=False))
    for folder, languages, reason in (
        (m2m100, (), "--source: the model has several languages: give one of its 100 languages, such as af, am, ar"),
        (m2m100, ("--source", "en"), "--target: the model has several languages: give one of its 100"),
        (m2m100, ("--source", "en", "--target", "deu"), "--target: 'deu' is not a language of this model: give one"),
        (
            mbart,
            ("--source", "de_DE", "--target", "en_XX"),
            "--target: this model's decoder starts with de_DE, not with",
        ),
    ):
        assert main(["import", folder, "--run", str(tmp_path / "run"), *languages]) == 2
        assert reason in capsys.readouterr().err


def test_a_bpe_model_of_each_language_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = published.marian(tmp_path / "model")
    (folder / "source.spm").write_bytes(published.spm(0, "bpe"))
    assert main(["import", str(folder), "--run", str(tmp_path / "run")]) == 2
    assert "a unigram model can be imported all the same, but it is a bpe one" in capsys.readouterr().err


def test_settings_of_translation_that_a_run_does_not_have_are_named(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    setting("repetition_penalty", 1.3, "generation_config.json")(folder)
    setting("bad_words_ids", [[9]], "generation_config.json")(folder)
    assert main(["import", str(folder), "--run", str(tmp_path / "run")]) == 0
    found = capsys.readouterr()
    assert "generation_config.json sets bad_words_ids, repetition_penalty, which a run does not have" in found.err
    assert "en to de" in found.out


def test_settings_of_translation_in_config_json_are_honoured_or_named_where_transformers_reads_them(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    had = {"num_beams": 4, "max_length": 17, "min_length": 5, "no_repeat_ngram_size": 3}
    lost = {"bad_words_ids": [[9], [479]], "forced_bos_token_id": 7}
    for name, value in {**lost, **had, "do_sample": False, "num_beam_groups": 1}.items():
        setting(name, value)(folder)
    beside = read_model(folder, tmp_path / "run")  # generation_config.json is there, and transformers reads it alone
    assert beside.ignored == []
    assert (beside.translator.config.decoding.beam, beside.translator.config.decoding.max_length) == (3, 29)
    removed("generation_config.json")(folder)
    assert main(["import", str(folder), "--run", str(tmp_path / "run")]) == 0
    names = "bad_words_ids, forced_bos_token_id"
    assert f"config.json sets {names}, which a run does not have" in capsys.readouterr().err
    decoding = load_translator(tmp_path / "run" / "best").config.decoding
    assert (decoding.beam, decoding.max_length) == (4, 16)
    assert (decoding.min_length, decoding.no_repeat_ngram) == (4, 3)


LOST: dict[str, tuple[Any, Any]] = {
    "forced_bos_token_id": (7, None),
    "eos_token_id": ([0, 5], [0]),
    "bad_words_ids": ([[479, 479]], [[479]]),
    "suppress_tokens": ([479, 5], [479]),
    "begin_suppress_tokens": ([5], []),
    "repetition_penalty": (1.2, 1.0),
    "encoder_no_repeat_ngram_size": (2, 0),
    "do_sample": (True, False),
    "sequence_bias": ([[[5], 2.0]], None),
    "a_setting_of_later": (1, False),
}


@pytest.mark.parametrize("name", LOST)
def test_a_setting_is_named_where_it_changes_what_generate_gives(name: str, good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    changes, keeps = LOST[name]
    for value, expected in ((changes, [name]), (keeps, [])):
        setting(name, value, "generation_config.json")(folder)
        assert read_model(folder, tmp_path / "run").ignored == expected


def test_padding_is_never_output_and_its_ban_is_not_named(tmp_path: Path) -> None:
    folder = published.m2m100(tmp_path / "m2m100")  # whose decoder does not start with padding
    (folder / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 2, "bad_words_ids": [[1]]}))
    assert read_model(folder, tmp_path / "run", "en", "de").ignored == []


def test_a_temperature_is_named_only_where_generate_would_draw(good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    setting("top_k", 5, "generation_config.json")(folder)
    assert read_model(folder, tmp_path / "run").ignored == []
    setting("do_sample", True, "generation_config.json")(folder)
    assert read_model(folder, tmp_path / "run").ignored == ["do_sample", "top_k"]


def test_a_forced_tag_is_the_target_language_or_named(tmp_path: Path) -> None:
    folder = published.mbart(tmp_path / "mbart")
    tags = {each["content"]: each["id"] for each in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}
    setting("forced_bos_token_id", tags["de_DE"], "generation_config.json")(folder)
    assert read_model(folder, tmp_path / "run", "en_XX", "de_DE").ignored == []
    assert read_model(folder, tmp_path / "run", "de_DE", "en_XX").ignored == ["forced_bos_token_id"]


def test_pieces_of_a_sentencepiece_model_are_read_as_sentencepiece_reads_them() -> None:
    import sentencepiece

    for kind in ("unigram", "bpe"):
        model = published.spm(0, kind)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        found = pieces_of(model)
        size = processor.get_piece_size()
        assert [piece.text for piece in found] == [processor.id_to_piece(number) for number in range(size)]
        assert [piece.score for piece in found] == [processor.get_score(number) for number in range(size)]
        assert [piece.kind == Kind.CONTROL for piece in found] == [processor.is_control(each) for each in range(size)]
        assert b"".join(field.raw for field in fields_of(model)) == model
        for cut in (1, len(model) // 2):
            with pytest.raises(ValueError, match=r"message|byte"):
                list(fields_of(model[:-cut]))
