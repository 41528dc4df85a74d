"""Scores of translations: sacreBLEU's BLEU and chrF with their signatures, and exact matches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from recipes.translation.data.bleu_tokenizers import check_tokenizer, tokenizer_for
from recipes.translation.data.builtin_corpus import Split
from recipes.translation.data.sentence_pairs import DataError, Pair, load_pairs
from recipes.translation.processes.ranks import ALONE, Ranks
from recipes.translation.run_folder.checkpoint import Translator
from recipes.translation.settings.config import DecodingConfig
from recipes.translation.translate import translate


@dataclass(frozen=True)
class Scores:
    """Scores in percent; each signature says exactly how its score was computed."""

    sentences: int
    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str
    bleu_lowercase: float
    """BLEU of the lower-cased text with the same tokeniser: the figure that most Multi30k papers report."""
    bleu_lowercase_signature: str
    exact_match: float
    """Percentage of translations that equal the reference, character for character."""
    multi_bleu_lowercase: float | None
    """BLEU-4 of lower-cased text that is already tokenised, as Moses' `multi-bleu.perl -lc` computes it: sacreBLEU's
    without tokeniser and without smoothing. None with any other tokeniser."""
    multi_bleu_lowercase_signature: str | None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            ("BLEU", self.bleu, self.bleu_signature),
            ("BLEU, lower-cased", self.bleu_lowercase, self.bleu_lowercase_signature),
            ("chrF", self.chrf, self.chrf_signature),
            ("exact match", self.exact_match, f"of {self.sentences:,} sentences"),
        ]
        if self.multi_bleu_lowercase is not None:
            rows.insert(2, ("multi-bleu -lc", self.multi_bleu_lowercase, str(self.multi_bleu_lowercase_signature)))
        return "\n".join(f"  {name:<18} {value:6.2f}   {note}" for name, value, note in rows)


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str = "auto",
    language: str = "",
) -> Scores:
    """Compare translations with one reference each.

    `tokenize` is sacreBLEU's name of a tokeniser (13a, intl, char, zh, ja-mecab, ...); "none" is for text that is
    already tokenised, and adds the score of `multi-bleu.perl -lc`; "auto" chooses by `language` or by the references'
    script. `lowercase` also makes the main BLEU and chrF case-insensitive.

    Raises DataError if the two differ in length (sacreBLEU itself would silently cut the longer one) or are empty, and
    ConfigError for a tokeniser that is not available.
    """
    if len(hypotheses) != len(references):
        raise DataError(
            f"{len(hypotheses):,} hypotheses but {len(references):,} references; there must be one for each"
        )
    if not references:
        raise DataError("there is nothing to evaluate: no sentences")
    tokenize = tokenizer_for(tokenize, language, references)
    check_tokenizer(tokenize)
    # Without force, sacreBLEU warns about tokenised text, for which "none" is meant
    bleu = BLEU(lowercase=lowercase, tokenize=tokenize, force=True)
    bleu_lowercase = BLEU(lowercase=True, tokenize=tokenize, force=True)
    chrf = CHRF(lowercase=lowercase)
    streams = [list(references)]  # one reference for each sentence; sacreBLEU takes several
    multi_bleu = None
    multi_bleu_signature = None
    if tokenize == "none":
        unsmoothed = BLEU(lowercase=True, tokenize="none", smooth_method="none", force=True)
        multi_bleu = unsmoothed.corpus_score(list(hypotheses), streams).score
        multi_bleu_signature = str(unsmoothed.get_signature())
    return Scores(
        sentences=len(references),
        bleu=bleu.corpus_score(list(hypotheses), streams).score,
        bleu_signature=str(bleu.get_signature()),
        chrf=chrf.corpus_score(list(hypotheses), streams).score,
        chrf_signature=str(chrf.get_signature()),
        bleu_lowercase=bleu_lowercase.corpus_score(list(hypotheses), streams).score,
        bleu_lowercase_signature=str(bleu_lowercase.get_signature()),
        exact_match=100 * sum(map(str.__eq__, hypotheses, references)) / len(references),
        multi_bleu_lowercase=multi_bleu,
        multi_bleu_lowercase_signature=multi_bleu_signature,
    )


@dataclass(frozen=True)
class Evaluation:
    """A split of the data with its translations and their scores."""

    split: Split
    pairs: Sequence[Pair]
    translations: Sequence[str]
    scores: Scores

    def write(self, folder: Path) -> list[Path]:
        """Write `<split>.translations.txt`, one line for each sentence, and `<split>.scores.json`."""
        texts = {
            folder / f"{self.split}.translations.txt": "".join(f"{text}\n" for text in self.translations),
            folder / f"{self.split}.scores.json": json.dumps(self.scores.as_dict(), indent=2) + "\n",
        }
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        return list(texts)


def evaluate(
    translator: Translator, split: Split, decoding: DecodingConfig, tokenize: str | None = None, ranks: Ranks = ALONE
) -> Evaluation:
    """Translate a split of the model's data, each rank some of the sentences, and score all translations.

    `tokenize` overrides the setting `data.tokenize`.
    """
    config = translator.config
    pairs = ranks.run_on_main(lambda: load_pairs(config.data, split, config.subwords.lowercase))
    references = [pair.target for pair in pairs]
    tokenize = tokenizer_for(tokenize or config.data.tokenize, config.data.target, references)
    check_tokenizer(tokenize)  # before the work of translating
    translations = translate(translator, [pair.source for pair in pairs], decoding, ranks)
    scores = score(translations, references, lowercase=config.subwords.lowercase, tokenize=tokenize)
    return Evaluation(split, pairs, translations, scores)
