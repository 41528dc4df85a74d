"""Published models become runs whose outputs, losses and texts are transformers' own."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import seqpar
from models import beam_search, greedy
from recipes.translation.commands import main
from recipes.translation.data.batches import pad_rows, padded_batch
from recipes.translation.errors import CheckpointError
from recipes.translation.importing.folder import read_config, read_generation
from recipes.translation.importing.published_model import import_model, read_model
from recipes.translation.importing.settings import decoding_of
from recipes.translation.importing.tokenizer import our_tokenizer
from recipes.translation.run_folder.checkpoint import load_translator
from recipes.translation.run_folder.translator import Translator
from recipes.translation.text.subwords import EOS, PAD
from recipes.translation.translating.translate import translate
from tests.recipes.importing import published

pytestmark = pytest.mark.formats

SENTENCES = [
    "The train to Vienna leaves at half past seven.",
    "A small dog!",
    "abcdefg hij  klmno Zwölf Boxkämpfer jagen Éric",
    "one",
]
TARGETS = ["Der Zug nach Wien.", "Ein Hund sieht abcd, ijh und klkl!", "Zwölf", "a b c"]


class Case(NamedTuple):
    """A published model, and the languages that it is imported for."""

    make: Callable[..., Path]
    options: Mapping[str, Any] = MappingProxyType({})
    languages: tuple[str, str] = ("", "")


CASES = {
    "opus-mt": Case(published.marian),
    "opus-mt with two vocabularies": Case(published.marian, {"separate": True}),
    "opus-mt-tc-big": Case(published.marian, {"activation_function": "relu"}),
    "m2m100": Case(published.m2m100, languages=("en", "de")),
    "nllb": Case(published.nllb, languages=("eng_Latn", "deu_Latn")),
    "mbart-50": Case(published.mbart, languages=("en_XX", "de_DE")),
    "mbart": Case(published.mbart, {"fifty": False}, languages=("en_XX", "de_DE")),
}


class Pair(NamedTuple):
    """transformers' model and ours, and the ids there of ours."""

    theirs: Any
    ours: Translator
    source_ids: Tensor
    target_ids: Tensor
    folder: Path
    languages: tuple[str, str]


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case = CASES[request.param]
    folder = case.make(tmp_path_factory.mktemp("published") / "model", **case.options)
    ours = read_model(folder, Path("run"), *case.languages).translator
    start = read_generation(folder)[0]["decoder_start_token_id"]
    tokenizer = our_tokenizer(folder, read_config(folder), start, case.languages)
    ids = (torch.tensor(tokenizer.source_ids), torch.tensor(tokenizer.target_ids))
    return Pair(published.model_of(folder), ours, *ids, folder, case.languages)


def tokens_of(pair: Pair) -> Any:
    """Return transformers' tokens of SENTENCES and TARGETS, as lists."""
    return published.tokenizer_of(pair.folder, *pair.languages)(SENTENCES, text_target=TARGETS)


def test_ids_and_text_are_those_of_transformers_tokenizer(pair: Pair) -> None:
    tokens = tokens_of(pair)
    source, target = pair.ours.source, pair.ours.target
    found = [source.symbols.source(row) for row in source.encode(SENTENCES)]
    assert [pair.source_ids[torch.tensor(row)].tolist() for row in found] == tokens["input_ids"]
    rows = target.encode(TARGETS)
    for row, label in zip(rows, tokens["labels"], strict=True):
        theirs = pair.target_ids[torch.tensor(row)].tolist()
        codes = set(label) - set(theirs) - {pair.target_ids[EOS].item()}
        assert [each for each in label if each not in codes][:-1] == theirs
        assert len(codes) == (1 if pair.languages[0] else 0)
    tokenizer = published.tokenizer_of(pair.folder)
    every = [list(range(start, start + 9)) for start in range(4, len(target), 9)]
    every = [[each for each in row if each < len(target)] for row in [*rows, *every]]
    expected = [[pair.target_ids[each].item() for each in row] for row in every]
    texts = tokenizer.batch_decode(expected, skip_special_tokens=True)
    unspecial = [text for text in texts if not re.search("__|madeup|>>|<unk>", text)]
    kept = [text for text, theirs in zip(target.decode(every), texts, strict=True) if theirs in unspecial]
    assert len(kept) > 20
    assert kept == unspecial


def batch_of(pair: Pair) -> Any:
    source, target = pair.ours.source, pair.ours.target
    return padded_batch(source.encode(SENTENCES), target.encode(TARGETS), source.symbols)


def their_inputs(pair: Pair) -> dict[str, Tensor]:
    batch = batch_of(pair)
    return {
        "input_ids": pair.source_ids[batch.src],
        "attention_mask": (batch.src != PAD).long(),
        "decoder_input_ids": pair.target_ids[batch.tgt_in],
    }


def test_logits_of_a_padded_batch_are_those_of_transformers(pair: Pair) -> None:
    batch = batch_of(pair)
    with torch.no_grad():
        expected = pair.theirs(**their_inputs(pair)).logits[..., pair.target_ids]
        found = pair.ours.model.generator(pair.ours.model(batch.src, batch.tgt_in))
    real = batch.tgt_out != PAD
    assert expected[real].std() > 0.5
    torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)


def test_greedy_and_beam_search_find_what_transformers_generates(pair: Pair) -> None:
    """Once with the model's own end symbol, and once with another: a token with which some translation goes on."""
    model = pair.ours.model
    symbols = pair.ours.source.symbols
    src = pad_rows([symbols.source(row) for row in pair.ours.source.encode(SENTENCES)])
    limit = 13 - len(symbols.start)
    longest = max(greedy(model, src, bos=symbols.start, eos=EOS, max_length=limit), key=len)
    for eos in (EOS, longest[-1]):
        common: dict[str, Any] = {"bos": symbols.start, "eos": eos, "max_length": limit}
        found = greedy(model, src, **common)
        assert_same_tokens(pair, found, eos, generated(pair, src, eos, num_beams=1))
        beams = [each[0].tokens for each in beam_search(model, src, beam=3, length_penalty=0.0, **common)]
        settings = {"num_beams": 3, "early_stopping": True, "length_penalty": 0.0}
        assert_same_tokens(pair, beams, eos, generated(pair, src, eos, **settings))
    assert len(longest) > 1
    assert min(map(len, found)) < limit


def generated(pair: Pair, src: Tensor, eos: int, **settings: Any) -> list[list[int]]:
    """Return what transformers generates, in its ids; what is never output here is not output there."""
    start = pair.ours.source.symbols.start
    if len(start) > 1:
        settings["forced_bos_token_id"] = int(pair.target_ids[start[-1]])
    with torch.no_grad():
        found: list[list[int]] = pair.theirs.generate(
            input_ids=pair.source_ids[src],
            attention_mask=(src != PAD).long(),
            bad_words_ids=[[int(pair.target_ids[each])] for each in sorted({PAD, start[-1]})],
            forced_eos_token_id=None,
            eos_token_id=int(pair.target_ids[eos]),
            max_length=13,
            **settings,
        ).tolist()
    return found


def assert_same_tokens(pair: Pair, ours: list[list[int]], eos: int, theirs: list[list[int]]) -> None:
    for row, other in zip(ours, theirs, strict=True):
        whole = [*pair.ours.source.symbols.start, *row, eos][:13]
        assert other[: len(whole)] == pair.target_ids[torch.tensor(whole)].tolist()


def exact(module: Any) -> Any:
    """Put sines and cosines in float64 in place of transformers' tables, which are rounded to float32."""
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    module = module.double()
    for part in module.modules():
        if isinstance(part, MarianSinusoidalPositionalEmbedding):
            part.weight.data = table(*part.weight.shape, part.weight.shape[1] // 2)
        if isinstance(part, M2M100SinusoidalPositionalEmbedding):
            part.weights = table(*part.weights.shape, part.weights.shape[1] // 2 - 1)
    return module


def table(rows: int, width: int, steps: int) -> Tensor:
    frequency = 10_000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / steps)
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.sin(), angle.cos()), 1)


def test_the_gradient_of_a_step_is_that_of_transformers_own_loss(pair: Pair) -> None:
    batch = batch_of(pair)
    theirs = exact(published.model_of(pair.folder))
    model = read_model(pair.folder, Path("run"), *pair.languages).translator.model.double()
    loss = seqpar.linear_cross_entropy(
        model(batch.src, batch.tgt_in),
        model.generator.weight,
        batch.tgt_out,
        bias=model.generator.bias,
        ignore_index=PAD,
        chunk_tokens=5,
    )
    (loss.total / loss.tokens).backward()
    labels = pair.target_ids[batch.tgt_out].masked_fill(batch.tgt_out == PAD, -100)
    expected = theirs(**their_inputs(pair), labels=labels).loss
    expected.backward()
    torch.testing.assert_close((loss.total / loss.tokens).detach(), expected.detach(), rtol=1e-12, atol=0)
    compared = 0
    for name, mine in (("encoder", model.encoder), ("decoder", model.decoder)):
        for number, layer in enumerate(mine.layers):
            other = getattr(theirs.model, name).layers[number]
            keys = torch.cat((other.self_attn.k_proj.weight.grad, other.self_attn.v_proj.weight.grad))
            torch.testing.assert_close(layer.self_attention.key_value.weight.grad, keys, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(
                layer.feed_forward.inner.weight.grad, other.fc1.weight.grad, rtol=1e-10, atol=1e-12
            )
            norms = (layer.residuals[0].norm.weight.grad, other.self_attn_layer_norm.weight.grad)
            torch.testing.assert_close(*norms, rtol=1e-10, atol=1e-12)
            compared += 3
    assert compared == 12
    # Padding is a row without a gradient there, and everything else of the vocabulary is compared
    rows = torch.arange(len(pair.target_ids)) != PAD
    expected_rows = theirs.get_decoder().embed_tokens.weight.grad[pair.target_ids]
    if pair.ours.target.symbols.start[0] == PAD:
        rows[PAD] = False
    torch.testing.assert_close(model.tgt_embed.lookup.weight.grad[rows], expected_rows[rows], rtol=1e-10, atol=1e-12)


def test_a_run_of_it_translates_as_before(pair: Pair, tmp_path: Path) -> None:
    run = tmp_path / "run"
    imported = import_model(pair.folder, run, *pair.languages)
    assert imported.ignored == []
    loaded = load_translator(run / "best")
    for name, tensor in imported.translator.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    decoding = loaded.config.decoding
    assert decoding == imported.translator.config.decoding
    assert (decoding.beam, decoding.max_length) == (
        json.loads((pair.folder / "generation_config.json").read_text()).get("num_beams", 1),
        30 - len(pair.ours.source.symbols.start),
    )
    assert loaded.source.symbols == pair.ours.source.symbols
    found = translate(loaded.with_decoding(decoding), SENTENCES)
    assert found == translate(pair.ours.with_decoding(decoding), SENTENCES)
    assert len(set(found)) > 1
    with pytest.raises(CheckpointError, match=r"has a model already, in .*best: name another folder with --run$"):
        import_model(pair.folder, run, *pair.languages)


@pytest.mark.parametrize(
    ("given", "penalty"), [({}, 1.0), ({"length_penalty": None}, 1.0), ({"length_penalty": 0}, 0.0)]
)
def test_a_length_penalty_that_is_null_is_that_of_transformers(given, penalty, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert decoding_of(read_generation(tmp_path)[0], 1)["decoding.length_penalty"] == penalty


@pytest.mark.parametrize("name", ["max_length", "max_new_tokens"])
def test_the_greatest_length_counts_the_start_as_transformers_does(pair: Pair, name: str) -> None:
    start = pair.target_ids[torch.tensor(pair.ours.source.symbols.start)].tolist()
    theirs = pair.theirs.generate(
        input_ids=torch.tensor([[7, 8, 9]]),
        num_beams=1,
        eos_token_id=[],
        forced_eos_token_id=None,
        decoder_start_token_id=start[0],
        **({"forced_bos_token_id": start[1]} if start[1:] else {}),
        **{"max_length": None, name: 9},
    )
    limit = decoding_of({name: 9}, len(start))["decoding.max_length"]
    assert theirs[0, : len(start)].tolist() == start
    assert theirs.size(1) == len(start) + limit


@pytest.mark.parametrize("pair", ["opus-mt"], indirect=True)
def test_a_search_that_goes_on_there_finds_other_translations_and_is_named(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    symbols = pair.ours.source.symbols
    src = pad_rows([symbols.source(row) for row in pair.ours.source.encode(SENTENCES)])
    ends = {token for row in greedy(pair.ours.model, src, bos=symbols.start, eos=EOS, max_length=12) for token in row}
    found: dict[Any, Any] = {}
    for how in (True, False, "never"):
        found[how] = [generated(pair, src, eos, num_beams=3, early_stopping=how) for eos in sorted(ends)]
    assert found[True] != found[False]
    assert found[True] != found["never"]
    path = Path(shutil.copytree(pair.folder, tmp_path / "model")) / "generation_config.json"
    settings = json.loads(path.read_text())
    for beams in (None, 1, 3):
        for number, how in enumerate((True, False, "never", None)):
            path.write_text(json.dumps({**settings, "num_beams": beams, "early_stopping": how}))
            assert main(["import", str(tmp_path / "model"), "--run", str(tmp_path / f"{beams}-{number}")]) == 0
            told = capsys.readouterr().err.splitlines()
            assert told == [
                "[import] early_stopping is not true in generation_config.json: transformers searches on after 3 "
                "translations have ended, and may find others; see docs/import.md"
            ] * (beams == 3 and how is not True)
