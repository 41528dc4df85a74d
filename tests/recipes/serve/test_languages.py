"""A service with several pairs of languages: of one model with language tags, and of several models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from models import PRESETS, make_transformer
from recipes.translation.commands import served_models
from recipes.translation.data.corpora import Corpora, language_pairs
from recipes.translation.run_folder.translator import Translator
from recipes.translation.serve.app import application
from recipes.translation.serve.asked import Limits
from recipes.translation.serve.batching import Batcher
from recipes.translation.text.model_text import ModelText
from recipes.translation.translating.translate import Translation
from tests.recipes.serve.recorder import Recorder
from tests.recipes.serve.serving import asked
from tests.recipes.tiny import tiny

CORPORA = {"a": {}, "b": {"target": "fr"}, "c": {"source": "nl", "target": "fr"}}


def asking(models: Sequence[Any]) -> Callable[..., httpx.Response]:
    """A function that sends a request to a service of these models, by GET or with fields by POST."""
    app = application(models, Batcher(models, 100), Limits(), ["*"])
    return lambda path, **fields: asked(app, "POST" if fields else "GET", path, json=fields or None)


def opened(source: str, target: str) -> Recorder:
    """A model whose gate is open."""
    model = Recorder(source, target)
    model.gate.set()
    return model


def test_the_models_of_several_pairs_are_one_list_of_languages_and_the_pair_chooses_the_first() -> None:
    models = [opened("en", "de"), opened("en", "fr"), opened("fr", "en"), opened("en", "de")]
    ask = asking(models)
    assert ask("/languages").json() == [
        {"code": "en", "name": "en", "targets": ["de", "fr"]},
        {"code": "fr", "name": "fr", "targets": ["en"]},
    ]
    for number, pair in enumerate([("en", "de"), ("en", "fr"), ("fr", "en")]):
        answer = ask("/translate", q=f"text {number}", source=pair[0], target=pair[1])
        assert answer.json() == {"translatedText": f"TEXT {number}"}
    assert [model.batches for model in models] == [[["text 0"]], [["text 1"]], [["text 2"]], []]


@pytest.mark.parametrize(("source", "target"), [("de", "en"), ("en", "es"), ("fr", "de")])
def test_a_pair_that_no_model_has_is_refused_in_one_line_with_those_that_there_are(source: str, target: str) -> None:
    models = [opened("en", "de"), opened("fr", "en"), opened("en", "fr")]
    ask = asking(models)
    answer = ask("/translate", q="a", source=source, target=target)
    assert answer.status_code == 400
    assert answer.json() == {
        "error": f"'{source}' to '{target}' is not supported: the models here translate en to de, en to fr, fr to en"
    }
    assert not any(model.batches for model in models)


@pytest.mark.parametrize(
    ("tags", "pairs"), [(True, [("en", "de"), ("en", "fr"), ("nl", "fr")]), (False, [("en", "de")])]
)
def test_only_a_model_with_language_tags_translates_into_the_other_targets_of_its_corpora(
    tags: bool, pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    assert language_pairs(Corpora(tiny(tmp_path, {"corpora": CORPORA, "data.language_tags": tags}))) == pairs


def test_the_target_that_is_asked_for_is_the_tag_that_the_model_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(translator: Translator, lines: Sequence[str], *_: object) -> list[list[Translation]]:
        return [[Translation(translator.text.source(line), 0.0, 0.0)] for line in lines]

    class Counting:
        tags = frozenset[str]()

        def encode(self, lines: Sequence[str]) -> list[list[int]]:
            return [[4] * len(line.split()) for line in lines]

    monkeypatch.setattr(served_models, "alternatives", read)
    subwords: Any = Counting()
    model = make_transformer(PRESETS["tiny"], 5, 5, pad=0)
    config = tiny(tmp_path, {"corpora": CORPORA, "data.language_tags": True})
    translator = Translator(config, model, subwords, subwords)
    ask = asking(served_models.served_models("run", translator, translator))
    assert ask("/languages").json() == [
        {"code": "en", "name": "en", "targets": ["de", "fr"]},
        {"code": "nl", "name": "nl", "targets": ["fr"]},
    ]
    for source, target in (("en", "fr"), ("en", "de"), ("nl", "fr")):
        answer = ask("/translate", q="a house", source=source, target=target)
        assert answer.json() == {"translatedText": f"<2{target}> a house"}
    refused = ask("/translate", q="a house", source="nl", target="de")
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("'nl' to 'de' is not supported: the models here translate en to de, ")


@pytest.mark.parametrize("tags", [False, True])
def test_a_default_that_no_corpus_has_is_no_pair_of_languages(tags: bool, tmp_path: Path) -> None:
    corpora = {"c": {"source": "fr", "target": "es"}}
    config = tiny(tmp_path / "run", {"corpora": corpora, "data.language_tags": tags})
    assert language_pairs(Corpora(config)) == [("fr", "es")]


def test_each_pair_of_one_model_takes_the_tags_of_all(tmp_path: Path) -> None:
    """A corpus that names no languages has those of the section data, whatever pair is asked for."""
    config = tiny(tmp_path, {"data.language_tags": True, "corpora": {"a": {}, "b": {"source": "de", "target": "en"}}})
    for pair in (("en", "de"), ("de", "en")):
        assert sorted(ModelText.of(config.with_languages(*pair)).tags) == ["<2de>", "<2en>"]
