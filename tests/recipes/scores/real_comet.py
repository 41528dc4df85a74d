"""Check `evaluate --comet` against the package unbabel-comet itself, with a tiny model of random weights.

    make test-comet

The package needs older versions of numpy, transformers and protobuf than the tests, so this is a program that runs in
an environment of its own, and not a test among the others. No model is downloaded: encoder, tokeniser and checkpoint
are made here, the checkpoint by comet's own class and Lightning's trainer.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any

# Before the packages are imported, which read them
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import comet
import pytorch_lightning
import sentencepiece
import torch
import yaml
from comet.models import RegressionMetric
from transformers import XLMRobertaConfig, XLMRobertaTokenizer

from recipes.translation.commands import main
from recipes.translation.errors import ConfigError
from recipes.translation.scores.comet import comet_scores

SENTENCES = [
    ("the number 3 is a small dog.", "die Zahl 3 ist ein Hund.", "die Zahl 3 ist ein kleiner Hund."),
    ("a dog.", "ein kleiner Hund.", "ein Hund."),
    ("the number 17 is small.", "die Zahl ist klein.", "die Zahl 17 ist klein."),
    ("is the dog small ?", "ist der Hund klein ?", "ist der Hund klein ?"),
    ("number", "Zahl", "Nummer 4 ist ein Hund."),
]
"""Sources, translations and references."""


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def make_encoder(folder: Path) -> None:
    """Write the configuration and the tokeniser of a tiny XLM-R, as the hub's cache has them."""
    text = folder / "text"
    text.write_text("".join(f"the number {n} is a small dog. die Zahl {n} ist ein Hund.\n" for n in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokens"), vocab_size=50, minloglevel=2
    )
    tokeniser = XLMRobertaTokenizer(str(folder / "tokens.model"))
    tokeniser.save_pretrained(str(folder))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    XLMRobertaConfig(vocab_size=len(tokeniser), max_position_embeddings=130, **sizes).save_pretrained(str(folder))


def make_model(folder: Path, encoder: Path) -> Path:
    """Write a checkpoint and its hparams.yaml, as comet's own training does; return the checkpoint."""
    torch.manual_seed(0)
    model = RegressionMetric(
        pretrained_model=str(encoder),
        hidden_sizes=[24, 12],
        nr_frozen_epochs=0,
        load_pretrained_weights=False,
        local_files_only=True,
    )
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.strategy.connect(model)
    checkpoint = folder / "checkpoints" / "model.ckpt"
    checkpoint.parent.mkdir(parents=True)
    trainer.save_checkpoint(checkpoint, weights_only=True)
    (folder / "hparams.yaml").write_text(yaml.safe_dump({**model.hparams, "class_identifier": "regression_metric"}))
    return checkpoint


def check_scores(model: Path, checkpoint: Path) -> list[float]:
    """Compare the score of each sentence with what comet itself predicts, one sentence at a time."""
    sources, translations, references = (list(side) for side in zip(*SENTENCES, strict=True))
    ours = comet_scores(model, sources, translations, references)
    theirs = []
    for source, translation, reference in SENTENCES:
        own = comet.load_from_checkpoint(str(checkpoint), local_files_only=True)
        sample = {"src": source, "mt": translation, "ref": reference}
        theirs.append(100 * own.predict([sample], batch_size=1, gpus=0, progress_bar=False).system_score)
    assert len({round(score, 3) for score in ours}) == len(ours), ours
    worst = max(abs(mine - other) for mine, other in zip(ours, theirs, strict=True))
    assert worst < 1e-4, (ours, theirs)  # a sentence's padding moves the last digit of float32
    print(f"[test-comet] {len(ours)} sentences; largest difference from comet's own scores: {worst:.1e} of 100")
    return ours


def check_command(folder: Path, model: Path, scores: list[float]) -> None:
    """Compare what the command prints with the mean of the scores."""
    words = ["evaluate", "--comet", str(model)]
    for option, side in zip(("--sources", "--hypotheses", "--references"), zip(*SENTENCES, strict=True), strict=True):
        path = folder / option.strip("-")
        path.write_text("".join(f"{line}\n" for line in side))
        words += [option, str(path)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(words) == 0
    mean = sum(scores) / len(scores)
    assert f"COMET              {mean:6.2f}  [" in said.getvalue(), said.getvalue()
    print(f"[test-comet] evaluate prints their mean, {mean:.2f}")


def check_code(checkpoint: Path, model: Path) -> None:
    """Put code into the checkpoint, and see it refused without being run."""
    content = torch.load(checkpoint, weights_only=True)
    folder = checkpoint.parent / "made"
    torch.save({**content, "callbacks": Code(folder)}, checkpoint)
    torch.load(checkpoint, weights_only=False)
    folder.rmdir()
    sources, translations, references = (list(side) for side in zip(*SENTENCES, strict=True))
    message = "the checkpoint was loaded"
    try:
        comet_scores(model, sources, translations, references)
    except ConfigError as error:
        message = str(error)
    assert "contains more than weights" in message, message
    assert not folder.exists()
    print("[test-comet] a checkpoint that contains code is refused, and the code is not run")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        encoder = folder / "encoder"
        encoder.mkdir()
        make_encoder(encoder)
        checkpoint = make_model(folder / "model", encoder)
        found = check_scores(folder / "model", checkpoint)
        check_command(folder, folder / "model", found)
        check_code(checkpoint, folder / "model")
