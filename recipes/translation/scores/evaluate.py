"""Evaluation of a model: translations of a split of its data, or of other test files, and their scores."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from recipes.translation.data.corpora import Corpora, CorpusSplit, HeldOutSplit
from recipes.translation.data.sentence_pairs import aligned_pairs, lowercase_pairs
from recipes.translation.errors import DataError
from recipes.translation.files.json_fields import field_in
from recipes.translation.files.lines import read_lines
from recipes.translation.files.writing import replace_files
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.run_folder.made_from import lines_digest
from recipes.translation.run_folder.outputs import check_output
from recipes.translation.run_folder.translator import Translator
from recipes.translation.scores.scores import Measured, mean_of, measure, record_of, scores_in_words, scores_of_sets
from recipes.translation.text.bleu_tokenizers import tokenizer_for
from recipes.translation.text.metric_command import command_scores
from recipes.translation.text.model_text import OtherForm
from recipes.translation.text.pair import Pair
from recipes.translation.translating.translate import best, note_unfinished


@dataclass(frozen=True)
class Evaluation:
    """A test set with its translations and their scores."""

    name: str
    """The split, or the name of the file with the sources."""
    pairs: Sequence[Pair]
    translations: Sequence[str]
    measured: Sequence[Measured]
    """Every metric, with the statistics of each sentence."""
    digests: Sequence[str] = ()
    """The SHA-256 of the weights of each model that took part in translating."""
    files: tuple[Path, Path] | None = None
    """The files with the sources and references; None for the run's data."""
    unfinished: int | None = None
    """Number of translations that are cut off; None if it is not known, as for translations from a file."""

    @cached_property
    def scores(self) -> Mapping[str, Any]:
        """Return the scores of the whole test set, as `record_of` does."""
        return record_of(self.measured)

    def write(self, folder: Path) -> list[Path]:
        """Write `<name>.translations.txt`, one line for each sentence, and `<name>.scores.json`."""
        texts = {"sources": [pair.source for pair in self.pairs], "references": [pair.target for pair in self.pairs]}
        # Hashes of what was read rather than of the files, which may have changed since, or be pipes
        made_of = {side: {"sha256": lines_digest(lines)} for side, lines in texts.items()}
        for side, file in zip(texts, self.files or (), strict=False):
            made_of[side]["file"] = str(file.resolve())
        record = {**self.scores, "unfinished": self.unfinished, "weights": list(self.digests), **made_of}
        translations, scores = result_files(folder, self.name)
        text = "".join(f"{text}\n" for text in self.translations)
        written = {translations: text, scores: json.dumps(record, indent=2) + "\n"}
        replace_files({path: text.encode() for path, text in written.items()})
        return list(written)


def result_files(folder: Path, name: str) -> list[Path]:
    """Return the files for the translations and for the scores of a test set."""
    return [folder / f"{name}.translations.txt", folder / f"{name}.scores.json"]


def other_sources(scores: Path, sources: Path, pairs: Sequence[Pair]) -> str:
    """Return the file that existing scores belong to, if it is not `sources`; empty if it is, or none is noted.

    `pairs` have the sentences of `sources`: a file with the same sentences counts as the same.
    """
    file, digest = (field_in(scores, "sources", name) for name in ("file", "sha256"))
    if file in (None, str(sources.resolve())) or digest == lines_digest(pair.source for pair in pairs):
        return ""
    return str(file)


def check_name(
    folder: Path, sources: Path, pairs: Sequence[Pair], translator: Translator, reads: Collection[str | None]
) -> None:
    """Raise DataError if, by the file's name, its results would replace those of another or of the run's own data.

    Raises ConfigError if they would replace one of the files that are read.
    """
    name = sources.name
    if translator.others:
        name += ".ensemble"
    files = result_files(folder, name)
    for file in files:
        check_output(file, "--sources", own=file, reads=reads)
    splits = ("test", "valid")
    own = [*splits, *(f"{split}.{name}" for split in splits for name in (*translator.config.corpora, "ensemble"))]
    if sources.name in own:
        raise DataError(
            f"--sources {sources} would replace {sources.name}.scores.json, the scores of the run's own data: rename "
            "the file"
        )
    if other := other_sources(files[1], sources, pairs):
        raise DataError(
            f"--sources {sources} would replace {files[1]}, the scores of {other}: rename the file, or move those "
            "results away"
        )


def evaluate(translator: Translator, split: HeldOutSplit, ranks: Ranks = ALONE, label: str = "") -> Evaluation:
    """Translate a split of the model's data, each rank some of the sentences, and score all translations.

    `label` is as in `translate`. Raises DataError if the split has the data of several corpora: see `evaluate_each`.
    """
    return evaluate_each(translator, [Corpora(translator.config).the_one(split)], None, ranks, label)[0]


def evaluate_each(
    translator: Translator,
    sets: Sequence[CorpusSplit],
    tokenize: str | None = None,
    ranks: Ranks = ALONE,
    label: str = "",
) -> list[Evaluation]:
    """Do the same as `evaluate` for several sets of the model's data, each named by its split, or "split.corpus".

    `tokenize` overrides the setting `data.tokenize`.
    """
    found = []
    for each in sets:
        pairs = ranks.run_on_main(partial(getattr, each, "pairs"))
        name: str = each.split
        if len(sets) > 1:
            name = f"{each.split}.{each.name}"
        found.append(evaluate_pairs(translator, name, pairs, tokenize, ranks, label, each))
    return found


def evaluate_pairs(
    translator: Translator,
    name: str,
    pairs: Sequence[Pair],
    tokenize: str | None,
    ranks: Ranks,
    label: str,
    held_out: CorpusSplit | None = None,
) -> Evaluation:
    """Do the same as `evaluate` for a test set in memory; the results have this name.

    `held_out` says which of the run's data it is; other pairs are in the languages of the section data.
    """
    config = translator.config
    language = config.data.target
    spoken = pairs
    if held_out:
        language = held_out.data.target
        spoken = held_out.tagged_pairs(pairs)
    references = [pair.target for pair in pairs]
    tokenize = tokenizer_for(tokenize or config.data.tokenize, language)  # raises before the work of translating
    form = OtherForm(translator.target)
    form.add(references)
    if ranks.is_main:
        form.note(label or "evaluate", f"references of {name} can be written only")
    found = best(translator, [pair.source for pair in spoken], ranks, label)
    unfinished = note_unfinished(found, label or "evaluate") if ranks.is_main else 0
    translations = [one.text for one in found]
    lowercase = config.subwords.lowercase
    measured = ranks.run_on_main(lambda: measure(translations, references, lowercase=lowercase, tokenize=tokenize))
    return Evaluation(name, pairs, translations, measured, translator.digests, unfinished=unfinished)


def evaluate_files(
    hypotheses: Path, references: Path, sources: Path | None = None, tokenize: str = "auto"
) -> Evaluation:
    """Score a file of translations without a model; without `sources`, the pairs' sources are empty."""
    translations = read_lines(hypotheses)
    pairs = read_pairs(sources, references) if sources else [Pair("", line) for line in read_lines(references)]
    targets = [pair.target for pair in pairs]
    measured = measure(translations, targets, tokenize=tokenizer_for(tokenize, "", targets))
    return Evaluation(hypotheses.name, pairs, translations, measured)


def scores_table(evaluations: Sequence[Evaluation]) -> str:
    """Return the scores of a test set, or a table of several and their mean, with BLEU's signatures."""
    if len(evaluations) == 1:
        return scores_in_words(evaluations[0].scores)
    table = scores_of_sets({one.name: one.measured for one in evaluations})
    signatures = [f"  BLEU of {one.name}: {one.scores['bleu_signature']}" for one in evaluations]
    return "\n".join([str(table), *signatures])


def read_pairs(sources: Path, references: Path, lowercase: bool = False) -> list[Pair]:
    """Read two files that are aligned line by line; raise DataError if they are not."""
    return list(lowercase_pairs(aligned_pairs([sources, references], "evaluate"), lowercase))


def add_command_scores(command: str, evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Add the scores from a command, which runs once for all test sets together."""
    pairs = [pair for evaluation in evaluations for pair in evaluation.pairs]
    translations = [text for evaluation in evaluations for text in evaluation.translations]
    scores = iter(command_scores(command, [p.source for p in pairs], translations, [p.target for p in pairs]))
    found = []
    for evaluation in evaluations:
        own = list(islice(scores, len(evaluation.pairs)))
        measured = mean_of("metric_command", f"mean of the sentences, by {command}", own)
        found.append(replace(evaluation, measured=[*evaluation.measured, measured]))
    return found
