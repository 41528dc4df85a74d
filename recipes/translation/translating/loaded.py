"""Translate from Python with a model that was trained here: `from recipes.translation import load_translator`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from recipes.translation.errors import ConfigError
from recipes.translation.files.atomic_folder import model_folder, whole_folder
from recipes.translation.run_folder import checkpoint
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.checks import check_decoding
from recipes.translation.settings.config import SCHEMA
from recipes.translation.translating.translate import SearchOptions, Translation, alternatives, best, note_unfinished


class LoadedTranslator:
    """A trained model, its subwords and its settings, ready to translate.

    The options of both methods are the settings of `decoding` by name (`beam`, `no_repeat_ngram`, ...: the fields of
    `DecodingConfig`); options that are not given are as in the run's settings. Not tested in several threads at once.
    """

    def __init__(self, translator: Translator) -> None:
        self.translator = translator
        """The parts: `config`, `model` (an `EncoderDecoder` in eval mode), and the subwords `source` and `target`."""

    def translate(self, sentences: Sequence[str], **options: object) -> list[str]:
        """Return one translation for each sentence, in the same order; an empty sentence stays empty.

        The plain equivalent is `beam_search(model, subwords of the sentences)`, as `python -m recipes.translation
        translate` runs it. There may be any number of sentences: they are sorted by length and searched in batches. A
        sentence or a translation that is longer than the settings allow is cut, with a note on stderr.

        Raises TypeError unless `sentences` is a list of str, DataError for text that is not Unicode, and ConfigError
        for an option that does not exist or has an invalid value.
        """
        check_sentences(sentences)
        found = best(self._with(options), sentences)
        note_unfinished(found, "translate")
        return [one.text for one in found]

    def n_best(self, sentences: Sequence[str], n: int, **options: object) -> list[list[Translation]]:
        """Return up to `n` translations of each sentence, best first.

        A Translation has `text`, `score` (the log-probability over the length normaliser) and `log_probability`. Fewer
        than `n` are returned if the search finds no more; an empty sentence has one, which is empty.

        Raises as `translate` does, and ConfigError for an `n` below 1 or above the beam.
        """
        check_sentences(sentences)
        translator = self._with(options)
        beam = translator.config.decoding.beam
        if not isinstance(n, int):
            raise TypeError(f"n is {n!r}, not a whole number: ask for 1 or more")
        if n < 1:
            raise ConfigError(f"n is {n}, below 1: ask for at least one translation")
        if n > beam:
            raise ConfigError(f"n is {n}, above the beam of {beam}: ask for fewer, or give beam={n}")
        return alternatives(translator, sentences, SearchOptions(n_best=n))

    def _with(self, options: dict[str, object]) -> Translator:
        given = SCHEMA.read_overrides({f"decoding.{name}": value for name, value in options.items()}, "this call")
        changes = {key.removeprefix("decoding."): setting.value for key, setting in given.items()}
        decoding = dataclasses.replace(self.translator.config.decoding, **changes)
        check_decoding(decoding)
        return self.translator.with_decoding(decoding)


def check_sentences(sentences: Sequence[str]) -> None:
    """Raise TypeError unless `sentences` is a collection: each letter of a single str would be taken for a sentence."""
    if isinstance(sentences, str):
        raise TypeError("sentences is a str: give a list of sentences, [sentence] for one")
    if not isinstance(sentences, Iterable):
        raise TypeError(f"sentences is {sentences!r}: give a list of sentences")
    # An iterator can be consumed only once, and this check would consume it
    if isinstance(sentences, Iterator):
        raise TypeError(f"sentences is a {type(sentences).__name__}: give a list of sentences, list(sentences)")
    for number, sentence in enumerate(sentences, start=1):
        if not isinstance(sentence, str):
            raise TypeError(f"sentence {number:,} is {type(sentence).__name__}, not str: give a list of str")


def check_device(device: str | torch.device) -> None:
    """Raise ConfigError unless torch can put a tensor on the device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA raises AssertionError
        (why, *_) = str(error).splitlines()
        raise ConfigError(
            f"device is {str(device)!r}, which torch cannot use here ({why}): leave it out for the CPU"
        ) from None


def load_translator(folder: str | Path, device: str | torch.device = "cpu") -> LoadedTranslator:
    """Open a folder that `export --to safetensors` wrote, or the best model of a run.

        translator = load_translator("demo-model")
        translator.translate(["Two trains leave."])    # a list of as many translations

    The folder may have been moved. Every file is verified by its SHA-256, and none can run code. The weights are in
    float32 on `device`, whatever they were trained in.

    Raises CheckpointError if there is no model, or a damaged one, and ConfigError for a device that torch cannot use
    here.
    """
    check_device(device)
    path = model_folder(folder)
    if whole_folder(path) is None:
        path = Path(folder)  # so that the error names what was given
    return LoadedTranslator(checkpoint.load_translator(path, device))
