"""Write a model as two ONNX graphs, an encoder and a cached decoder step, and what a program must know to run them.

    encoder   source (B, S)                   -> mask, memory, state before the first step
    decoder   token (B,), mask, memory, state -> log_probabilities (B, V), next state

The source has the end symbol, and is padded at the end; the token is the latest of each translation, at first the start
symbol. The mask (B, 1, 1, S) is added to the scores of attention to the memory. Memory and state are the keys and
values (B, H, time, K) of each layer: those of the source, and those of all steps so far. Each part of the state has the
same name in the encoder's outputs and the decoder's inputs, prefixed with `next_` in the decoder's outputs.

The folder has encoder.onnx, decoder.onnx, the run's config.yaml and subword models, and onnx.json:

    pad, unknown, start, end              ids, the same in both vocabularies
    source_subwords, target_subwords      the sentencepiece models
    max_length                            the run's longest translation, in subwords
    encoder, decoder                      the names of each graph's inputs and outputs
    state                                 the names of what each step replaces, in the order of the decoder's outputs

Shapes: B sentences, S source time, T target time, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir
import onnxruntime
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models import EncoderDecoder, evaluating, padding_mask
from models.attention import KeyValues, added_scores
from models.cache import DecoderCache, LayerCache
from recipes.translation.errors import ConfigError
from recipes.translation.export.lost_settings import transformer_sizes
from recipes.translation.files.atomic_folder import replaced_folder
from recipes.translation.run_folder.checkpoint import SavedModel, save_belongings, saved_names
from recipes.translation.run_folder.translator import build_model, model_on_meta
from recipes.translation.text.subwords import BOS, EOS, ORDINARY, PAD, UNK

OPSET = 18
"""The oldest version that torch.onnx writes, so that older runtimes can read the files too."""


def write(saved: SavedModel, folder: Path) -> None:
    """Replace `folder` with one that has the model in float32, after a check in ONNX Runtime.

    Only one weight at a time is in memory and, during the check, what the system maps of the files. Raises ConfigError
    for a model that is not an encoder-decoder, or that was imported.
    """
    sizes = transformer_sizes(saved)
    if (sizes.architecture, sizes.activation) != ("vaswani", "relu"):
        raise ConfigError(
            f"model.preset {saved.config.model.preset} has the architecture {sizes.architecture} with activation "
            f"{sizes.activation}; only vaswani with relu can be exported to ONNX"
        )
    if not saved.source.symbols == saved.target.symbols == ORDINARY:
        raise ConfigError(
            "the subwords are those of an imported model, with other symbols around a sentence than the programs that "
            "run the graphs expect: export it --to ctranslate2 or safetensors"
        )
    model = model_on_meta(sizes, saved.source, saved.target)
    names = names_of(model)
    with replaced_folder(folder) as new:
        save(lambda: build_model(sizes, saved.source, saved.target), saved.weights, names, new)
        check(new, names, model, saved.weights)
        save_belongings(new, saved)
        facts = json.dumps(facts_of(saved_names(saved), saved.config.decoding.max_length, names), indent=2)
        (new / "onnx.json").write_text(facts + "\n", encoding="utf-8")


def facts_of(subwords: tuple[str, str], max_length: int, names: Mapping[str, Any]) -> dict[str, object]:
    """Return what a program that runs the graphs must know; `subwords` are the names of the two models."""
    source, target = subwords
    return {
        "pad": PAD,
        "unknown": UNK,
        "start": BOS,
        "end": EOS,
        "source_subwords": f"{source}.model",
        "target_subwords": f"{target}.model",
        "max_length": max_length,
        **names,
    }


TOLERANCE = 1e-3
"""Rounding errors are below a tenth of it; a wrong equation gives far larger differences."""


def check(folder: Path, names: Mapping[str, Any], model: EncoderDecoder, weights: Mapping[str, Tensor]) -> None:
    """Raise ConfigError unless a few steps of the graphs in `folder` give the log-probabilities of the model.

    This keeps graphs that the exporter got wrong from being written. `model` is on "meta".
    """
    src, tgt = example(model)
    lend(model, weights)
    with evaluating(model):
        expected: Tensor = model.generator(model(src, tgt)).log_softmax(-1)
    found = log_probabilities(folder, names, src, tgt)
    # For a token whose bias is -inf the difference would be nan
    difference = torch.where(found == expected, 0.0, found - expected).abs().max().item()
    if not difference <= TOLERANCE:
        raise ConfigError(
            f"torch.onnx does not export this model correctly: in ONNX Runtime its log-probabilities differ by up to "
            f"{difference:.2g}; export it to another format"
        )


def lend(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give each module of a model on "meta" its own weights, in float32, only while it is called."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    for module in model.modules():
        for own, weight in list(module.named_parameters(recurse=False)):

            def fill(module: nn.Module, _: object, own: str = own, name: str = names[id(weight)]) -> None:
                setattr(module, own, nn.Parameter(weights[name].float(), requires_grad=False))

            def drop(module: nn.Module, *_: object, own: str = own, weight: nn.Parameter = weight) -> None:
                setattr(module, own, weight)

            module.register_forward_pre_hook(fill)
            module.register_forward_hook(drop)


def example(model: EncoderDecoder) -> tuple[Tensor, Tensor]:
    """Return two sources, one of them padded, and targets."""
    last = model.src_embed.lookup.num_embeddings - 1
    src = torch.arange(last, last - 10, -1).clamp(min=model.pad + 1).view(2, 5)
    src[1, 2:] = model.pad
    last = model.generator.out_features - 1
    return src, torch.arange(last, last - 6, -1).clamp(min=0).view(2, 3)


def log_probabilities(folder: Path, names: Mapping[str, Any], src: Tensor, tgt: Tensor) -> Tensor:
    """Feed the target to the graphs, token by token: (B, T, V)."""
    options = onnxruntime.SessionOptions()
    # Otherwise ONNX Runtime copies every matrix instead of mapping the file
    options.add_session_config_entry("session.disable_prepacking", "1")
    encoder, decoder = (
        onnxruntime.InferenceSession(folder / f"{name}.onnx", options, providers=["CPUExecutionProvider"])
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
    """Return the names of the graphs' inputs and outputs, and of the state's parts in the order of the outputs."""
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
        empty = [one[:, :, :0].clone() for one in tensors_of(memory)]  # clones, since every output needs a name
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
    """A layer's keys and values as tensors that each step extends: a graph cannot write to spare room in place."""

    def extend(self, new: KeyValues) -> KeyValues:
        """Return the keys and values of all steps."""
        assert self.own is not None
        keys = torch.cat((self.own.keys, new.keys), 2)
        self.own = KeyValues(keys, torch.cat((self.own.values, new.values), 2))
        return self.own


def tensors_of(pairs: Sequence[KeyValues]) -> list[Tensor]:
    """Return the keys and values of each layer as one flat list."""
    return [tensor for pair in pairs for tensor in (pair.keys, pair.values)]


def pairs_of(tensors: Sequence[Tensor]) -> list[KeyValues]:
    """Invert `tensors_of`."""
    return [KeyValues(*both) for both in zip(tensors[::2], tensors[1::2], strict=True)]


def save(
    build: Callable[[], EncoderDecoder], weights: Mapping[str, Tensor], names: Mapping[str, Any], folder: Path
) -> None:
    """Write `encoder.onnx` and `decoder.onnx`, and their weights, one at a time, to a file beside each."""
    # Not on "meta", where torch.onnx encounters strides that it cannot write
    with FakeTensorMode(), torch.no_grad():
        model = build().eval()
        source = torch.full((2, 3), model.pad + 1)
        encoder, step = EncoderGraph(model), StepGraph(model)
        mask, *rest = encoder(source)
        memory = rest[: len(names["state"])]
        # Any length but 1, which an export would treat as constant
        state = [torch.zeros_like(one[:, :, :2]) for one in memory]
        time = [{0: "batch", 2: "source"}] * len(memory)
        past = [{0: "batch", 2: "past"}] * len(state)
        free = {"token": {0: "batch"}, "mask": {0: "batch", 3: "source"}, "memory": time, "state": past}
        programs = {
            "encoder": program(encoder, (source,), names["encoder"], {"source": {0: "batch", 1: "source"}}),
            "decoder": program(step, (source[:, 0], mask, memory, state), names["decoder"], free),
        }
    first: dict[int, str] = {}
    origins = {
        f"model.{name}": first.setdefault(id(weight), name)
        for name, weight in model.named_parameters(remove_duplicate=False)
    }
    for name, found in programs.items():
        for value in found.model.graph.initializers.values():
            if origin := origins.get(str(value.name)):
                read = partial(written_weight, weights, origin)
                value.const_value = onnx_ir.LazyTensor(
                    read, dtype=onnx_ir.DataType.FLOAT, shape=value.shape, name=value.name
                )
        found.optimize()  # afterwards, as it reads the weights
        found.save(folder / f"{name}.onnx", external_data=True)


def written_weight(weights: Mapping[str, Tensor], name: str) -> onnx_ir.TensorProtocol:
    """Return a weight in the form in which it is written."""
    return onnx_ir.tensor(weights[name].detach().cpu().float().numpy())


def program(
    module: nn.Module, arguments: tuple[Any, ...], names: dict[str, list[str]], free: dict[str, Any]
) -> torch.onnx.ONNXProgram:
    """Return the graph of a module's forward; `free` names, for each argument, the axes that may have any length."""
    with quiet():
        found = torch.onnx.export(
            module.eval(),
            arguments,
            input_names=names["inputs"],
            output_names=names["outputs"],
            dynamic_shapes=free,
            opset_version=OPSET,
            verbose=False,
            optimize=False,
        )
    assert found is not None
    ClearMetadataAndDocStringPass()(found.model)  # drops the code lines, and their folders, that made each node
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch.onnx from reporting operators of other packages, and axes that share a name."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
