"""The decoder-only model through the recipe: trained, resumed, over processes, translating, scoring, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models import PRESETS, DecoderOnlyConfig, make_decoder_only
from recipes.translation.commands import main
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.run_folder.translator import Translator, model_sizes
from recipes.translation.settings.config import ModelConfig
from recipes.translation.settings.run import DECODER_ONLY
from recipes.translation.text.subwords import BOS, EOS
from recipes.translation.train import train
from recipes.translation.training.trained_weights import freeze
from recipes.translation.translating.translate import translate
from seqpar.testing.ranks import ranks
from tests.recipes.processes.layouts import trained
from tests.recipes.saved import load_weights, steps_of, trained_run
from tests.recipes.tiny import tiny_decoder_only


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in steps_of(run)]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(
        tmp_path_factory,
        {"training.steps": 20, "training.learning_rate": 0.02, "training.precision": "bf16"},
        tiny_decoder_only,
    )


def plain_greedy(translator: Translator, ids: list[int], steps: int) -> list[int]:
    """Appends the most probable token, and computes the whole unpadded sequence anew at each step."""
    found: list[int] = []
    for _ in range(steps):
        hidden = translator.model(torch.tensor([[*ids, EOS]]), torch.tensor([[BOS, *found]]))[0, -1]
        logits = translator.model.generator(hidden)
        logits[[0, BOS]] = -torch.inf
        if (token := int(logits.argmax())) == EOS:
            break
        found.append(token)
    return found


@torch.no_grad()
def test_it_learns_and_translates_from_its_checkpoint(learned: Path) -> None:
    found = losses(learned)
    assert found[-1] < 0.8 * found[0]
    translator = load_translator(learned / "best")
    sentences = [pair.source for pair in pairs(8, 3)]
    plain = [plain_greedy(translator, ids, 8) for ids in translator.source.encode(sentences)]
    assert any(plain)
    assert translate(translator, sentences) == translator.target.decode(plain)


def test_every_word_of_its_translations_is_linked(
    learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = pairs(3, 3)
    sources = [pair.source for pair in some]
    prefixes = tmp_path / "prefixes"  # the model has hardly learned, and says nothing of itself
    prefixes.write_text("".join(f"{pair.target.split()[0]}\n" for pair in some), encoding="utf-8")
    files = ["--prefixes", str(prefixes), "--alignments", str(tmp_path / "links")]
    assert main(["translate", "--run", str(learned), *sources, *files]) == 0
    translations = capsys.readouterr().out.splitlines()
    assert all(translations)
    for line, source, translation in zip(
        (tmp_path / "links").read_text().splitlines(), sources, translations, strict=True
    ):
        links = [tuple(map(int, link.split("-"))) for link in line.split()]
        assert {word for _, word in links} == set(range(len(translation.split())))
        assert {word for word, _ in links} <= set(range(len(source.split())))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory, EXACT, tiny_decoder_only)


EXACT: dict[str, Any] = {
    "training.precision": "float64",
    "model.dropout": 0.0,
    "training.accumulate": 2,
    "training.steps": 2,
}


@pytest.mark.parametrize("axis", ["data", "shard", "vocab"])
def test_two_processes_train_as_one(axis: str, one_process: Path, tmp_path: Path) -> None:
    changes = {**EXACT, "training.devices": "auto", f"layout.{axis}": 2}
    ranks(2, trained, tiny_decoder_only(tmp_path / "two", changes))
    assert losses(tmp_path / "two") == pytest.approx(losses(one_process), rel=1e-10)
    expected = load_weights(one_process / "last")
    for name, tensor in load_weights(tmp_path / "two" / "last").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-8, atol=1e-10)


def test_two_replicas_train_as_one(one_process: Path, tmp_path: Path) -> None:
    train(tiny_decoder_only(tmp_path / "two", {**EXACT, "training.devices": "[cpu, cpu]"}))
    assert losses(tmp_path / "two") == pytest.approx(losses(one_process), rel=1e-10)


def test_presets_without_an_encoder_are_known_to_the_settings() -> None:
    assert set(DECODER_ONLY) == {name for name, sizes in PRESETS.items() if isinstance(sizes, DecoderOnlyConfig)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"subwords.joint": False}, "subwords.joint is false, but model.preset decoder_only reads source and target"),
        ({"training.freeze": ["encoder"]}, "training.freeze names encoder, but model.preset decoder_only has none"),
    ],
)
def test_what_cannot_be_had_together_is_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        tiny_decoder_only(tmp_path / "run", changes)
    assert "\n" not in str(caught.value)


def test_parts_that_it_has_are_frozen() -> None:
    model = make_decoder_only(DecoderOnlyConfig(d_model=4, d_ff=4, heads=2, decoder_layers=1, tie="none"), 9)
    freeze(model, ["decoder"])
    frozen = {name.partition(".")[0] for name, parameter in model.named_parameters() if not parameter.requires_grad}
    trained = {name.partition(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert (frozen, trained) == ({"decoder"}, {"tgt_embed", "generator"})
    with pytest.raises(ConfigError, match="names source_embedding but not target_embedding; source_embedding, "):
        freeze(model, ["source_embedding"])


def test_a_setting_that_it_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.encoder_layers is not a setting of decoder_only, which has d_ff, "):
        model_sizes(ModelConfig(preset="decoder_only", encoder_layers=4))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "--to", to], "model.preset decoder_only has no encoder; only encoder-decoders are exported")
        for to in ("ctranslate2", "onnx")
    ],
)
def test_what_needs_an_encoder_is_refused_in_one_line(
    words: list[str], message: str, learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--run", str(learned)]) == 2
    assert message in capsys.readouterr().err
