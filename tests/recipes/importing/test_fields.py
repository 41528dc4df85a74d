"""Fields of a published model's JSON files that are of another type get one line, whichever field it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.importing.fields import FILES, check_fields
from recipes.translation.importing.published_model import read_model
from tests.recipes.importing import published

pytestmark = pytest.mark.formats

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    2.5,
    float("nan"),
    10**400,
    "x",
    [],
    [["x"]],
    [[]],
    {},
    {"x": []},
    {"content": 1},
)
LANGUAGES = {
    "marian": ("", ""),
    "m2m100": ("en", "de"),
    "nllb": ("eng_Latn", "deu_Latn"),
    "mbart": ("en_XX", "de_DE"),
}


@pytest.fixture(scope="module", params=LANGUAGES)
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / request.param
    getattr(published, request.param)(folder)
    index = {"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def fields_of(file: str) -> list[str]:
    return [name.replace("*", "<unk>") for name in FILES[file]]


def refusal(folder: Path) -> str:
    """Return the line with which a folder is refused, if it is; another error is a failure."""
    try:
        read_model(folder, Path("run"), *LANGUAGES[folder.name])
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("file", FILES)
def test_a_field_of_any_other_type_is_read_or_refused_in_one_line(file: str, good: Path, tmp_path: Path) -> None:
    if not (good / file).is_file():
        return
    folder = Path(shutil.copytree(good, tmp_path / good.name))
    content = json.loads((folder / file).read_text())
    for field in fields_of(file):
        others = {name: each for name, each in content.items() if name != field}
        said = []
        for changed in (others, *({**content, field: odd} for odd in ODD)):
            (folder / file).write_text(json.dumps(changed))
            said.append(refusal(folder))
        assert all("\n" not in line for line in said)
        assert any(file in line and f"{field} is" in line for line in said), field


@pytest.mark.parametrize(
    ("file", "found", "said"),
    [
        (
            "generation_config.json",
            {"num_beams": "4"},
            'F: num_beams is "4", and must be a whole number from 1 to 1,000: correct it, or',
        ),
        ("generation_config.json", {"num_beams": True}, "F: num_beams is true, and must be a whole number"),
        ("generation_config.json", {"length_penalty": [1]}, "F: length_penalty is [1], and must be a number"),
        ("generation_config.json", {"bad_words_ids": [[3], 4]}, "F: bad_words_ids[1] is 4, and must be a list"),
        (
            "generation_config.json",
            {"eos_token_id": "x"},
            'F: eos_token_id is "x", and must be a whole number of 32 bits or a list',
        ),
        ("generation_config.json", {"eos_token_id": [1, "x"]}, 'F: eos_token_id[1] is "x", and must be a whole number'),
        ("tokenizer_config.json", {"pad_token": 3}, "F: pad_token is 3, and must be text or an object of fields"),
        ("tokenizer_config.json", {"pad_token": {"content": 3}}, "F: pad_token.content is 3, and must be text"),
        ("tokenizer.json", {"added_tokens": [{"id": 1}]}, "F: added_tokens[0].content is missing, and must be text"),
        ("vocab.json", {"a": 1, "b": None}, "F: b is null, and must be a whole number"),
        ("model.safetensors.index.json", {}, "F: weight_map is missing, and must be an object of fields"),
        (
            "config.json",
            {"vocab_size": 9 * [0]},
            "F: vocab_size is [0, 0, 0, 0, 0, 0, 0, 0, 0], and must be a whole number",
        ),
    ],
)
def test_the_line_says_where_what_it_is_and_what_it_should_be(file: str, found: object, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_fields(found, file, "F")
    assert str(caught.value).startswith(said)


def test_a_name_with_a_line_break_leaves_one_line() -> None:
    with pytest.raises(CheckpointError) as caught:
        check_fields({"a\nb": "c\u2028"}, "vocab.json", "F")
    assert str(caught.value).startswith(r"""F: 'a\nb' is "c\u2028", and must be a whole number""")


def test_a_value_that_can_be_read_but_not_written_out_leaves_one_line() -> None:
    read = 0
    for levels in range(800, 1_100):
        try:
            found = json.loads(f'{{"num_beams": {"[" * levels}{"]" * levels}}}')
        except RecursionError:
            break
        read += 1
        with pytest.raises(CheckpointError, match=r"num_beams is .*, and must be a whole number"):
            check_fields(found, "generation_config.json", "F")
    assert read


def test_fields_that_nothing_reads_may_be_anything() -> None:
    check_fields({"num_beams": None, "x": object()}, "generation_config.json", "F")
    check_fields({"added_tokens": [], "model": 3}, "tokenizer.json", "F")
