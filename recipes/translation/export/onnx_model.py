"""Write a model as ONNX: an encoder and a decoder step, with what a program must know to drive them.

The folder has encoder.onnx, decoder.onnx, the run's config.yaml and subword models, and onnx.json:

    pad, unknown, start, end              ids, the same in both vocabularies
    source_subwords, target_subwords      the sentencepiece models
    max_length                            the run's longest translation, in subwords
    encoder, decoder                      the names of each graph's inputs and outputs
    state                                 the names of what every step replaces, in the order of the decoder's outputs
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor

from models import EncoderDecoder, evaluating
from recipes.translation.errors import ConfigError
from recipes.translation.export.architecture import transformer_sizes
from recipes.translation.export.onnx_graphs import names_of, save
from recipes.translation.files.atomic_folder import replaced_folder
from recipes.translation.run_folder.checkpoint import save_belongings, subword_names
from recipes.translation.run_folder.translator import Translator
from recipes.translation.text.subwords import BOS, EOS, PAD, UNK


def write(translator: Translator, folder: Path) -> None:
    """Replace `folder` by one with the model in float32, after a check in ONNX Runtime.

    Raises ConfigError for a model that is not a Transformer, or an imported one.
    """
    check_architecture(translator)
    model = copy.deepcopy(translator.model).cpu().float()  # the caller keeps its own
    names = names_of(model)
    with replaced_folder(folder) as new:
        save(model, names, new)
        check(new, names, model)
        save_belongings(new, translator)
        facts = json.dumps(facts_of(translator, names), indent=2)
        (new / "onnx.json").write_text(facts + "\n", encoding="utf-8")


def check_architecture(translator: Translator) -> None:
    """Raise ConfigError for anything but a Transformer with the positions and the activation of Vaswani et al. 2017."""
    sizes = transformer_sizes(translator)
    if (sizes.architecture, sizes.activation) != ("vaswani", "relu"):
        raise ConfigError(
            f"model.preset {translator.config.model.preset} has the architecture {sizes.architecture} with activation "
            f"{sizes.activation}; as ONNX only vaswani with relu is exported"
        )


def facts_of(translator: Translator, names: Mapping[str, Any]) -> dict[str, object]:
    """Return what a program that drives the graphs must know."""
    source, target = subword_names(translator.config)
    return {
        "pad": PAD,
        "unknown": UNK,
        "start": BOS,
        "end": EOS,
        "source_subwords": f"{source}.model",
        "target_subwords": f"{target}.model",
        "max_length": translator.config.decoding.max_length,
        **names,
    }


TOLERANCE = 1e-3
"""Rounding is below a tenth of it; an equation that differs is far above."""


def check(folder: Path, names: Mapping[str, Any], model: EncoderDecoder) -> None:
    """Raise ConfigError unless a few steps of the graphs in `folder` have the log-probabilities of the model.

    So what an exporter gets wrong is not written.
    """
    src, tgt = example(model)
    with evaluating(model):
        expected: Tensor = model.generator(model(src, tgt)).log_softmax(-1)
    difference = (log_probabilities(folder, names, src, tgt) - expected).abs().max().item()
    if not difference <= TOLERANCE:
        raise ConfigError(
            f"torch.onnx does not export this model correctly: in ONNX Runtime its log-probabilities differ by up to "
            f"{difference:.2g}; export it to another format"
        )


def example(model: EncoderDecoder) -> tuple[Tensor, Tensor]:
    """Return two sources, one of them padded, and targets."""
    last = model.src_embed.lookup.num_embeddings - 1
    src = torch.arange(last, last - 10, -1).clamp(min=model.pad + 1).view(2, 5)
    src[1, 2:] = model.pad
    last = model.generator.out_features - 1
    return src, torch.arange(last, last - 6, -1).clamp(min=0).view(2, 3)


def log_probabilities(folder: Path, names: Mapping[str, Any], src: Tensor, tgt: Tensor) -> Tensor:
    """Feed the target to the graphs, token by token: (B, T, V)."""
    encoder, decoder = (
        onnxruntime.InferenceSession(folder / f"{name}.onnx", providers=["CPUExecutionProvider"])
        for name in ("encoder", "decoder")
    )
    held = dict(zip(names["encoder"]["outputs"], encoder.run(None, {"source": src.numpy()}), strict=True))
    steps = []
    for step in range(tgt.size(1)):
        scores, *state = decoder.run(None, {"token": tgt[:, step].numpy(), **held})
        held.update(zip(names["state"], state, strict=True))
        steps.append(torch.from_numpy(scores))
    return torch.stack(steps, 1)
