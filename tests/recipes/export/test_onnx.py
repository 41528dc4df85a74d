"""A model as ONNX graphs, run by ONNX Runtime, computes what it does in torch."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models import (
    EncoderDecoder,
    TransformerConfig,
    default_limit,
    greedy,
    make_transformer,
)
from recipes.translation.data.batches import pad_rows
from recipes.translation.data.builtin_corpus import pairs
from recipes.translation.errors import ConfigError
from recipes.translation.export import onnx_model
from recipes.translation.export.onnx_model import check
from recipes.translation.run_folder.translator import tensors_of
from recipes.translation.text.subwords import BOS, EOS, PAD
from tests.fenced import fenced
from tests.recipes.export.translators import as_saved
from tests.recipes.random_translator import random_translator

pytestmark = [pytest.mark.formats, pytest.mark.timeout(900)]  # torch.onnx takes ten seconds a graph

VOCAB = 30
DOCUMENT = Path(__file__).parents[3] / "docs/export.md"


def transformer(**changes: Any) -> EncoderDecoder:
    settings: dict[str, Any] = {"d_model": 16, "d_ff": 24, "heads": 2, "encoder_layers": 1, "decoder_layers": 2}
    target = VOCAB if changes.get("tie", "all") == "all" else VOCAB + 7
    return noisy(make_transformer(TransformerConfig(**{**settings, **changes}), VOCAB, target, pad=PAD))


def noisy(model: EncoderDecoder) -> EncoderDecoder:
    """Weights so large that every part of the model has a say, biases and norms too; one token is never to come."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        model.generator.bias[7] = -math.inf
    return model.eval()


class Exported:
    """The graphs in ONNX Runtime."""

    def __init__(self, build: Callable[[], EncoderDecoder], weights: Mapping[str, Tensor], folder: Path) -> None:
        self.folder = folder
        self.build = build
        self.names = onnx_model.names_of(self.on_meta())
        onnx_model.save(build, weights, self.names, folder)
        for name in ("encoder", "decoder"):
            onnx.checker.check_model(folder / f"{name}.onnx", full_check=True)
        self.state = self.names["state"]
        self.memory = self.names["encoder"]["outputs"]
        self.encoder, self.decoder = (session(folder / f"{name}.onnx") for name in ("encoder", "decoder"))

    def on_meta(self) -> EncoderDecoder:
        with torch.device("meta"):
            return self.build()

    def log_probabilities(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Feed the target token by token: (B, T, V)."""
        held = dict(zip(self.memory, self.encoder.run(None, {"source": src.numpy()}), strict=True))
        steps = []
        for step in range(tgt.size(1)):
            scores, *state = self.decoder.run(None, {"token": tgt[:, step].numpy(), **held})
            held.update(zip(self.state, state, strict=True))
            steps.append(torch.from_numpy(scores))
        return torch.stack(steps, 1)


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


def in_torch(model: EncoderDecoder, src: Tensor, tgt: Tensor) -> Tensor:
    with torch.no_grad():
        scores: Tensor = model.generator(model(src, tgt)).log_softmax(-1)
    return scores


def sentences(lengths: list[int], steps: int) -> tuple[Tensor, Tensor]:
    """Sources of these lengths, 0 for padding alone, and targets."""
    src = torch.full((len(lengths), max(1, *lengths)), PAD)
    for row, length in enumerate(lengths):
        src[row, :length] = torch.randint(4, VOCAB, (length,))
    tgt = torch.randint(4, VOCAB, (len(lengths), steps))
    tgt[:, 0] = BOS
    return src, tgt


MODELS = {
    "pre-norm, all tied": lambda: transformer(norm="pre", tie="all"),
    "post-norm, target tied": lambda: transformer(norm="post", tie="target"),
    "post-norm, nothing tied": lambda: transformer(norm="post", tie="none"),
}


@pytest.fixture(scope="module", params=MODELS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[EncoderDecoder, Exported]:
    build = MODELS[request.param]
    model = build()
    return model, Exported(build, tensors_of(model), tmp_path_factory.mktemp("onnx"))


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5), steps=st.integers(1, 9), seed=st.integers(0, 2**31)
)
def test_every_step_has_the_log_probabilities_of_the_whole_target_in_torch(
    both: tuple[EncoderDecoder, Exported], lengths: list[int], steps: int, seed: int
) -> None:
    model, exported = both
    torch.manual_seed(seed)
    src, tgt = sentences(lengths, steps)
    torch.testing.assert_close(exported.log_probabilities(src, tgt), in_torch(model, src, tgt), rtol=0, atol=1e-4)


def test_no_length_is_too_long(both: tuple[EncoderDecoder, Exported]) -> None:
    model, exported = both
    torch.manual_seed(1)
    src, tgt = sentences([700, 3], 300)
    torch.testing.assert_close(exported.log_probabilities(src, tgt), in_torch(model, src, tgt), rtol=0, atol=1e-4)


def test_rows_may_be_repeated_and_reordered_as_beams_are(both: tuple[EncoderDecoder, Exported]) -> None:
    model, exported = both
    src, tgt = sentences([5, 9], 3)
    held = dict(zip(exported.memory, exported.encoder.run(None, {"source": src.numpy()}), strict=True))
    _, *state = exported.decoder.run(None, {"token": tgt[:, 0].numpy(), **held})
    rows = numpy.array([1, 0, 1])
    held = {name: value[rows] for name, value in held.items()}
    held.update(zip(exported.state, (value[rows] for value in state), strict=True))
    scores, *_ = exported.decoder.run(None, {"token": tgt[rows, 1].numpy(), **held})
    expected = in_torch(model, src[rows], tgt[rows])[:, 1]
    torch.testing.assert_close(torch.from_numpy(scores), expected, rtol=0, atol=1e-4)


def test_the_graphs_have_the_names_of_their_facts_and_free_axes(both: tuple[EncoderDecoder, Exported]) -> None:
    _, exported = both
    for graph, facts in ((exported.encoder, exported.names["encoder"]), (exported.decoder, exported.names["decoder"])):
        assert [value.name for value in graph.get_inputs()] == facts["inputs"]
        assert [value.name for value in graph.get_outputs()] == facts["outputs"]
        assert all(value.shape[0] == "batch" for value in [*graph.get_inputs(), *graph.get_outputs()])
    shapes = {value.name: value.shape for value in exported.decoder.get_inputs()}
    assert shapes["keys_0"] == ["batch", 2, "past", 8]
    assert shapes["memory_keys_0"] == ["batch", 2, "source", 8]


def test_a_tied_embedding_is_stored_once_and_no_line_of_code_at_all(both: tuple[EncoderDecoder, Exported]) -> None:
    model, exported = both
    weights = onnx.load(exported.folder / "decoder.onnx").graph.initializer
    of_words = [weight for weight in weights if weight.dims[:] == [model.generator.out_features, 16]]
    tied = model.generator.weight is model.tgt_embed.lookup.weight
    assert len(of_words) == (1 if tied else 2)
    assert b".py" not in (exported.folder / "decoder.onnx").read_bytes()


def test_graphs_that_are_not_the_model_are_refused(both: tuple[EncoderDecoder, Exported]) -> None:
    model, exported = both
    check(exported.folder, exported.names, exported.on_meta(), tensors_of(model))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.decoder.layers[0].feed_forward.outer.bias[0] += 1
    with pytest.raises(ConfigError, match=r"torch.onnx does not export this model correctly: .* differ by up to"):
        check(exported.folder, exported.names, exported.on_meta(), tensors_of(other))


class AsTokens:
    """A subword model that leaves tokens as they are: text can hide a difference."""

    def decode(self, rows: list[list[int]]) -> list[list[int]]:
        return rows


def test_the_search_of_the_document_finds_the_tokens_of_our_own(tmp_path: Path) -> None:
    translator = random_translator(tmp_path)
    translator.model.double()
    onnx_model.write(as_saved(translator), tmp_path / "exported")
    facts = json.loads((tmp_path / "exported/onnx.json").read_text())
    (code,) = [block.code for block in fenced(DOCUMENT) if block.code.startswith("import json, ")]
    english = [pair.source for pair in pairs(40, 3)]
    ids = [[*row, EOS] for row in translator.source.encode(english)]
    for longest in (6, 60):
        (tmp_path / "exported/onnx.json").write_text(json.dumps({**facts, "max_length": longest}))
        names: dict[str, Any] = {}
        exec(code.replace("runs/demo/onnx", str(tmp_path / "exported")), names)
        names["target"] = AsTokens()
        limits = [min(default_limit(len(row)), longest) for row in ids]
        expected = greedy(translator.model, pad_rows(ids), bos=BOS, eos=EOS, max_length=limits)
        assert len({tuple(row) for row in expected}) > 5
        ended = sum(len(row) < limit for row, limit in zip(expected, limits, strict=True))
        assert 0 < ended < len(expected)
        assert names["translate"](english) == expected
