"""Cleaning of training pairs by rules that need no model; each recognises pairs that are not translations.

The rules are those that toolkits and shared tasks have in common: length and ratio as in Moses' `clean-corpus-n.perl`,
copies as in Khayrallah and Koehn (2018, "On the impact of various types of noise on neural machine translation").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from html.entities import html5
from itertools import islice

from recipes.translation.errors import ConfigError
from recipes.translation.settings.data import CleaningConfig
from recipes.translation.text.metric_command import check_without_references, command_scores
from recipes.translation.text.pair import Pair
from recipes.translation.text.scripts import mostly_in, scripts_of_language

Rule = Callable[[Pair], bool]
"""Returns whether a pair is to be removed."""

EMPTY = "an empty side"
VISIBLE = re.compile(r"[^\s\x01-\x1f\x7f-\x9f\u061c\u200b\u200c\u200e\u200f\u2581\ufeff\ufffd]")
"""A visible character. One of the subword rules turns all others, such as zero-width spaces, into blanks."""

CONTINUATION = (
    "[\u00a1-\u00aa\u00ac-\u00ba\u00bc-\u00be"
    "\u20ac\u0192\u2020\u2021\u02c6\u2030\u0160\u2039\u0152\u017d\u2022\u02dc\u2122\u0161\u203a\u0153\u017e\u0178]"
)
"""What Latin-1 and Windows-1252 make of a continuation byte of a UTF-8 character, except quotes, dots, dashes and
blanks, which may follow a real Ã in capitals."""
DAMAGED = re.compile(
    "\ufffd"  # what decoders put in place of bytes that are not UTF-8
    "|[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]"  # controls; tab, line ends, separators and U+0085 are blanks
    f"|[ÂÃÄÅ]{CONTINUATION}"  # ü as Ã¼, š as Å¡
    "|â€"  # curly quotes and dashes as â€œ
    f"|(?:[ÐÑÎÏ]{CONTINUATION}){{2}}"  # Cyrillic and Greek, two letters in a row
)


ENTITY = re.compile(r"&(?: ?amp ?;)? ?(#? ?\w{1,32}) ?;")
"""&apos; as Moses and HTML write it, even escaped twice or split into words: &amp;#45; and & quot ;"""
TAG = re.compile(
    "<!--|<!\\[CDATA\\[|<[!?][A-Za-z]|</?[A-Za-z][\\w:.-]*(?:\\s+[\\w:.-]+\\s*=\\s*(?:\"[^\"]*\"|'[^']*'|[^\\s<>]+))*\\s*/?>"
)


def markup_in(text: str, symbols: frozenset[str] = frozenset()) -> str:
    """Return the first tag or character entity in a text that is not one of the symbols, or the empty string."""
    if "<" in text:
        for tag in TAG.finditer(text):
            if tag[0] not in symbols:
                return tag[0]
    if "&" in text:
        for entity in ENTITY.finditer(text):
            name = entity[1].replace(" ", "")
            if re.fullmatch(r"#(\d+|x[0-9a-fA-F]+)", name) or f"{name};" in html5:
                return entity[0]
    return ""


COMMAND = "cleaning.metric_command"
BELOW = "scored too low"
AT_ONCE = 100_000
"""Number of pairs that one start of the program scores."""


class Cleaning:
    """The rules that are set, and how many pairs each of them has removed.

    Args:
        settings: which rules to apply; pairs with an empty side are always removed.
        source, target: the languages, for the rule about scripts.
        symbols: words such as <url> that are not markup.

    Raises:
        ConfigError: for `cleaning.script` with a language whose script is not known; for a `cleaning.metric_command`
            that cannot run, or that needs references.
    """

    def __init__(self, settings: CleaningConfig, source: str, target: str, symbols: Sequence[str] = ()) -> None:
        self._symbols = frozenset(symbols)
        self._rules = rules(settings, source, target, self._symbols)
        self._command = settings.metric_command
        self._least = settings.metric_least or 0.0
        if self._command:
            check_without_references(self._command, COMMAND)
        self._counts_markup = not settings.markup
        self.markup = 0
        """Number of pairs with markup that are kept."""
        self.example = ""
        self.removed = dict.fromkeys([*self._rules, *([BELOW] if self._command else [])], 0)
        self.read = 0

    def clean(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Yield the pairs that no rule removes, in order; each other pair counts for the first rule that it breaks."""
        for pair in self._filter_by_score(self._filter_by_rules(pairs)):
            if self._counts_markup and (found := _markup_of(pair, self._symbols)):
                self.markup += 1
                self.example = self.example or found
            yield pair

    def _filter_by_rules(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        for pair in pairs:
            self.read += 1
            broken = next((name for name, breaks in self._rules.items() if breaks(pair)), None)
            if broken is None:
                yield pair
            else:
                self.removed[broken] += 1

    def _filter_by_score(self, pairs: Iterator[Pair]) -> Iterator[Pair]:
        """Yield the pairs that the metric command does not score below `cleaning.metric_least`."""
        if not self._command:
            yield from pairs
            return
        while part := list(islice(pairs, AT_ONCE)):
            sources, targets = zip(*part, strict=True)
            scores = command_scores(self._command, sources, targets, named=COMMAND)
            kept = [pair for pair, score in zip(part, scores, strict=True) if score >= self._least]
            self.removed[BELOW] += len(part) - len(kept)
            yield from kept

    def __str__(self) -> str:
        counts = "; ".join(f"{name} {count:,}" for name, count in self.removed.items() if count)
        if not counts:
            return f"none of {self.read:,} pairs dropped"
        return f"{sum(self.removed.values()):,} of {self.read:,} pairs dropped: {counts}"


def _markup_of(pair: Pair, symbols: frozenset[str]) -> str:
    return markup_in(pair.source, symbols) or markup_in(pair.target, symbols)


def rules(settings: CleaningConfig, source: str, target: str, symbols: frozenset[str] = frozenset()) -> dict[str, Rule]:
    """Return the rules that are set, keyed by their wording in the log, in the order in which they are applied."""
    found: dict[str, Rule] = {EMPTY: lambda pair: not all(map(VISIBLE.search, pair))}
    if settings.encoding:
        found["wrong encoding"] = lambda pair: any(map(DAMAGED.search, pair))
    if settings.markup:
        found["markup"] = lambda pair: bool(_markup_of(pair, symbols))
    if (words := settings.max_words) is not None:
        found[f"more than {words:,} words"] = lambda pair: any(len(side.split()) > words for side in pair)
    if (characters := settings.max_characters) is not None:
        found[f"more than {characters:,} characters"] = lambda pair: any(len(side) > characters for side in pair)
    if (ratio := settings.max_ratio) is not None:
        found[f"lengths above {ratio:g} to 1"] = lambda pair: _ratio(pair) > ratio
    if settings.copies:
        found["the source copied"] = _is_copy
    if settings.script:
        found["wrong script"] = _wrong_script(source, target)
    if settings.duplicates:
        found["duplicates"] = _repetition_rule()
    return found


def _ratio(pair: Pair) -> float:
    shorter, longer = sorted(len(side.strip()) for side in pair)
    return longer / shorter


def _is_copy(pair: Pair) -> bool:
    """Return whether both sides are the same apart from case and blanks; only numbers and signs may well be."""
    source, target = (" ".join(side.casefold().split()) for side in pair)
    return source == target and any(map(str.isalpha, source))


def _wrong_script(source: str, target: str) -> Rule:
    expected = []
    for setting, language in (("source", source), ("target", target)):
        scripts = scripts_of_language(language)
        if scripts is None:
            raise ConfigError(
                f"cleaning.script does not know the script of {language!r} (data.{setting}): add its ISO 15924 code, "
                f"as in {language}-Latn, or leave cleaning.script out"
            )
        expected.append(scripts)
    return lambda pair: not all(map(mostly_in, pair, expected))


def _repetition_rule() -> Rule:
    """Return the rule for a pair that has occurred before; of each pair only a 16-byte digest is kept."""
    seen: set[bytes] = set()

    def is_repeated(pair: Pair) -> bool:
        digest = blake2b("\0".join(pair).encode(), digest_size=16).digest()
        before = len(seen)
        seen.add(digest)
        return len(seen) == before

    return is_repeated
