"""Compare exported graphs with their model, in ONNX Runtime, before anyone uses them."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

from models import EncoderDecoder, evaluating
from recipes.translation.errors import ConfigError
from recipes.translation.export.onnx_graphs import Names

TOLERANCE = 1e-3
"""Rounding is below a tenth of it; an equation that differs is far above."""


def check(folder: Path, names: Names, model: EncoderDecoder) -> None:
    """Raise ConfigError unless a few steps of the graphs in `folder` have the log-probabilities of the model.

    So what an exporter gets wrong is not written.
    """
    src, tgt = example(model)
    with evaluating(model):
        expected: Tensor = model.generator(model(src, tgt)).log_softmax(-1)
    difference = (log_probabilities(folder, names, src, tgt) - expected).abs().max().item()
    if not difference <= TOLERANCE:
        raise ConfigError(
            f"torch.onnx does not export this model rightly: in ONNX Runtime its log-probabilities differ by up to "
            f"{difference:.2g}; export it to another format"
        )


def example(model: EncoderDecoder) -> tuple[Tensor, Tensor]:
    """Return two sources, one of them padded, and targets."""
    last = model.src_embed.lookup.num_embeddings - 1
    src = torch.arange(last, last - 10, -1).clamp(min=model.pad + 1).view(2, 5)
    src[1, 2:] = model.pad
    last = model.generator.out_features - 1
    return src, torch.arange(last, last - 6, -1).clamp(min=0).view(2, 3)


def log_probabilities(folder: Path, names: Names, src: Tensor, tgt: Tensor) -> Tensor:
    """Feed the target to the graphs, token by token: (B, T, V)."""
    encoder, decoder = (
        onnxruntime.InferenceSession(folder / f"{name}.onnx", providers=["CPUExecutionProvider"])
        for name in ("encoder", "decoder")
    )
    held = dict(zip(names.encoder["outputs"], encoder.run(None, {"source": src.numpy()}), strict=True))
    steps = []
    for step in range(tgt.size(1)):
        scores, *state = decoder.run(None, {"token": tgt[:, step].numpy(), **held})
        held.update(zip(names.state, state, strict=True))
        steps.append(torch.from_numpy(scores))
    return torch.stack(steps, 1)
