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
from recipes.translation.errors import CheckpointError
from recipes.translation.importing.published_model import read_model
from recipes.translation.run_folder.checkpoint import load_translator
from tests.recipes.importing import published

pytestmark = pytest.mark.formats

Damage = Callable[[Path], None]


def removed(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def json_file(file: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    def rewrite(folder: Path) -> None:
        found = json.loads((folder / file).read_text())
        change(found)
        (folder / file).write_text(json.dumps(found))

    return rewrite


def setting(name: str, value: Any, file: str = "config.json") -> Damage:
    return json_file(file, lambda found: found.update({name: value}))


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    def rewrite(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")

    return rewrite


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def garbled(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes(b"\xff garbled" * (1 + (folder / name).stat().st_size // 9))


def without_start(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        json_file(name, lambda found: found.pop("decoder_start_token_id"))(folder)


RENAMED_PAD = json_file("vocab.json", lambda found: found.update({"<blank>": found.pop("<pad>")}))
INNER = "model.encoder.layers.1.fc1.weight"
NORM = "model.encoder.layers.0.final_layer_norm.bias"
BAD: dict[str, tuple[Damage, str]] = {
    "no folder": (shutil.rmtree, "FOLDER is not a folder: give one with a model as transformers saves it"),
    "no config": (removed("config.json"), "FOLDER has no config.json: "),
    "no weights": (removed("model.safetensors"), "the weights in FOLDER cannot be read (OSError: Error no file named"),
    "no subwords": (removed("target.spm"), "the tokenizer in FOLDER cannot be read ("),
    "no vocabulary": (removed("vocab.json"), "the tokenizer in FOLDER cannot be read ("),
    "pickled weights": (pickled, "pytorch_model.bin is pickled, and reading it could run any code: convert it"),
    "config that is not JSON": (
        garbled("config.json"),
        "config.json in FOLDER cannot be read (OSError: It looks like the conf",
    ),
    "weights that are none": (garbled("model.safetensors"), "the weights in FOLDER cannot be read (SafetensorError: "),
    "subwords that are none": (garbled("source.spm"), "the tokenizer in FOLDER cannot be read (RuntimeError: "),
    "another architecture": (
        setting("model_type", "t5"),
        "model_type is 't5'; it must be one of marian, m2m_100, mbart",
    ),
    "a model that only encodes": (
        setting("architectures", ["MarianModel"]),
        "the model is a MarianModel, which does not",
    ),
    "another activation": (setting("activation_function", "gelu_new"), "activation is 'gelu_new': choose one of"),
    "unscaled embeddings": (setting("scale_embedding", False), "scale_embedding is false, but the models here"),
    "two widths": (setting("decoder_ffn_dim", 48), "encoder_ffn_dim is 24, decoder_ffn_dim 48; here both sides"),
    "heads that do not divide": (
        json_file("config.json", lambda found: found.update(encoder_attention_heads=3, decoder_attention_heads=3)),
        "d_model 16 is not divisible by heads 3",
    ),
    "another width": (
        setting("d_model", 24),
        "is (16,), but according to config.json it should be (24,): one of the two files belongs",
    ),
    "another vocabulary": (
        setting("vocab_size", 100),
        "has id 100: it must be unique, and one of the 100 rows of",
    ),
    "another dropout": (setting("dropout", 1.5), "dropout is 1.5, outside [0, 1)"),
    "no start": (without_start, "FOLDER: decoder_start_token_id is 58100, not the id of a subword"),
    "sizes that are no numbers": (
        setting("d_model", "16"),
        "config.json in FOLDER cannot be read (StrictDataclassFieldVal",
    ),
    "another unknown subword": (
        setting("unk_token", "x", "tokenizer_config.json"),
        "the tokenizer in FOLDER cannot be read (RuntimeError: ",
    ),
    "a beam without end": (
        setting("num_beams", 2**31 - 1, "generation_config.json"),
        "decoding.beam (FOLDER/generation_config.json) expects a whole number from 1 to 1,000; got '2147483647'",
    ),
    "no padding": (RENAMED_PAD, "the vocabulary of FOLDER has no <pad>, which every model needs"),
    "one id twice": (
        setting("be", 7, "vocab.json"),
        "has id 7: it must be unique, and one of the 480 rows of the model",
    ),
    "another padding": (setting("pad_token_id", 7), "config.json: pad_token_id is 7, and in"),
    "another end": (setting("eos_token_id", 9), "config.json: eos_token_id is 9, and in"),
    "a missing weight": (tensors(lambda found: found.__delitem__(NORM)), f"has no weight {NORM}"),
    "one weight too many": (
        tensors(lambda found: found.update({"model.adapter.weight": torch.ones(2)})),
        "has model.adapter.weight, which the model has no place for (1 such weights in all)",
    ),
    "a weight that is no number": (
        tensors(lambda found: found[NORM].__setitem__(3, math.nan)),
        f"FOLDER: {NORM} has values that are nan or inf: download or convert",
    ),
    "an infinite weight": (
        tensors(lambda found: found["model.shared.weight"].__setitem__((3, 2), math.inf)),
        "FOLDER: model.shared.weight has values that are nan or inf: download or convert",
    ),
    "other positions": (
        tensors(lambda found: found.update({"model.encoder.embed_positions.weight": torch.ones(64, 16)})),
        "model.encoder.embed_positions.weight is not the table of sines and cosines of MarianMTModel",
    ),
    "a bpe model of each language": (
        lambda folder: (folder / "source.spm").write_bytes(published.spm(0, "bpe")) and None,
        "error: the vocabulary of FOLDER has ... a unigram model can be imported all the same, but it is a bpe one",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published.marian(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(good, tmp_path / "model"))


@pytest.mark.parametrize("name", BAD)
def test_a_bad_folder_gets_one_line_and_leaves_no_run(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, reason = BAD[name]
    damage(folder)
    assert main(["import", str(folder), "--run", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.strip()
    assert all(part.replace("FOLDER", str(folder)) in said for part in reason.split(" ... "))
    assert "cannot be read" not in said or said.endswith("as they were published; see docs/import.md")
    assert "\n" not in said
    assert not (tmp_path / "run").exists()


def test_pickled_weights_beside_safe_ones_are_not_in_the_way(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "pytorch_model.bin")
    assert main(["import", str(folder), "--run", str(tmp_path / "run")]) == 0


def test_sizes_that_would_fill_the_memory_are_refused_before_they_do(good: Path, tmp_path: Path) -> None:
    for name in ("vocab_size", "d_model", "encoder_layers", "decoder_layers", "max_position_embeddings"):
        folder = Path(shutil.copytree(good, tmp_path / name))
        setting(name, 2**30)(folder)
        with pytest.raises(
            CheckpointError, match=r"weights or more, but the safetensors files together have [\d,]+ bytes: "
        ):
            read_model(folder, tmp_path / "run")


def test_no_code_of_the_folder_is_run_and_nothing_is_asked_of_the_network(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *each, **options: asked.append(each) or [])
    classes = ("AutoConfig", "AutoModelForSeq2SeqLM", "AutoTokenizer")
    names = {name: f"hostile.{name}" for name in classes}
    for code in ("hostile.py", "modeling_marian.py", "custom_generate/generate.py"):
        folder = Path(shutil.copytree(good, tmp_path / code.replace("/", "-")))
        (folder / code).parent.mkdir(exist_ok=True)
        (folder / code).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
        setting("auto_map", names)(folder)
        setting("attn_implementation", "hostile/kernel")(folder)
        setting("auto_map", {"AutoTokenizer": [names["AutoTokenizer"], None]}, "tokenizer_config.json")(folder)
        assert read_model(folder, tmp_path / "run").ignored == []
        (folder / "target.spm").unlink()
        with pytest.raises(CheckpointError, match="the tokenizer in"):
            read_model(folder, tmp_path / "run")
    assert not (tmp_path / "ran").exists()
    assert asked == []


@pytest.mark.parametrize(("there", "here"), [("float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")])
def test_weights_keep_the_precision_of_their_file_whatever_config_json_says(
    there: str, here: str, folder: Path, tmp_path: Path
) -> None:
    setting("dtype", "float16")(folder)
    expected = {}

    def converted(found: dict[str, torch.Tensor]) -> None:
        for name, tensor in found.items():
            found[name] = (tensor.double() / 3).to(getattr(torch, there))
        expected.update(found)

    tensors(converted)(folder)
    found = read_model(folder, tmp_path / "run").translator.model.state_dict()
    assert {tensor.dtype for tensor in found.values()} == {getattr(torch, here)}
    assert torch.equal(found["encoder.layers.1.feed_forward.inner.weight"], expected[INNER].to(getattr(torch, here)))


def test_tables_of_positions_that_earlier_versions_have_saved_are_no_weights_too_many(tmp_path: Path) -> None:
    for make, name, languages in (
        (published.marian, "weight", ("", "")),
        (published.m2m100, "weights", ("en", "de")),
    ):
        folder = make(tmp_path / make.__name__)
        expected = read_model(folder, tmp_path / "run", *languages).translator.model.state_dict()
        positions = published.model_of(folder).model.encoder.embed_positions
        table = {f"model.encoder.embed_positions.{name}": getattr(positions, name).clone()}
        tensors(lambda found, table=table: found.update(table))(folder)
        found = read_model(folder, tmp_path / "run", *languages).translator.model.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_special_subwords_may_have_other_names(good: Path, folder: Path, tmp_path: Path) -> None:
    RENAMED_PAD(folder)
    setting("pad_token", "<blank>", "tokenizer_config.json")(folder)
    assert main(["import", str(folder), "--run", str(tmp_path / "run")]) == 0
    found = load_translator(tmp_path / "run" / "best").source
    expected = read_model(good, tmp_path / "other").translator.source
    assert found.pieces() == ["<blank>", *expected.pieces()[1:]]
    assert found.encode(["A small dog!"]) == expected.encode(["A small dog!"])


@pytest.mark.parametrize(("name", "tie"), [("model.encoder.embed_tokens.weight", "target"), ("lm_head.weight", "none")])
def test_weights_of_one_matrix_that_differ_stay_as_transformers_has_them(name: str, tie: str, tmp_path: Path) -> None:
    folder = published.marian(tmp_path / "model")
    tensors(lambda found: found.update({name: found["model.shared.weight"] * 2 + 1}))(folder)
    translator = read_model(folder, tmp_path / "run").translator
    assert translator.config.model.tie == tie
    theirs = published.model_of(folder)
    start = theirs.config.decoder_start_token_id
    tokens = published.tokenizer_of(folder)(["A small dog!"], return_tensors="pt")
    with torch.no_grad():
        expected = theirs(**tokens, decoder_input_ids=torch.tensor([[start]])).logits[0, 0]
        src = torch.tensor([translator.source.symbols.source(translator.source.encode(["A small dog!"])[0])])
        states = translator.model(src, torch.tensor([translator.source.symbols.start]))
        found = translator.model.generator(states)[0, 0]
    assert expected.std() > 0.1
    torch.testing.assert_close(found.sort().values, expected.sort().values, rtol=1e-5, atol=1e-5)


def test_transformers_is_named_where_it_is_not_installed(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("recipes.translation.commands.arguments.find_spec", lambda package: None)
    assert main(["import", str(good), "--run", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "error: transformers is not installed: pip install transformers\n"


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


def test_a_tokenizer_without_languages_is_refused(tmp_path: Path) -> None:
    folder = published.nllb(tmp_path / "model")
    setting("extra_special_tokens", ["<s>"], "tokenizer_config.json")(folder)
    json_file(
        "tokenizer.json",
        lambda found: found.update(added_tokens=[each for each in found["added_tokens"] if "_" not in each["content"]]),
    )(folder)
    with pytest.raises(CheckpointError, match="the tokenizer has no language tags"):
        read_model(folder, tmp_path / "run", "eng_Latn", "deu_Latn")


def test_settings_of_translation_that_a_run_does_not_have_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting("repetition_penalty", 1.3, "generation_config.json")(folder)
    setting("bad_words_ids", [[9]], "generation_config.json")(folder)
    assert main(["import", str(folder), "--run", str(tmp_path / "run")]) == 0
    found = capsys.readouterr()
    assert "generation_config.json sets bad_words_ids, repetition_penalty, for which a run has no setting" in found.err
    assert "en to de" in found.out


def test_settings_of_translation_in_config_json_are_honoured_or_named_where_transformers_reads_them(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert f"config.json sets {names}, for which a run has no setting" in capsys.readouterr().err
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
    "guidance_scale": (1.5, 1.0),
    "a_setting_of_later": (1, False),
}


@pytest.mark.parametrize("name", LOST)
def test_a_setting_is_named_where_it_changes_what_generate_gives(name: str, folder: Path, tmp_path: Path) -> None:
    changes, keeps = LOST[name]
    for value, expected in ((changes, [name]), (keeps, [])):
        setting(name, value, "generation_config.json")(folder)
        assert read_model(folder, tmp_path / "run").ignored == expected


def test_padding_is_never_output_and_its_ban_is_not_named(tmp_path: Path) -> None:
    folder = published.m2m100(tmp_path / "m2m100")  # whose decoder does not start with padding
    (folder / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 2, "bad_words_ids": [[1]]}))
    assert read_model(folder, tmp_path / "run", "en", "de").ignored == []


def test_a_temperature_is_named_only_where_generate_would_draw(folder: Path, tmp_path: Path) -> None:
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
