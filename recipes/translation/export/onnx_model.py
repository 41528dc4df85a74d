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
from pathlib import Path

from models import EncoderDecoder, TransformerConfig
from models.recurrent import RecurrentEncoderDecoder
from recipes.translation.errors import ConfigError
from recipes.translation.export import onnx_recurrent, onnx_transformer
from recipes.translation.export.architecture import check_encoder
from recipes.translation.export.onnx_check import check
from recipes.translation.export.onnx_interface import Graphs
from recipes.translation.files.atomic_folder import replaced_folder
from recipes.translation.run_folder.checkpoint import Translator, model_sizes, save_belongings, subword_names
from recipes.translation.text.subwords import BOS, EOS, PAD, UNK


def write(translator: Translator, folder: Path) -> None:
    """Replace `folder` by one with the model in float32, after a check in ONNX Runtime.

    Raises ConfigError for a model with options that the graphs do not know.
    """
    check_encoder(translator)
    check_architecture(translator)
    model = copy.deepcopy(translator.model).cpu().float()  # the caller keeps its own
    graphs = graphs_of(model)
    with replaced_folder(folder) as new:
        graphs.encoder.save(new)
        graphs.decoder.save(new)
        check(new, graphs, model)
        save_belongings(new, translator)
        facts = json.dumps(facts_of(translator, graphs), indent=2)
        (new / "onnx.json").write_text(facts + "\n", encoding="utf-8")


def check_architecture(translator: Translator) -> None:
    """Raise ConfigError for a Transformer with the positions or the activation of an imported one."""
    sizes = model_sizes(translator.config.model)
    if isinstance(sizes, TransformerConfig) and (sizes.architecture, sizes.activation) != ("vaswani", "relu"):
        raise ConfigError(
            f"model.preset {translator.config.model.preset} has the architecture {sizes.architecture} with activation "
            f"{sizes.activation}; as ONNX only vaswani with relu is exported"
        )


def graphs_of(model: EncoderDecoder) -> Graphs:
    """Return a float32 model as graphs."""
    if isinstance(model, RecurrentEncoderDecoder):
        return onnx_recurrent.graphs_of(model)
    return onnx_transformer.graphs_of(model)


def facts_of(translator: Translator, graphs: Graphs) -> dict[str, object]:
    """Return what a program that drives the graphs must know."""
    source, target = subword_names(translator.config)
    facts: dict[str, object] = {
        "pad": PAD,
        "unknown": UNK,
        "start": BOS,
        "end": EOS,
        "source_subwords": f"{source}.model",
        "target_subwords": f"{target}.model",
        "max_length": translator.config.decoding.max_length,
    }
    for graph in (graphs.encoder, graphs.decoder):
        inputs = [value.name for value in graph.inputs]
        facts[graph.name] = {"inputs": inputs, "outputs": [value.name for value in graph.outputs]}
    return {**facts, "state": graphs.state}
