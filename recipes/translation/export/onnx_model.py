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

from recipes.translation.errors import ConfigError
from recipes.translation.export.architecture import transformer_sizes
from recipes.translation.export.onnx_check import check
from recipes.translation.export.onnx_graphs import Names, save
from recipes.translation.files.atomic_folder import replaced_folder
from recipes.translation.run_folder.checkpoint import Translator, save_belongings, subword_names
from recipes.translation.text.subwords import BOS, EOS, PAD, UNK


def write(translator: Translator, folder: Path) -> None:
    """Replace `folder` by one with the model in float32, after a check in ONNX Runtime.

    Raises ConfigError for a model that is no Transformer, or an imported one.
    """
    check_architecture(translator)
    model = copy.deepcopy(translator.model).cpu().float()  # the caller keeps its own
    names = Names.of(model)
    with replaced_folder(folder) as new:
        save(model, names, new)
        check(new, names, model)
        save_belongings(new, translator)
        facts = json.dumps(facts_of(translator, names), indent=2)
        (new / "onnx.json").write_text(facts + "\n", encoding="utf-8")


def check_architecture(translator: Translator) -> None:
    """Raise ConfigError for what is no Transformer, or has the positions or the activation of an imported one."""
    sizes = transformer_sizes(translator)
    if (sizes.architecture, sizes.activation) != ("vaswani", "relu"):
        raise ConfigError(
            f"model.preset {translator.config.model.preset} has the architecture {sizes.architecture} with activation "
            f"{sizes.activation}; as ONNX only vaswani with relu is exported"
        )


def facts_of(translator: Translator, names: Names) -> dict[str, object]:
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
    return {**facts, "encoder": names.encoder, "decoder": names.decoder, "state": names.state}
