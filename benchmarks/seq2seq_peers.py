"""Build one translation model, each time with its training step: ours, Marian (Hugging Face), `nn.Transformer`.

Ours is there three times: as it is, with compiled layers, and with the loss as it is usually written. All get the same
padded batches, the same optimizer (fused Adam) and the same clipping, so that only the model and its loss differ.
Dropout is on embeddings and sublayers; `nn.Transformer` also has it on attention weights and inside the feed-forward
network, where it cannot be set separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from benchmarks.loss.peers import import_quietly
from models import PRESETS, TransformerConfig, make_transformer, sinusoidal_positions
from models.transformer import first_weights
from recipes.translation.data.batches import Batch, TokenBatches
from recipes.translation.processes.ranks import ALONE
from recipes.translation.settings.config import load_config
from recipes.translation.text.subwords import BOS, EOS, PAD
from recipes.translation.training.layout import Layout
from recipes.translation.training.progress import read_step
from seqpar.multi_device.devices import check_devices

SMOOTHING = 0.1
CLIP = 1.0
ADAM = {"lr": 1e-4, "betas": (0.9, 0.98), "eps": 1e-9, "fused": True}

SIZES: dict[str, tuple[TransformerConfig, int]] = {
    "d128": (PRESETS["multi30k"], 10_000),
    "d256": (PRESETS["small"], 10_000),
    "d512": (PRESETS["base"], 32_000),
}
"""Sizes and vocabulary by name; all share one embedding for source, target and generator."""

# fmt: off
TARGET_LENGTHS = {
    4: 4, 5: 10, 6: 89, 7: 318, 8: 914, 9: 1494, 10: 2008, 11: 2496, 12: 2672, 13: 2740, 14: 2498, 15: 2349, 16: 2015,
    17: 1788, 18: 1481, 19: 1266, 20: 1031, 21: 816, 22: 618, 23: 533, 24: 434, 25: 297, 26: 259, 27: 205, 28: 148,
    29: 116, 30: 103, 31: 64, 32: 51, 33: 50, 34: 25, 35: 20, 36: 15, 37: 23, 38: 11, 39: 8, 40: 8, 41: 6, 42: 2, 43: 6,
}
# fmt: on
"""How many of Multi30k's 29,000 German training captions have so many subwords (joint BPE, 10,000), end included.

The English caption beside t German subwords has about 0.77 t + 3.2, with a standard deviation of 0.115 t + 0.5.
"""


def pairs(vocab_size: int, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Return 29,000 pairs of random ids, as long as Multi30k's."""
    rng = numpy.random.default_rng(seed)
    targets = rng.permutation(numpy.repeat(list(TARGET_LENGTHS), list(TARGET_LENGTHS.values())))
    sources = numpy.rint(rng.normal(0.77 * targets + 3.2, 0.115 * targets + 0.5)).astype(int).clip(2)
    # Ids from 4: 0 to 3 are padding, unknown, start and end. The length counts the end symbol, which the batch adds
    source_ids = [rng.integers(4, vocab_size, length - 1).tolist() for length in sources]
    target_ids = [rng.integers(4, vocab_size, length - 1).tolist() for length in targets]
    return source_ids, target_ids


def batches(vocab_size: int, tokens: int, order: str) -> Iterator[Batch]:
    """Yield batches of about `tokens` target tokens: of `similar` lengths, as the recipe makes them, or `mixed`."""
    # The budget counts padding, of which batches of similar lengths have about a twentieth
    made = TokenBatches(*pairs(vocab_size), batch_tokens=round(1.05 * tokens), seed=0)
    if order == "similar":
        yield from (made.batch(indices) for indices in made.epoch(0))
        return
    # Pairs in random order, as many in each batch as have `tokens` target tokens on average
    all_tokens = sum(length * count for length, count in TARGET_LENGTHS.items())
    size = round(tokens * sum(TARGET_LENGTHS.values()) / all_tokens)
    for start in range(0, len(made.sources) - size, size):
        yield made.batch(range(start, start + size))


class Trained:
    """Train a model with Adam and clipping on one device; each kind has its own model and loss."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def loss_mean(self, batch: Batch) -> float:
        """Return the mean loss in the model's present mode, and leave clipped gradients."""
        raise NotImplementedError

    def step(self, batch: Batch) -> float:
        """Take a whole training step."""
        self.model.train()
        mean = self.loss_mean(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean


class Ours(Trained):
    """Train `models/` with the step that `recipes/translation/train.py` takes, on one device."""

    name = "seqpar"
    compiles = False

    def __init__(self, config: TransformerConfig, vocab_size: int, precision: str, device: str = "cpu") -> None:
        with torch.device("meta"):
            self.model = make_transformer(config, vocab_size, vocab_size, PAD)
        settings = {
            "training.precision": precision,
            "training.label_smoothing": SMOOTHING,
            "training.compile": self.compiles,
        }
        run = load_config(None, settings)
        self.layout = Layout(
            self.model, first_weights(self.model), run.training, run.layout, list(check_devices([device])), ALONE
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), **ADAM)

    def loss_mean(self, batch: Batch) -> float:
        """Return the mean loss, exactly divided, read as the recipe reads it."""
        loss = self.layout.accumulate([batch])
        return read_step(loss, self.layout.clip(CLIP)).loss


class Compiled(Ours):
    """Train the same with compiled layers."""

    name = "seqpar, compiled layers"
    compiles = True


class PlainLoss(Ours):
    """Train the same with all logits at once."""

    name = "seqpar, plain loss"

    def loss_mean(self, batch: Batch) -> float:
        """Return the mean loss, with the plain loss in place of the engine's."""
        with patch.object(seqpar.LossCompute, "forward", plain_loss):
            return super().loss_mean(batch)


def plain_loss(engine: Any, hidden: Tensor | list[Tensor], target: Tensor, **_: Any) -> seqpar.TokenLoss:
    """Compute all logits at once, in place of `LossCompute.forward`; scattered hidden states have one part."""
    if not isinstance(hidden, Tensor):
        (hidden,) = hidden
    criterion = engine.head["criterion"]
    ignored = criterion.ignore_index
    logits = engine.head["generator"](hidden).flatten(0, -2)
    total = F.cross_entropy(
        logits, target.flatten(), ignore_index=ignored, label_smoothing=criterion.label_smoothing, reduction="sum"
    )
    return seqpar.TokenLoss(total, (target != ignored).sum())


class Peer(Trained):
    """Train a peer: a model that returns logits, with the loss as it is usually written."""

    def __init__(self, model: nn.Module, precision: str, device: str) -> None:
        self.model = model.to(device)
        self.precision = precision
        self.device = torch.device(device)
        self.optimizer = torch.optim.Adam(model.parameters(), **ADAM)

    def logits(self, batch: Batch) -> Tensor:
        """Return logits (B, T, V)."""
        raise NotImplementedError

    def loss_mean(self, batch: Batch) -> float:
        """Return the mean loss of all logits."""
        batch = Batch(*(ids.to(self.device, non_blocking=True) for ids in batch))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            logits = self.logits(batch).flatten(0, 1)
            target = batch.tgt_out.flatten()
            loss = F.cross_entropy(logits, target, ignore_index=PAD, label_smoothing=SMOOTHING)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        return loss.item()


class Marian(Peer):
    """Train Hugging Face's MarianMTModel, made from a configuration, with its default attention (sdpa)."""

    name = "Marian"

    def __init__(self, config: TransformerConfig, vocab_size: int, precision: str, device: str = "cpu") -> None:
        super().__init__(marian(config, vocab_size), precision, device)

    def logits(self, batch: Batch) -> Tensor:
        """Return logits of the model as its users call it: padded ids with their masks."""
        return self.model(
            input_ids=batch.src,
            attention_mask=(batch.src != PAD).long(),
            decoder_input_ids=batch.tgt_in,
            decoder_attention_mask=(batch.tgt_in != PAD).long(),
            use_cache=False,
        ).logits


def marian(config: TransformerConfig, vocab_size: int) -> Any:
    """Return a MarianMTModel of the same size with random weights; it is always post-norm."""
    module = import_quietly("transformers.models.marian.modeling_marian")
    return module.MarianMTModel(
        module.MarianConfig(
            vocab_size=vocab_size,
            d_model=config.d_model,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            encoder_attention_heads=config.heads,
            decoder_attention_heads=config.heads,
            dropout=config.dropout,
            activation_function="relu",
            scale_embedding=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            decoder_start_token_id=BOS,
            forced_eos_token_id=None,
        )
    )


class TorchTransformer(Peer):
    """Train `nn.Transformer` with embeddings, sinusoidal positions and a tied generator."""

    name = "nn.Transformer"

    def __init__(self, config: TransformerConfig, vocab_size: int, precision: str, device: str = "cpu") -> None:
        super().__init__(_TorchTransformer(config, vocab_size), precision, device)

    def logits(self, batch: Batch) -> Tensor:
        """Return logits (B, T, V)."""
        return self.model(batch.src, batch.tgt_in)


class _TorchTransformer(nn.Module):
    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.transformer = nn.Transformer(
            config.d_model,
            config.heads,
            config.encoder_layers,
            config.decoder_layers,
            config.d_ff,
            config.dropout,
            norm_first=config.norm == "pre",
            batch_first=True,
        )
        self.generator = nn.Linear(config.d_model, vocab_size)
        self.generator.weight = self.embed.weight  # tied, as in the other two models
        self.register_buffer("positions", sinusoidal_positions(0, 256, config.d_model, like=self.embed.weight))

    def _embedded(self, tokens: Tensor) -> Tensor:
        scaled = self.embed(tokens) * math.sqrt(self.embed.embedding_dim)
        return self.dropout(scaled + self.positions[: tokens.size(1)])

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """(B, S) and (B, T) ids -> (B, T, V) logits."""
        length = tgt.size(1)
        hidden = self.transformer(
            self._embedded(src),
            self._embedded(tgt),
            tgt_mask=torch.ones(length, length, dtype=torch.bool, device=src.device).triu(1),
            src_key_padding_mask=src == PAD,
            tgt_key_padding_mask=tgt == PAD,
            memory_key_padding_mask=src == PAD,
            tgt_is_causal=True,
        )
        return self.generator(hidden)


def check_loss(size: str) -> float:
    """Return how far our loss is from the plain one of the same logits, relative, in float64.

    Raises:
        AssertionError: by more than 1e-12.
    """
    config, vocab_size = SIZES[size]
    torch.manual_seed(0)
    with torch.device("meta"):
        model = make_transformer(replace(config, dropout=0.0), vocab_size, vocab_size, PAD).double()
    run = load_config(None, {"training.label_smoothing": SMOOTHING, "training.precision": "float64"})
    layout = Layout(model, first_weights(model), run.training, run.layout, [torch.device("cpu")], ALONE)
    batch = next(batches(vocab_size, 300, "mixed"))
    with torch.no_grad():
        logits = model.generator(model(batch.src, batch.tgt_in)).flatten(0, 1)
        plain = F.cross_entropy(logits, batch.tgt_out.flatten(), ignore_index=PAD, label_smoothing=SMOOTHING)
        apart = abs(float(layout.loss_of(batch).mean) / float(plain) - 1)
    if apart > 1e-12:
        raise AssertionError(f"{size}: the losses are {apart:.1e} apart")
    return apart
