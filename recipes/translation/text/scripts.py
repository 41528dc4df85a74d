"""The scripts of characters and of languages, by ISO 15924 codes: Unicode's table, and a table of languages."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import regex

SEVERAL = {"Hans": ("Hani",), "Hant": ("Hani",), "Jpan": ("Hani", "Hira", "Kana"), "Kore": ("Hang", "Hani")}
"""Codes of writing systems that use one or several other scripts."""

LANGUAGES = {
    "Arab": "ar ara arb fa fas per prs pes ur urd ps pus ckb ug uig sd snd",
    "Armn": "hy hye arm",
    "Beng": "bn ben as asm",
    "Cyrl": "ru rus uk ukr be bel bg bul mk mkd mac kk kaz ky kir tg tgk tt tat mn mon khk ba bak cv chv",
    "Deva": "hi hin mr mar ne nep npi sa san bho mai",
    "Ethi": "am amh ti tir",
    "Geor": "ka kat geo",
    "Grek": "el ell gre",
    "Gujr": "gu guj",
    "Guru": "pa pan",
    "Hani": "zh zho chi cmn yue wuu lzh nan hak chinese mandarin cantonese",
    "Hebr": "he heb iw yi yid",
    "Jpan": "ja jpn japanese",
    "Khmr": "km khm khmer",
    "Knda": "kn kan",
    "Kore": "ko kor korean",
    "Laoo": "lo lao",
    "Latn": "en eng de deu ger fr fra fre es spa it ita pt por nl nld dut sv swe da dan no nor nb nob nn nno fi fin "
    "is isl ice et est ekk lv lav lvs lt lit pl pol cs ces cze sk slk slo sl slv hr hrv bs bos hu hun ro ron rum sq "
    "sqi alb als tr tur az aze azj ca cat gl glg eu eus baq ga gle cy cym wel gd gla mt mlt br bre lb ltz fy fry af "
    "afr sw swa swh so som ha hau yo yor ig ibo zu zul xh xho st sot tn tsn rw kin mg mlg plt vi vie id ind ms msa "
    "zsm tl tgl fil ceb jv jav su sun mi mri sm smo ht hat eo epo la lat oc oci ast uz uzb uzn tk tuk ku kur kmr",
    "Mlym": "ml mal",
    "Mymr": "my mya bur burmese",
    "Orya": "or ori ory",
    "Sinh": "si sin",
    "Taml": "ta tam",
    "Telu": "te tel",
    "Thaa": "dv div",
    "Thai": "th tha thai",
    "Tibt": "bo bod tib tibetan dz dzo",
}
"""ISO 639 codes of languages that are mostly written in one script, by the script's code, with the English names of
those that have a tokeniser of their own for BLEU. Languages with several scripts, such as Serbian, need the script's
code in addition to their own: sr-Cyrl."""
BY_LANGUAGE = {language: code for code, languages in LANGUAGES.items() for language in languages.split()}


WITH_A_SCRIPT = r"[\p{L}--[\p{scx=Zyyy}\p{scx=Zinh}]]"
"""Letters of any script except "common" and "inherited", which signs such as the micro sign have."""


def scripts_of_language(language: str) -> tuple[str, ...] | None:
    """Return the scripts of the texts in a language (Japanese has three); None if unknown."""
    code = script_of_language(language)
    return None if code is None else SEVERAL.get(code, (code,))


def script_of_language(language: str) -> str | None:
    """Return a language's ISO 15924 code: that after its ISO 639 code, or that of its usual script; None if unknown."""
    name, *subtags = re.split("[-_]", language)
    codes = [code for code in map(str.title, subtags) if code in SEVERAL or is_script(code)]
    return codes[0] if codes else BY_LANGUAGE.get(name.lower())


def is_script(code: str) -> bool:
    """Return whether this is the ISO 15924 code of a script."""
    if not re.fullmatch("[A-Z][a-z]{3}", code):
        return False
    try:
        regex.compile(rf"\p{{sc={code}}}")
    except regex.error:
        return False
    return True


@functools.cache
def letters_in(*scripts: str) -> regex.Pattern[str]:
    """Return the pattern for a letter in one of the scripts or, if none are given, in any script."""
    if not scripts:
        return regex.compile(WITH_A_SCRIPT, regex.V1)
    listed = "".join(rf"\p{{scx={code}}}" for code in scripts)
    return regex.compile(f"[{WITH_A_SCRIPT}&&[{listed}]]", regex.V1)


def count_letters(text: str, scripts: Sequence[str] = ()) -> int:
    """Return how many letters of a text are in one of the scripts or, if none are given, in any script."""
    return sum(1 for _ in letters_in(*scripts).finditer(text))


def mostly_in(text: str, scripts: Sequence[str]) -> bool:
    """Return whether at least half of a text's letters are in one of the scripts; true for a text without letters."""
    return 2 * count_letters(text, scripts) >= count_letters(text)
