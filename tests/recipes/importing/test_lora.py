"""LoRA on an imported model: the same training as PEFT's LoRA on transformers' own class."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from recipes.translation.importing.published_model import import_model
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.settings.config import load_config
from recipes.translation.train import train
from tests.recipes.importing import published
from tests.recipes.importing.tuned import PAIRS, tuning
from tests.recipes.saved import saved_file

pytestmark = pytest.mark.formats

RANK, ALPHA, STEPS, RATE = 3, 6.0, 4, 0.01
TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
NAMES = {
    "query": ["q_proj"],
    "key_value": ["k_proj", "v_proj"],
    "output": ["out_proj"],
    "inner": ["fc1"],
    "outer": ["fc2"],
    "self_attention": ["self_attn"],
    "memory_attention": ["encoder_attn"],
    "feed_forward": [],
}


def their_names(name: str) -> list[str]:
    """PEFT's names for an A or B of ours: two for the keys and values."""
    *outer, attention, own, kind = name.split(".")
    path = outer + NAMES[attention]
    return ["base_model.model.model." + ".".join([*path, each, kind, "default.weight"]) for each in NAMES[own]]


def lora_of(run: Path) -> dict[str, Tensor]:
    tensors = load_file(saved_file(run, "last", "model.safetensors"))
    return {name: tensor for name, tensor in tensors.items() if "lora" in name}


def pieces(lora: dict[str, Tensor]) -> dict[str, Tensor]:
    """A and B by PEFT's names."""
    found = {}
    for name, tensor in lora.items():
        theirs = their_names(name)
        found |= dict(zip(theirs, tensor.chunk(len(theirs)), strict=True))
    return found


def peft_model(folder: Path) -> Any:
    """transformers' model with PEFT's LoRA, in float64."""
    with warnings.catch_warnings(action="ignore"):
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForSeq2SeqLM

        model = AutoModelForSeq2SeqLM.from_pretrained(folder).double()
        lora = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=TARGETS, bias="none")
        return get_peft_model(model, lora)


def batch_of(folder: Path, languages: tuple[str, str], start: int) -> dict[str, Tensor]:
    tokenizer = published.tokenizer_of(folder, *languages)
    sources, targets = zip(*PAIRS, strict=True)
    tokens = tokenizer(list(sources), text_target=list(targets), padding=True, return_tensors="pt")
    labels = tokens["labels"]
    tokens["decoder_input_ids"] = torch.cat((torch.full((len(PAIRS), 1), start), labels[:, :-1]), 1)
    return {**tokens, "labels": labels.masked_fill(labels == tokenizer.pad_token_id, -100)}


@pytest.mark.parametrize(
    ("make", "languages"),
    [(published.marian, ("", "")), (published.m2m100, ("en", "de"))],
    ids=["marian", "m2m100"],
)
def test_lora_on_an_imported_model_is_peft_on_the_model_of_transformers(
    make: Callable[[Path], Path], languages: tuple[str, str], tmp_path: Path
) -> None:
    folder = make(tmp_path / "model")
    import_model(folder, tmp_path / "run", *languages)
    changes = {
        "training.lora_rank": RANK,
        "training.lora_alpha": ALPHA,
        "training.precision": "float64",
        "training.clip": 0,
        "training.schedule": "constant",
        "training.warmup": 0,
        "training.validate_every": STEPS,
        "training.steps": STEPS,
    }
    best = saved_file(tmp_path / "run", "best", "config.yaml")
    for name, rate in (("first", 0.0), ("tuned", RATE)):
        run = {"run": str(tmp_path / name), "training.learning_rate": rate}
        train(load_config(best, {**tuning(tmp_path / "run", tmp_path), **changes, **run}), insist=True)

    model = peft_model(folder)
    theirs = {name: each for name, each in model.named_parameters() if each.requires_grad}
    first = pieces(lora_of(tmp_path / "first"))
    assert first.keys() == theirs.keys()
    with torch.no_grad():
        for name, each in theirs.items():
            each.copy_(first[name])
    optimizer = torch.optim.Adam(theirs.values(), lr=RATE, betas=(0.9, 0.98), eps=1e-9)
    batch = batch_of(folder, languages, model.config.decoder_start_token_id)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    records = [each["loss"] for each in read_metrics(tmp_path / "tuned" / "metrics.jsonl") if "loss" in each]
    assert records == pytest.approx(losses, rel=1e-7)  # transformers computes positions in float32
    assert losses[0] - losses[-1] > 0.1
    for name, tensor in pieces(lora_of(tmp_path / "tuned")).items():
        torch.testing.assert_close(tensor, theirs[name].detach(), rtol=1e-6, atol=1e-7, msg=name)
    merged = model.merge_and_unload().state_dict()
    found = load_translator(tmp_path / "tuned" / "best").model.state_dict()
    expected = torch.cat([merged[f"model.decoder.layers.1.encoder_attn.{kind}_proj.weight"] for kind in ("k", "v")])
    torch.testing.assert_close(
        found["decoder.layers.1.memory_attention.key_value.weight"].double(), expected, rtol=1e-5, atol=1e-6
    )
