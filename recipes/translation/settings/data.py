"""The settings of a run's data: where it comes from, how it is cleaned, and its subwords."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

from recipes.translation.settings.schema import setting

TOKENIZERS = ("13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none", "spm", "flores101", "flores200", "spBLEU-1K")
"""sacreBLEU's tokenisers."""

NORMALIZATIONS = {
    "nfc": "letters and accents are composed, control characters removed, and all else stays as it is",
    "none": "nothing changes",
    "nfkc": "look-alikes are replaced as well, such as full-width signs and superscripts, and U+200C: "
    "sentencepiece's own nmt_nfkc",
}
"""How text is normalised before it is split into subwords."""


class SubwordKind(NamedTuple):
    """A way to split text into subwords."""

    trainer: str
    """What sentencepiece calls it."""
    help: str
    sampling: str = ""
    """What `subwords.sampling` means; empty if there is nothing to sample."""
    below: float = inf
    """The bound that `subwords.sampling` must be below."""
    merges: bool = False
    """Whether sampling leaves out merges; otherwise it draws segmentations by their probability."""
    words: bool = False
    """Whether its vocabulary is a list of words, which cannot spell characters in bytes."""


KINDS = {
    "unigram": SubwordKind(
        "unigram",
        "the most probable division",
        "the exponent of a segmentation's probability (Kudo 2018; 0.1 to 0.5 are usual, and less is more random)",
    ),
    "bpe": SubwordKind(
        "bpe",
        "byte-pair encoding",
        "the probability of leaving out a merge (BPE-dropout; 0.1 is usual)",
        below=1,
        merges=True,
    ),
    "char": SubwordKind("char", "single characters"),
    "none": SubwordKind(
        "word", "words separated by blanks, for text that is already segmented; rare ones are unknown", words=True
    ),
}
"""The kinds of subwords."""


@dataclass(frozen=True)
class DataConfig:
    """Where the sentence pairs come from."""

    format: Literal["builtin", "text", "tsv", "jsonl", "tmx", "parquet", "hub"] = setting(
        "builtin",
        "builtin | text (two line-aligned files, plain or packed) | tsv (a header line names the columns; no "
        "quoting) | jsonl | tmx | parquet | hub (a Hugging Face data set). If it is not set, the files "
        "decide: two files are text, one file goes by the ending of its name, and none is builtin.",
    )
    path: str = setting(
        "",
        "Folder that relative file names below start from; ~ and ${NAME} are replaced, as in all paths. For hub: "
        "the data set's name, with a branch, tag or commit after @, and its subset after a colon, if it has any "
        "(wmt/wmt14:de-en, wmt/wmt14@main:de-en).",
    )
    train: tuple[str, ...] = setting(
        (),
        "Training file(s): text takes two (source, target); tsv, jsonl, tmx and parquet take one; hub takes a split "
        "name.",
    )
    valid: tuple[str, ...] = setting((), "Validation file(s), in the same form.")
    test: tuple[str, ...] = setting((), "Test file(s), in the same form.")
    source: str = setting(
        "en",
        "Source language: its column or key in tsv, jsonl, parquet and hub data, its code in tmx, and "
        "its side of the built-in corpus.",
    )
    target: str = setting("de", "Target language, given as in data.source.")
    tokenize: str = setting(
        "auto",
        f"sacreBLEU's tokeniser for BLEU: auto (by the target language; 13a for most) | {' | '.join(TOKENIZERS)}.",
        choices=("auto", *TOKENIZERS),
    )
    language_tags: bool = setting(
        False,
        "Put a tag of the target language, such as <2de>, in front of every source sentence, so that one model can "
        "learn several languages.",
    )
    temperature: float = setting(
        1.0,
        "Temperature of the mixture of several corpora: a corpus of n pairs has a share of each epoch in "
        "proportion to its weight times n^(1/temperature). 1 mixes them as they are, 5 gives small ones more.",
        at_least=1,
    )
    cache: str = setting(
        "",
        "Folder for the text and the subword ids of the training pairs, which every process maps into memory, and "
        "which are found again by what they were made from. Runs may share it. If it is not set, it is `data` in the "
        "run's folder.",
    )
    builtin_pairs: int = setting(
        40_000,
        "Training pairs drawn from the built-in corpus (format: builtin only). Validation and test have a tenth each, "
        "but at most 1,000.",
        at_least=1,
    )


@dataclass(frozen=True)
class CorpusConfig:
    """One of several corpora; what is not set is as in the section data."""

    train: tuple[str, ...] = setting((), "Training file(s), as data.train.")
    valid: tuple[str, ...] = setting((), "Validation file(s), as data.valid.")
    test: tuple[str, ...] = setting((), "Test file(s), as data.test.")
    format: Literal["builtin", "text", "tsv", "jsonl", "tmx", "parquet", "hub"] | None = setting(
        None, "As data.format; by default the files decide."
    )
    path: str | None = setting(None, "Folder of the files, or name of the hub's data set, as data.path.")
    source: str | None = setting(None, "Source language, as data.source.")
    target: str | None = setting(None, "Target language, as data.target.")
    weight: float = setting(
        1.0,
        "The corpus's share of an epoch, relative to its size and the other corpora's weights.",
        at_least=0,
        below=1e9,
    )
    tag: str = setting(
        "", "A word such as <bt> in front of each source sentence, which marks the corpus, as for back-translated data."
    )


@dataclass(frozen=True)
class CleaningConfig:
    """Rules by which training pairs are removed; the log counts the pairs that each rule removes."""

    max_words: int | None = setting(
        None, "Remove pairs with more words than this on a side; null sets no limit.", at_least=1
    )
    max_characters: int | None = setting(
        None, "Remove pairs with more characters than this on a side; null sets no limit.", at_least=1
    )
    max_ratio: float | None = setting(
        None,
        "Remove pairs with a side more than this many times as long as the other, in characters; null sets no limit.",
        at_least=1,
    )
    script: bool = setting(
        False,
        "Remove pairs in which most letters of a side are in a script that its language does not use. The "
        "language is an ISO 639 code (de, deu), which may name the script itself (sr-Cyrl, zho_Hant).",
    )
    encoding: bool = setting(
        False, "Remove pairs with replacement or control characters, or with UTF-8 that was read as Latin-1."
    )
    markup: bool = setting(
        False,
        "Remove pairs with tags or character entities (<P>, &apos;); without this rule the log counts them.",
    )
    copies: bool = setting(False, "Remove pairs with the same text on both sides.")
    duplicates: bool = setting(False, "Keep only the first of several equal pairs of a corpus.")
    metric_command: str = setting(
        "",
        "Remove pairs that this program, such as CometKiwi, scores below metric_least; it is run as evaluate "
        "--metric-command runs it, with the pair as source and translation, without references.",
    )
    metric_least: float | None = setting(
        None, "The lowest score from metric_command with which a pair is kept.", at_least=-1e9, below=1e9
    )


@dataclass(frozen=True)
class SubwordConfig:
    """The sentencepiece model(s)."""

    vocab_size: int = setting(
        1_000,
        "Number of subwords, the four special ones (padding 0, unknown 1, start 2, end 3) and 256 bytes included; a "
        "model of your own has its own number.",
        at_least=5,  # imported models may have few; new ones need what `train_subwords` says
    )
    joint: bool = setting(True, "One model for both languages (needed to share embeddings), or one for each.")
    symbols: tuple[str, ...] = setting(
        (), "Words such as <url>, each of which is one subword wherever it occurs, and comes back as it is."
    )
    model: tuple[str, ...] = setting(
        (),
        "Your own subwords instead of new ones, one file for both sides or one for each: a sentencepiece model, a "
        "Hugging Face tokenizer.json, or with kind none a list of words or Marian's vocab.yml. They are copied into "
        "the run.",
    )
    train_pairs: int | None = setting(
        None,
        "Training pairs that the subwords are made from, drawn at random; 0 takes all of them, null as many as make "
        "up 10 million bytes.",
        at_least=0,
    )
    character_coverage: float = setting(
        0.9999,
        "Share of the text's characters that subwords cover; the rest are spelled in bytes, or unknown.",
        at_least=0.98,
        below=1.0001,
    )
    byte_fallback: bool = setting(
        True,
        "Spell characters that no subword contains in UTF-8 bytes, which take 256 of the subwords; otherwise such "
        "characters are unknown.",
    )
    kind: str = setting(
        "unigram", " | ".join(f"{name} ({kind.help})" for name, kind in KINDS.items()) + ".", choices=tuple(KINDS)
    )
    normalization: str | tuple[str, str] | None = setting(
        None,
        " | ".join(f"{name} ({what})" for name, what in NORMALIZATIONS.items())
        + ". One for both sides, or two: the source's and the target's. null is nfc for new subwords; a model that "
        "another run or an import brings keeps its own.",
        choices=tuple(NORMALIZATIONS),
    )
    lowercase: bool = setting(
        False, "Lower-case the text before anything else (BLEU is then computed on lower-case text too)."
    )
    sampling: float = setting(
        0.0,
        "Draw the subwords of training sentences anew in every epoch. "
        + " ".join(f"For {name}: {kind.sampling}." for name, kind in KINDS.items() if kind.sampling)
        + " 0 does not sample; validation and translation never do.",
        at_least=0,
    )
    sampled: Literal["both", "source", "target"] = setting(
        "both", "both | source | target: the sides whose subwords are drawn."
    )
