"""The settings of a run's data: where it comes from, how it is cleaned, its noise and its subwords."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from recipes.translation.settings.schema import Help, Range

Probability = Range(at_least=0, below=1)


@dataclass(frozen=True)
class DataConfig:
    """Where the sentence pairs come from."""

    format: Annotated[
        Literal["builtin", "text", "tsv", "jsonl", "parquet", "hub"],
        Help(
            "builtin | text (two line-aligned files, plain or .gz) | tsv (a header line names the columns; no "
            "quoting) | jsonl | parquet | hub (a Hugging Face data set). If it is not set, the files "
            "decide: two files are text, one file is what its name ends in, and none is builtin."
        ),
    ] = "builtin"
    path: Annotated[
        str,
        Help(
            "Folder that relative file names below start from; ${NAME} is read from the environment. For hub: "
            "the data set's name, with a branch, tag or commit after @, and its subset after a colon, if it has some "
            "(wmt/wmt14:de-en, wmt/wmt14@main:de-en)."
        ),
    ] = ""
    train: Annotated[
        tuple[str, ...],
        Help(
            "Training file(s): text takes two (source, target); tsv, jsonl and parquet take one; hub takes a "
            "split name."
        ),
    ] = ()
    valid: Annotated[tuple[str, ...], Help("Validation file(s), in the same form.")] = ()
    test: Annotated[tuple[str, ...], Help("Test file(s), in the same form.")] = ()
    source: Annotated[
        str,
        Help(
            "Source language: its column or key in tsv, jsonl, parquet and hub data, and its side of the "
            "built-in corpus."
        ),
    ] = "en"
    target: Annotated[str, Help("Target language, likewise.")] = "de"
    tokenize: Annotated[
        Literal[
            "auto",
            "13a",
            "intl",
            "zh",
            "ja-mecab",
            "ko-mecab",
            "char",
            "none",
            "spm",
            "flores101",
            "flores200",
            "spBLEU-1K",
        ],
        Help(
            "sacreBLEU's tokeniser for BLEU: auto (by the target language, and where that says nothing, by the "
            "script of the references) | 13a | intl | zh | ja-mecab | ko-mecab | char | none | spm | flores101 "
            "| flores200 | spBLEU-1K."
        ),
    ] = "auto"
    language_tags: Annotated[
        bool,
        Help(
            "Put a tag of the target language, such as <2de>, in front of every source sentence, so that one model can "
            "learn several languages."
        ),
    ] = False
    temperature: Annotated[
        float,
        Help(
            "Temperature of the mixture of several corpora: a corpus of n pairs has a share of each epoch in "
            "proportion to its weight times n^(1/temperature). 1 mixes them as they are, 5 gives small ones more."
        ),
        Range(at_least=1),
    ] = 1.0
    streaming: Annotated[
        bool,
        Help(
            "Read hub data row by row over the network, without a copy of it on disk; with data.cache it is read for "
            "the subwords and for the tokenised pairs, and not again."
        ),
    ] = False
    cache: Annotated[
        str,
        Help(
            "Folder for the tokenised training pairs, which are then memory-mapped, and found again by their contents: "
            "for corpora beyond memory. Runs may share it. If it is not set, the pairs are in memory."
        ),
    ] = ""
    builtin_pairs: Annotated[
        int, Help("Training pairs drawn from the built-in corpus (format: builtin only)."), Range(at_least=1)
    ] = 40_000


@dataclass(frozen=True)
class CorpusConfig:
    """One of several corpora; what is not set is as in the section data."""

    train: Annotated[tuple[str, ...], Help("Training file(s), as data.train.")] = ()
    valid: Annotated[tuple[str, ...], Help("Validation file(s), as data.valid.")] = ()
    test: Annotated[tuple[str, ...], Help("Test file(s), as data.test.")] = ()
    format: Annotated[
        Literal["builtin", "text", "tsv", "jsonl", "parquet", "hub"] | None,
        Help("As data.format; by default the files decide."),
    ] = None
    path: Annotated[str | None, Help("Folder of the files, or name of the hub's data set, as data.path.")] = None
    source: Annotated[str | None, Help("Source language, as data.source.")] = None
    target: Annotated[str | None, Help("Target language, as data.target.")] = None
    weight: Annotated[
        float,
        Help("The corpus's share of an epoch, relative to its size and the other corpora's weights."),
        Range(at_least=0, below=1e9),
    ] = 1.0
    tag: Annotated[
        str,
        Help(
            "A word such as <bt> in front of each source sentence, which marks the corpus, as for back-translated data."
        ),
    ] = ""


@dataclass(frozen=True)
class CleaningConfig:
    """Rules by which training pairs are removed; the log counts the pairs that each rule removes."""

    max_words: Annotated[
        int | None, Help("Remove pairs with more words than this on a side; null has no limit."), Range(at_least=1)
    ] = None
    max_characters: Annotated[
        int | None,
        Help("Remove pairs with more characters than this on a side; null has no limit."),
        Range(at_least=1),
    ] = None
    max_ratio: Annotated[
        float | None,
        Help("Remove pairs with a side above this many times as long as the other, in characters; null has no limit."),
        Range(at_least=1),
    ] = None
    script: Annotated[
        bool,
        Help(
            "Remove pairs in which most letters of a side are in a script that its language does not use. The "
            "language is an ISO 639 code (de, deu), which may name the script itself (sr-Cyrl, zho_Hant)."
        ),
    ] = False
    encoding: Annotated[
        bool, Help("Remove pairs with replacement or control characters, or with UTF-8 that was read as Latin-1.")
    ] = False
    copies: Annotated[bool, Help("Remove pairs with the same text on both sides.")] = False
    duplicates: Annotated[bool, Help("Keep only the first of several equal pairs.")] = False


@dataclass(frozen=True)
class NoiseConfig:
    """Noise in the source sentences of the training data, drawn anew in every epoch."""

    case: Annotated[
        float,
        Help("Probability that a sentence is written in capitals or in lower case, half of the time each."),
        Probability,
    ] = 0.0
    swap: Annotated[float, Help("Probability of a letter to change places with the next one."), Probability] = 0.0
    drop: Annotated[float, Help("Probability of a letter to be left out."), Probability] = 0.0
    double: Annotated[float, Help("Probability of a letter to be written twice."), Probability] = 0.0
    drop_words: Annotated[float, Help("Probability of a word to be left out; one word always stays."), Probability] = (
        0.0
    )


@dataclass(frozen=True)
class SubwordConfig:
    """The sentencepiece model(s)."""

    vocab_size: Annotated[
        int,
        Help(
            "Number of subwords, the four special ones (padding 0, unknown 1, start 2, end 3) and 256 bytes included."
        ),
        Range(at_least=261),  # the 4 special subwords, the 256 bytes, and one to spell with
    ] = 1_000
    joint: Annotated[bool, Help("One model for both languages (needed to share embeddings), or one for each.")] = True
    symbols: Annotated[
        tuple[str, ...],
        Help("Words such as <url>, each of which is one subword wherever it occurs, and comes back as it is."),
    ] = ()
    placeholders: Annotated[
        tuple[Literal["url", "email", "number"], ...],
        Help(
            "url | email | number, any of them: replace them by symbols such as <url1> before translation, and put "
            "them back afterwards. Numbers come back as they are, which suits languages that write them alike."
        ),
    ] = ()
    train_pairs: Annotated[
        int,
        Help("Training pairs from which the subwords are made, drawn at random; 0 takes all of them."),
        Range(at_least=0),
    ] = 0
    kind: Annotated[Literal["unigram", "bpe"], Help("unigram | bpe.")] = "unigram"
    lowercase: Annotated[
        bool, Help("Lower-case the text before anything else (BLEU is then computed on lower-case text too).")
    ] = False
    sampling: Annotated[
        float,
        Help(
            "Draw the subwords of training sentences anew in every epoch. For bpe: the probability of leaving out a "
            "merge (BPE-dropout; 0.1 is usual). For unigram: the exponent of a segmentation's probability (Kudo 2018; "
            "0.1 to 0.5 are usual, and less is more random). 0 does not sample; validation and translation never do."
        ),
        Range(at_least=0),
    ] = 0.0
    sampled: Annotated[
        Literal["both", "source", "target"], Help("both | source | target: the sides whose subwords are drawn.")
    ] = "both"
