"""Sentence pairs from a TMX file, the XML format for exchanging translation memories (TMX 1.4b, LISA 2005)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError, iterparse

from recipes.translation.errors import DataError
from recipes.translation.files.lines import Hashes, open_unpacked
from recipes.translation.text.pair import Pair

LANGUAGE = ("{http://www.w3.org/XML/1998/namespace}lang", "lang")
"""The attributes that name a variant's language, in current and in old files."""
CODES = ("bpt", "ept", "it", "ph", "ut")
"""Elements with another program's formatting codes, which are not text."""
LINE_BREAK = re.compile(r"[ \t]*[\r\n]+[ \t]*")


def tmx_pairs(path: Path, source: str, target: str, hashes: Hashes | None = None) -> Iterator[Pair]:
    """Yield the pairs of two languages; units that lack one of them are left out, and their number is printed.

    A language is found by its code (en) or by that code with a region (en-GB); a unit's first variant counts. A line
    break becomes a blank.
    """
    languages: set[str] = set()
    read = lacking = 0
    for unit in _units(path, hashes):
        read += 1
        texts = _texts(unit)
        languages |= texts.keys()
        sides = [_in(texts, language) for language in (source, target)]
        if None in sides:
            lacking += 1
        else:
            yield Pair(*sides)  # type: ignore[arg-type]
    if read == lacking:
        raise DataError(
            f"{path} has no unit in both {source!r} (data.source) and {target!r} (data.target); its languages are "
            f"{', '.join(sorted(languages)) or 'none'}: set data.source and data.target to two of these"
        )
    if lacking:
        print(f"[data] {path}: {lacking:,} of {read:,} units are not in both languages, and left out", file=sys.stderr)


def _units(path: Path, hashes: Hashes | None) -> Iterator[Element]:
    """Yield each unit, without keeping earlier ones in memory."""
    with open_unpacked(path, hashes) as file:
        open_elements: list[Element] = []
        try:
            for event, element in iterparse(file, events=("start", "end")):
                if event == "start":
                    open_elements.append(element)
                    continue
                open_elements.pop()
                if _name(element) == "tu":
                    yield element
                    open_elements[-1].clear()
        except ParseError as error:
            raise DataError(f"{path} is not well-formed XML, as TMX must be: {error}") from None


def _texts(unit: Element) -> dict[str, str]:
    found: dict[str, str] = {}
    for variant in unit.iterfind(".//{*}tuv"):
        language = next((variant.attrib[name] for name in LANGUAGE if name in variant.attrib), "")
        segment = variant.find("{*}seg")
        if segment is not None:
            found.setdefault(language, LINE_BREAK.sub(" ", "".join(_text(segment))).strip(" "))
    return found


def _text(element: Element) -> Iterator[str]:
    yield element.text or ""
    for part in element:
        if _name(part) not in CODES:
            yield from _text(part)
        yield part.tail or ""


def _name(element: Element) -> str:
    """Return an element's name without the namespace that some programs write."""
    return element.tag.rpartition("}")[2]


def _in(texts: dict[str, str], language: str) -> str | None:
    """Return the text in a language: the one with exactly this code, or else the first with one of its regions."""
    known = {code.lower().replace("_", "-"): text for code, text in reversed(texts.items())}
    wanted = language.lower().replace("_", "-")
    if wanted in known:
        return known[wanted]
    return next((text for code, text in reversed(known.items()) if code.startswith(f"{wanted}-")), None)
