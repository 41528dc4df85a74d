"""A run that begins with another one's model, and parts of it that are not trained."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipes.translation.commands import main
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.corpus import load_corpus
from recipes.translation.errors import CheckpointError, ConfigError
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.run_folder.other_model import run_subwords
from recipes.translation.settings.training import PARTS
from recipes.translation.train import train
from tests.recipes.plain_scores import plain_loss
from tests.recipes.saved import assert_same_last, load_weights, saved_file, steps_of, trained_run
from tests.recipes.tiny import options, tiny, tiny_decoder_only

BASE: dict[str, Any] = {"data.builtin_pairs": 120, "training.batch_tokens": 400, "training.steps": 2}
OTHER: dict[str, Any] = {**BASE, "data.builtin_pairs": 150, "model.dropout": 0.0}
"""Other data, for which other subwords would have been made."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory, BASE)


def test_it_begins_with_the_weights_and_subwords_of_the_other_run(base: Path, tmp_path: Path) -> None:
    """At a learning rate of 0, the model stays what it was at the beginning."""
    for name, start in (("of a run", base), ("of a checkpoint", base / "last")):
        run = tmp_path / name
        train(tiny(run, {**OTHER, "training.start_from": str(start), "training.learning_rate": 0, "training.seed": 4}))
        found, expected = load_weights(run / "last"), load_weights(base / ("best" if start == base else "last"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert (
            saved_file(run, "last", "joint.model").read_bytes() == saved_file(base, "best", "joint.model").read_bytes()
        )
        assert not (run / "subwords").exists()
    train(tiny(tmp_path / "own", OTHER))
    assert (
        saved_file(tmp_path / "own", "last", "joint.model").read_bytes()
        != (saved_file(base, "best", "joint.model")).read_bytes()
    )


def test_a_resumed_fine_tuning_goes_on_without_the_other_run(base: Path, tmp_path: Path) -> None:
    start = shutil.copytree(base, tmp_path / "start")
    tuned = {**OTHER, "training.start_from": str(start), "training.freeze": ("encoder",), "training.ema": 0.5}
    train(tiny(tmp_path / "through", {**tuned, "training.steps": 4}))
    train(tiny(tmp_path / "resumed", {**tuned, "training.steps": 2}))
    shutil.rmtree(start)
    train(tiny(tmp_path / "resumed", {**tuned, "training.steps": 4}))
    assert_same_last(tmp_path / "through", tmp_path / "resumed", "joint.model")
    with pytest.raises(
        CheckpointError, match=r"^training\.start_from is .*, but there is no trained model in .*best: "
    ):
        train(tiny(tmp_path / "new", tuned))


@pytest.mark.parametrize("frozen", [("encoder",), ("decoder", "source_embedding"), ("generator", "target_embedding")])
def test_a_frozen_part_keeps_its_bits_and_has_no_moments_and_the_rest_is_trained(
    frozen: tuple[str, ...], tmp_path: Path
) -> None:
    """The gradient norm is that of the other parts, by plain PyTorch."""
    run = tmp_path / "run"
    changes = {"model.tie": "target", "training.freeze": frozen, "training.clip": 0, "model.dropout": 0.0}
    config = tiny(run, {**BASE, **changes, "training.steps": 1, "training.precision": "float64"})
    train(tiny(tmp_path / "first", {**BASE, **changes, "training.learning_rate": 0, "training.precision": "float64"}))
    train(config)
    first, trained = load_weights(tmp_path / "first" / "last"), load_weights(run / "last")
    kept = tuple(f"{PARTS[name]}." for name in frozen)
    names = {name for name, _ in load_translator(run / "last").model.named_parameters()}
    for name in names:
        assert torch.equal(first[name], trained[name]) == name.startswith(kept), name
    moments = load_file(saved_file(run, "last", "training.safetensors"))
    assert {key.split("/")[1] for key in moments} == {name for name in names if not name.startswith(kept)}

    translator = load_translator(tmp_path / "first" / "last")
    model = translator.model.double()
    corpus = load_corpus(config)
    batch = corpus.train.batch(corpus.train.epoch(0)[0])
    plain_loss(model, batch).backward()
    gradients = [p.grad for name, p in model.named_parameters() if not name.startswith(kept) and p.grad is not None]
    (record,) = steps_of(run)
    assert record["gradient_norm"] == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"subwords.vocab_size": 361}, r"subwords\.vocab_size is 361, but .* has 360"),
        ({"subwords.kind": "bpe"}, r"subwords\.kind is 'bpe', but .* has 'unigram'"),
        ({"subwords.lowercase": True}, r"subwords\.lowercase is True, but .* has False"),
        ({"subwords.joint": False, "model.tie": "none"}, r"subwords\.joint is False, but .* has True"),
        ({"model.d_model": 18}, r"model\.d_model is 18, but .* has 16"),
        ({"model.heads": 4}, r"model\.heads is 4, but .* has 2"),  # the same shapes, and another function
        ({"model.norm": "post"}, r"model\.norm is 'post', but .* has 'pre'"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_the_setting(
    changes: dict[str, Any], message: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}: use the same value, or take all its settings with --config"):
        train(tiny(tmp_path / "run", {**BASE, "training.start_from": str(base), **changes}))
    assert not (tmp_path / "run" / "last").exists()


@pytest.mark.parametrize(
    ("layers", "kept"), [(1, [0]), (2, [0, 4]), (3, [0, 2, 4]), (4, [0, 1, 3, 4]), (5, [0, 1, 2, 3, 4])]
)
def test_a_shallower_model_begins_with_spaced_layers_of_the_other_run(
    layers: int, kept: list[int], deep: Path, tmp_path: Path
) -> None:
    """Its outputs are those of the deep model from which the other layers have been taken out."""
    changes = {"training.start_from": str(deep), "training.learning_rate": 0, "model.decoder_layers": layers}
    train(tiny(tmp_path / "run", {**OTHER, **changes, "training.steps": 1}))
    begun = load_translator(tmp_path / "run" / "last").model
    expected = load_translator(deep / "best").model
    expected.decoder.layers = torch.nn.ModuleList(expected.decoder.layers[place] for place in kept)
    expected.encoder.layers = torch.nn.ModuleList(expected.encoder.layers[:1])
    src, tgt = torch.randint(4, 300, (3, 7)), torch.randint(4, 300, (3, 5))
    assert torch.equal(begun.generator(begun(src, tgt)), expected.generator(expected(src, tgt)))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(
        tmp_path_factory, {**BASE, "training.steps": 1, "model.encoder_layers": 3, "model.decoder_layers": 5}
    )


def test_a_deeper_model_is_refused(deep: Path, tmp_path: Path) -> None:
    changes = {"training.start_from": str(deep), "model.decoder_layers": 6}
    with pytest.raises(ConfigError, match=r"^model\.decoder_layers is 6, but .* has 5: use the same value"):
        train(tiny(tmp_path / "run", {**BASE, **changes}))


def test_a_model_of_another_architecture_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.encoder_layers is None, but .* has 1: use the same value"):
        train(tiny_decoder_only(tmp_path / "run", {**BASE, "training.start_from": str(base)}))


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (
            ["encoders"],
            r"^training\.freeze \(command line\) expects a list, each one of encoder, decoder, source_embedding, .*; "
            r"got 'encoders': did you mean encoder\?$",
        ),
        (
            ["encoder", "source_embedding"],
            r"^training\.freeze names source_embedding but not target_embedding and generator; "
            r"source_embedding, target_embedding, generator share a weight, .* name all of them, or none$",
        ),
        (list(PARTS), r"^training\.freeze names every part of the model, and leaves nothing to train"),
    ],
)
def test_parts_that_cannot_be_frozen_are_one_line(freeze: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        train(tiny(tmp_path / "run", {**BASE, "training.freeze": freeze}))
    assert "\n" not in str(caught.value)


def test_prepare_names_where_the_subwords_are(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {**BASE, "training.start_from": str(base)}
    assert main(["prepare", *options(tmp_path / "run", changes)]) == 0
    assert capsys.readouterr().out.endswith(f"\n[prepare] 360 source and 360 target subwords in {base}\n")
    source, _ = run_subwords(Corpora(tiny(tmp_path / "run", changes)))
    assert len(source) == 360


@pytest.mark.parametrize("way", ["training.start_from", "training.teacher"])
@pytest.mark.parametrize(
    ("name", "value"), [("train_pairs", 7), ("character_coverage", 0.98), ("byte_fallback", False)]
)
def test_settings_of_new_subwords_beside_another_models_are_refused(
    way: str, name: str, value: object, base: Path, tmp_path: Path
) -> None:
    given = {**BASE, way: str(base), f"subwords.{name}": value}
    if way == "training.teacher":
        given["training.teacher_weight"] = 0.5
    with pytest.raises(
        ConfigError, match=rf"^subwords\.{name} is {value}, but the subwords come from another model and were made with"
    ):
        train(tiny(tmp_path / "run", given))


def test_two_vocabularies_of_one_size_do_not_share_an_embedding(tmp_path: Path) -> None:
    apart = {"subwords.joint": False, "training.steps": 1}
    with pytest.raises(ConfigError, match=r"^model\.tie is all \(preset .* their subwords differ: set model.tie tar"):
        train(tiny(tmp_path / "run", apart))
    train(tiny(tmp_path / "run", {**apart, "model.tie": "target"}))
    model = load_translator(tmp_path / "run" / "best").model
    assert model.src_embed.lookup.weight.shape == model.tgt_embed.lookup.weight.shape
    assert model.src_embed.lookup.weight is not model.tgt_embed.lookup.weight
