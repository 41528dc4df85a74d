"""Write a model as two ONNX graphs, an encoder and a cached decoder step, with what a program must know to drive them.

    encoder   source (B, S)             -> mask, memory, state before the first step
    decoder   token (B,), mask, memory, state -> log_probabilities (B, V), next state

The source has the end symbol, and is padded at the end; the token is the latest of each translation, the start symbol
at first. The mask (B, 1, 1, S) is added to the scores of attention to the memory. Memory and state are the keys and
values (B, H, time, K) of each layer: those of the source, and those of all steps so far. Each part of the state has the
same name in the encoder's outputs and the decoder's inputs, and `next_` before it in the decoder's outputs.

The folder has encoder.onnx, decoder.onnx, the run's config.yaml and subword models, and onnx.json:

    pad, unknown, start, end              ids, the same in both vocabularies
    source_subwords, target_subwords      the sentencepiece models
    max_length                            the run's longest translation, in subwords
    encoder, decoder                      the names of each graph's inputs and outputs
    state                                 the names of what every step replaces, in the order of the decoder's outputs

Shapes: B sentences, S source time, T target time, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn

from models import EncoderDecoder, evaluating, padding_mask
from models.attention import KeyValues, added_scores
from models.cache import DecoderCache, LayerCache
from recipes.translation.errors import ConfigError
from recipes.translation.export.architecture import transformer_sizes
from recipes.translation.files.atomic_folder import replaced_folder
from recipes.translation.run_folder.checkpoint import save_belongings, subword_names
from recipes.translation.run_folder.translator import Translator
from recipes.translation.text.subwords import BOS, EOS, PAD, UNK

OPSET = 18
"""The oldest that torch.onnx writes, so that older runtimes read the files too."""


def write(translator: Translator, folder: Path) -> None:
    """Replace `folder` by one with the model in float32, after a check in ONNX Runtime.

    Raises ConfigError for a model that is not a Transformer, or an imported one.
    """
    sizes = transformer_sizes(translator)
    if (sizes.architecture, sizes.activation) != ("vaswani", "relu"):
        raise ConfigError(
            f"model.preset {translator.config.model.preset} has the architecture {sizes.architecture} with activation "
            f"{sizes.activation}; as ONNX only vaswani with relu is exported"
        )
    model = copy.deepcopy(translator.model).cpu().float()  # the caller keeps its own
    names = names_of(model)
    with replaced_folder(folder) as new:
        save(model, names, new)
        check(new, names, model)
        save_belongings(new, translator)
        facts = json.dumps(facts_of(translator, names), indent=2)
        (new / "onnx.json").write_text(facts + "\n", encoding="utf-8")


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


def names_of(model: EncoderDecoder) -> dict[str, Any]:
    """Return what the graphs call their inputs and outputs, and the parts of the state in the order of the outputs."""
    state = [f"{part}_{layer}" for layer in range(len(model.decoder.layers)) for part in ("keys", "values")]
    held = ["mask", *(f"memory_{part}" for part in state), *state]
    return {
        "encoder": {"inputs": ["source"], "outputs": held},
        "decoder": {"inputs": ["token", *held], "outputs": ["log_probabilities", *(f"next_{part}" for part in state)]},
        "state": state,
    }


class EncoderGraph(nn.Module):
    """What the encoder's graph computes."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor) -> tuple[Tensor, ...]:
        """Return mask, memory and the empty state."""
        mask = padding_mask(source, self.model.pad)
        states = self.model.encode(source, mask)
        scores = added_scores(mask, states)
        assert scores is not None
        memory = [layer.memory_attention.keys_values(states) for layer in self.model.decoder.layers]  # type: ignore[union-attr, operator]
        empty = [one[:, :, :0].clone() for one in tensors_of(memory)]  # clones, for every output needs a name
        return (scores, *tensors_of(memory), *empty)


class StepGraph(nn.Module):
    """What the decoder's graph computes."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, token: Tensor, mask: Tensor, memory: Sequence[Tensor], state: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the log-probabilities and the next state."""
        layers = [LongerCache(*both) for both in zip(pairs_of(state), pairs_of(memory), strict=True)]
        x = self.model.tgt_embed(token[:, None], state[0].size(2))
        hidden = self.model.decoder(x, None, memory[0], mask, DecoderCache(list(layers)))
        scores = self.model.generator(hidden[:, 0]).log_softmax(-1)
        return (scores, *tensors_of([layer.own for layer in layers if layer.own is not None]))


class LongerCache(LayerCache):
    """A layer's keys and values as tensors that a step makes longer: a graph has no room to write to in place."""

    def extend(self, new: KeyValues) -> KeyValues:
        """Return the keys and values of all steps."""
        assert self.own is not None
        keys = torch.cat((self.own.keys, new.keys), 2)
        self.own = KeyValues(keys, torch.cat((self.own.values, new.values), 2))
        return self.own


def tensors_of(pairs: Sequence[KeyValues]) -> list[Tensor]:
    """Return keys and values of each layer, one after the other."""
    return [tensor for pair in pairs for tensor in (pair.keys, pair.values)]


def pairs_of(tensors: Sequence[Tensor]) -> list[KeyValues]:
    """Return what `tensors_of` took."""
    return [KeyValues(*both) for both in zip(tensors[::2], tensors[1::2], strict=True)]


def save(model: EncoderDecoder, names: Mapping[str, Any], folder: Path) -> None:
    """Write `encoder.onnx` and `decoder.onnx`, and beside each its weights if they are too large for one file."""
    source = torch.full((2, 3), model.pad + 1)
    encoder, step = EncoderGraph(model).eval(), StepGraph(model).eval()
    with evaluating(model):
        mask, *rest = encoder(source)
    memory = rest[: len(names["state"])]
    # Any length but 1, which an export takes for one that is always 1
    state = [torch.zeros_like(one[:, :, :2]) for one in memory]
    time = [{0: "batch", 2: "source"}] * len(memory)
    past = [{0: "batch", 2: "past"}] * len(state)
    free = {"token": {0: "batch"}, "mask": {0: "batch", 3: "source"}, "memory": time, "state": past}
    write_graph(encoder, (source,), names["encoder"], {"source": {0: "batch", 1: "source"}}, folder / "encoder.onnx")
    write_graph(step, (source[:, 0], mask, memory, state), names["decoder"], free, folder / "decoder.onnx")


def write_graph(
    module: nn.Module, arguments: tuple[Any, ...], names: dict[str, list[str]], free: dict[str, Any], path: Path
) -> None:
    """Write the graph of a module's forward; `free` has the names of the axes of any length, by argument."""
    with quiet():
        program = torch.onnx.export(
            module,
            arguments,
            input_names=names["inputs"],
            output_names=names["outputs"],
            dynamic_shapes=free,
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    ClearMetadataAndDocStringPass()(program.model)  # the lines of code, with their folders, that made each node
    program.save(path)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch.onnx from reporting operators of other packages, and of axes that share a name."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
