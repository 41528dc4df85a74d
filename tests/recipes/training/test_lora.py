"""A run with LoRA: what is trained, what is saved, and how it is resumed."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from recipes.translation.commands import main
from recipes.translation.commands.training import student_config
from recipes.translation.data.corpus import load_corpus
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.average import average
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.run_folder.numbered import kept_models
from recipes.translation.run_folder.other_model import run_subwords
from recipes.translation.run_folder.translator import fill_model
from recipes.translation.settings.options import add_config_options
from recipes.translation.train import train
from tests.recipes.plain_scores import plain_sums
from tests.recipes.saved import assert_same_run, load_weights, saved_file, steps_of, trained_run, validations_of
from tests.recipes.tiny import options, tiny

BASE: dict[str, Any] = {
    "data.builtin_pairs": 120,
    "training.batch_tokens": 400,
    "training.steps": 3,
    "training.precision": "float64",
}
RANK, ALPHA = 4, 6.0
LORA: dict[str, Any] = {
    **BASE,
    "model.dropout": 0.0,
    "training.lora_rank": RANK,
    "training.lora_alpha": ALPHA,
    "training.keep_checkpoints": 3,
    "training.validate_every": 1,
    "training.clip": 0,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory, BASE)


@pytest.fixture(scope="module")
def tuned(base: Path) -> Path:
    run = base.parent / "tuned"
    train(tiny(run, {**LORA, "training.start_from": str(base)}))
    return run


def in_training(run: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights that `last` is trained on from: those that are kept, and the A and B of LoRA."""
    tensors = load_file(saved_file(run, "last", "model.safetensors"))
    lora = {name: tensor for name, tensor in tensors.items() if "lora" in name}
    return {name: tensor for name, tensor in tensors.items() if name not in lora}, lora


def summed(kept: dict[str, Tensor], lora: dict[str, Tensor], alpha: float = ALPHA) -> dict[str, Tensor]:
    """The weights W + alpha / r B A, with one A and B for the keys and one for the values."""
    found = dict(kept)
    for name in lora:
        if name.endswith("lora_A"):
            A, B = lora[name], lora[name.replace("lora_A", "lora_B")]
            rank = B.size(1)
            blocks = [(A, B)]
            if "key_value" in name:
                blocks = [(A[:rank], B[: len(B) // 2]), (A[rank:], B[len(B) // 2 :])]
            weight = name.replace("lora_A", "weight")
            found[weight] = kept[weight] + alpha / rank * torch.cat([b @ a for a, b in blocks])
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12, msg=name)


def test_the_weights_keep_their_bits_and_models_have_the_sum(base: Path, tuned: Path) -> None:
    kept, lora = in_training(tuned)
    before = load_weights(base / "best")
    assert kept.keys() == before.keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in before.items())
    assert all(float(tensor.abs().max()) > 0 for tensor in lora.values())
    assert {key.split("/")[1] for key in load_file(saved_file(tuned, "last", "training.safetensors"))} == lora.keys()
    expected = summed(kept, lora)
    for found in (load_weights(tuned / "last"), load_weights(kept_models(tuned)[-1])):
        assert_close(found, expected)
    # What is exported knows nothing of LoRA
    assert main(["export", "--run", str(tuned), "--to", "safetensors", "--out", str(tuned.parent / "exported")]) == 0
    assert load_file(tuned.parent / "exported" / "model.safetensors").keys() == before.keys()
    for folder in (tuned / "best", *kept_models(tuned)):
        assert load_weights(folder).keys() == before.keys()
    adapted = {name.replace("lora_A", "weight") for name in lora if name.endswith("lora_A")}
    assert {name for name in expected if not torch.equal(expected[name], before[name])} == adapted


def test_every_step_has_the_loss_and_gradient_of_plain_pytorch(base: Path, tuned: Path) -> None:
    """The gradient of A and B by autograd through W + alpha / r B A, and Adam's step, from the first A on."""
    config = tiny(tuned, {**LORA, "training.start_from": str(base)})
    first = tiny(base.parent / "first", {**LORA, "training.start_from": str(base), "training.learning_rate": 0})
    train(first)
    kept, lora = in_training(Path(first.run))
    lora = {name: tensor.requires_grad_() for name, tensor in lora.items()}
    assert not any(bool(tensor.any()) for name, tensor in lora.items() if name.endswith("lora_B"))
    optimizer = torch.optim.Adam(lora.values(), betas=config.training.betas, eps=1e-9)
    model = load_translator(base / "best").model.double()
    fill_model(model, kept, base)  # in float64
    corpus = load_corpus(config, subwords_of=run_subwords)
    records = steps_of(tuned)
    for indices, record in zip(corpus.train.epoch(0), records, strict=False):
        batch = corpus.train.batch(indices)
        hidden = torch.func.functional_call(model, summed(kept, lora), (batch.src, batch.tgt_in))
        logits = model.generator(hidden).flatten(0, 1)
        loss = F.cross_entropy(logits, batch.tgt_out.flatten(), ignore_index=0, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-9)
        gradients = [tensor.grad for tensor in lora.values() if tensor.grad is not None]
        assert record["gradient_norm"] == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-9)
        optimizer.param_groups[0]["lr"] = record["learning_rate"]
        optimizer.step()
    assert len(records) == 3


def test_what_is_validated_is_what_is_saved(base: Path, tuned: Path) -> None:
    corpus = load_corpus(tiny(tuned, {**LORA, "training.start_from": str(base)}), subwords_of=run_subwords)
    (valid,) = corpus.valid
    model = load_translator(tuned / "last").model.double()
    total, _, _, tokens = plain_sums(model, valid.batches)
    record = validations_of(tuned)[-1]
    assert record["step"] == 3
    assert record["valid_loss"] == pytest.approx(total / tokens, rel=1e-6)


def test_the_average_of_a_run_is_that_of_its_whole_models(tuned: Path) -> None:
    folders = kept_models(tuned)
    expected = {name: sum(load_weights(each)[name] for each in folders) / 3 for name in load_weights(folders[0])}
    average(tuned)
    assert_close(load_weights(tuned / "averaged"), expected)  # type: ignore[arg-type]


def test_another_run_begins_with_the_sum(tuned: Path, tmp_path: Path) -> None:
    for start in (tuned, tuned / "last"):
        run = tmp_path / start.name
        changes = {"training.start_from": str(start), "training.learning_rate": 0, "training.steps": 1}
        train(tiny(run, {**LORA, **changes}))
        assert_close(in_training(run)[0], load_weights(tuned / ("best" if start == tuned else "last")))


def test_a_resumed_run_with_every_option_is_the_uninterrupted_one_bit_for_bit(base: Path, tmp_path: Path) -> None:
    """The other run is gone by then, and the moving average is one of A and B."""
    start = shutil.copytree(base, tmp_path / "start")
    changes = {
        **LORA,
        "model.dropout": 0.2,
        "training.start_from": str(start),
        "training.precision": "float32",
        "training.ema": 0.5,
        "training.accumulate": 2,
        "training.devices": "[cpu, cpu]",
        "training.validate_every": 2,
    }
    train(tiny(tmp_path / "through", {**changes, "training.steps": 4}))
    train(tiny(tmp_path / "resumed", {**changes, "training.steps": 2}))
    shutil.rmtree(start)
    train(tiny(tmp_path / "resumed", {**changes, "training.steps": 4}))
    assert_same_run(tmp_path / "through", tmp_path / "resumed")
    kept, lora = in_training(tmp_path / "through")
    weights = {name: tensor.float() for name, tensor in load_weights(base / "best").items()}
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights.items())
    trained = load_file(saved_file(tmp_path / "through", "last", "training.safetensors"))
    assert not any(torch.equal(trained[f"weights/{name}"], tensor) for name, tensor in lora.items())


def test_the_log_has_the_number_of_trained_parameters(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {**LORA, "training.start_from": str(base), "training.lora_rank": 16, "training.steps": 1}
    assert main(["train", *options(tmp_path / "run", changes)]) == 0
    # rank 16 x (inputs + outputs): 3 attentions of 4 matrices, 2 networks of 2 matrices, all 16 wide
    trained = 16 * (16 + 16) * (3 * 4 + 2 * 2)
    total = sum(each.numel() for each in load_translator(base / "best").model.parameters()) + trained
    assert f"[train] {total / 1e6:.1f} M parameters ({trained / 1e6:.2f} M trained)," in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training.start_from": ""}, r"training\.lora_rank is 4, but training\.start_from names no model: LoRA keeps"),
        ({"training.freeze": ["encoder"]}, r"training\.lora_rank is 4 and training\.freeze encoder: LoRA keeps all"),
        ({"layout.vocab": 2}, r"training\.lora_rank is 4 and layout\.vocab 2: LoRA's matrices are not split"),
        ({"training.lora_rank": 17}, r"training\.lora_rank is 17, above model\.d_model 16: choose a lower"),
        ({"training.lora_rank": 0}, r"training\.lora_alpha is 6, but training\.lora_rank is 0: set the rank"),
        ({"training.lora_rank": -1}, r"training\.lora_rank .* expects a whole number from 0 up; got '-1'"),
        ({"training.lora_alpha": 0}, r"training\.lora_alpha .* expects a number from 0\.01 to below 1e\+06; got '0'"),
    ],
)
def test_what_lora_cannot_be_is_refused(changes: dict[str, Any], message: str, base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tiny(tmp_path / "run", {**LORA, "training.start_from": str(base), **changes}))
    assert not (tmp_path / "run" / "last").exists()


def test_a_student_of_such_a_run_is_trained_without_lora(tuned: Path, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    add_config_options(parser)
    words = ["--training.teacher", str(tuned), "--run", str(tmp_path / "student")]
    training = student_config(parser.parse_args(words), False).training
    assert (training.lora_rank, training.lora_alpha, training.start_from) == (0, 16, "")


def test_the_rank_cannot_change_in_a_run(tuned: Path, base: Path) -> None:
    changes = {**LORA, "training.start_from": str(base), "training.steps": 4}
    for name, value in (("training.lora_rank", 5), ("training.lora_alpha", 5.0)):
        with pytest.raises(ConfigError, match=rf"^{name} is 5.* but .* was trained with "):
            train(tiny(tuned, {**changes, name: value}))
