"""Fields of a published model's JSON files that are of another type get one line, whichever field it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.importing.folder import read_config, read_weights
from recipes.translation.importing.published_model import read_model
from tests.recipes.importing import published

pytestmark = pytest.mark.formats

ODD: tuple[Any, ...] = (None, -1, 10**400, "x", {"content": []})
REFUSED = {
    "config.json": "vocab_size d_model encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads "
    "encoder_ffn_dim decoder_ffn_dim model_type activation_function scale_embedding dropout "
    "max_position_embeddings pad_token_id eos_token_id tie_word_embeddings quantization_config transformers_weights",
    "generation_config.json": "num_beams max_length max_new_tokens min_length min_new_tokens no_repeat_ngram_size "
    "length_penalty decoder_start_token_id early_stopping",
    "tokenizer_config.json": "pad_token unk_token",
    "tokenizer.json": "added_tokens model normalizer",
    "vocab.json": "<unk>",
    "target_vocab.json": "<unk>",
    "model.safetensors.index.json": "weight_map",
}
"""What is read of each file, and may not be everything that there is."""
NAMED = {
    "config.json": "architectures dtype share_encoder_decoder_embeddings attn_implementation auto_map",
    "generation_config.json": "forced_bos_token_id pad_token_id eos_token_id bad_words_ids suppress_tokens",
    "tokenizer_config.json": "tokenizer_class source_lang target_lang separate_vocabs legacy_behaviour language_codes "
    "num_madeup_words bos_token eos_token",
}
"""What is read, and is refused, left aside or named where it is odd."""
LANGUAGES = {
    "marian": ("", ""),
    "m2m100": ("en", "de"),
    "nllb": ("eng_Latn", "deu_Latn"),
    "mbart": ("en_XX", "de_DE"),
}


@pytest.fixture(scope="module", params=LANGUAGES)
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / request.param
    getattr(published, request.param)(folder, encoder_layers=1, decoder_layers=1)
    weights = "model-00001-of-00001.safetensors"
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), weights)}
    (folder / "model.safetensors").rename(folder / weights)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def refusal(folder: Path) -> str:
    """Return the line with which a folder is refused, if it is; another error is a failure."""
    try:
        read_model(folder, Path("run"), *LANGUAGES[folder.name])
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("file", REFUSED)
def test_a_field_of_any_other_type_is_read_or_refused_in_one_line(
    file: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    the_same = file in ("config.json", "generation_config.json", "model.safetensors.index.json")
    if not (good / file).is_file() or (the_same and good.name != "marian"):
        return
    if file not in ("config.json", "model.safetensors.index.json"):  # of the rest, the weights need to be read once
        theirs = read_weights(good, read_config(good))
        monkeypatch.setattr("recipes.translation.importing.published_model.read_weights", lambda *each: theirs)
    folder = Path(shutil.copytree(good, tmp_path / good.name))
    content = json.loads((folder / file).read_text())
    refused = REFUSED[file].split()
    for field in (*refused, *NAMED.get(file, "").split()):
        others = {name: each for name, each in content.items() if name != field}
        said = []
        for changed in (others, *({**content, field: odd} for odd in ODD)):
            (folder / file).write_text(json.dumps(changed))
            said.append(refusal(folder))
        assert all("\n" not in line for line in said)
        assert any(str(folder) in line for line in said) or field not in refused, field
