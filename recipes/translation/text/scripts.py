"""The scripts of characters and of languages, by Unicode's character names and a table of languages."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter

HAN = "CJK"
KANA = ("HIRAGANA", "KATAKANA")

BY_CODE = {
    **{"Arab": ("ARABIC",), "Armn": ("ARMENIAN",), "Beng": ("BENGALI",), "Cyrl": ("CYRILLIC",)},
    **{"Deva": ("DEVANAGARI",), "Ethi": ("ETHIOPIC",), "Geor": ("GEORGIAN",), "Grek": ("GREEK",)},
    **{"Gujr": ("GUJARATI",), "Guru": ("GURMUKHI",), "Hebr": ("HEBREW",), "Knda": ("KANNADA",)},
    **{"Khmr": ("KHMER",), "Laoo": ("LAO",), "Latn": ("LATIN",), "Mlym": ("MALAYALAM",), "Mong": ("MONGOLIAN",)},
    **{"Mymr": ("MYANMAR",), "Orya": ("ORIYA",), "Sinh": ("SINHALA",), "Taml": ("TAMIL",), "Telu": ("TELUGU",)},
    **{"Thaa": ("THAANA",), "Thai": ("THAI",), "Tibt": ("TIBETAN",)},
    **{"Hani": (HAN,), "Hans": (HAN,), "Hant": (HAN,), "Jpan": (HAN, *KANA)},
    **{"Hang": ("HANGUL",), "Kore": ("HANGUL", HAN)},
}
"""The first word of the names that Unicode gives a script's letters, by the script's code in ISO 15924."""

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
    "Hani": "zh zho chi cmn yue wuu lzh",
    "Hebr": "he heb iw yi yid",
    "Jpan": "ja jpn",
    "Khmr": "km khm",
    "Knda": "kn kan",
    "Kore": "ko kor",
    "Laoo": "lo lao",
    "Latn": "en eng de deu ger fr fra fre es spa it ita pt por nl nld dut sv swe da dan no nor nb nob nn nno fi fin "
    "is isl ice et est ekk lv lav lvs lt lit pl pol cs ces cze sk slk slo sl slv hr hrv bs bos hu hun ro ron rum sq "
    "sqi alb als tr tur az aze azj ca cat gl glg eu eus baq ga gle cy cym wel gd gla mt mlt br bre lb ltz fy fry af "
    "afr sw swa swh so som ha hau yo yor ig ibo zu zul xh xho st sot tn tsn rw kin mg mlg plt vi vie id ind ms msa "
    "zsm tl tgl fil ceb jv jav su sun mi mri sm smo ht hat eo epo la lat oc oci ast uz uzb uzn tk tuk ku kur kmr",
    "Mlym": "ml mal",
    "Mymr": "my mya bur",
    "Orya": "or ori ory",
    "Sinh": "si sin",
    "Taml": "ta tam",
    "Telu": "te tel",
    "Thaa": "dv div",
    "Thai": "th tha",
    "Tibt": "bo bod tib dz dzo",
}
"""ISO 639 codes of languages that are mostly written in one script, by the script's code. Languages of several scripts,
such as Serbian, need the code of the script with their own: sr-Cyrl."""
BY_LANGUAGE = {language: BY_CODE[code] for code, languages in LANGUAGES.items() for language in languages.split()}

ALIKE = {"IDEOGRAPHIC": HAN, "KATAKANA-HIRAGANA": "KATAKANA"}
"""First words of names that belong to a script of another name: the iteration mark, the sign of a long vowel."""
WIDTHS = ("FULLWIDTH", "HALFWIDTH")
OF_NO_SCRIPT = frozenset({"MODIFIER", "FEMININE", "MASCULINE", "MICRO", "MATHEMATICAL"})


def scripts_of_language(language: str) -> tuple[str, ...] | None:
    """Return the scripts of a language by its ISO 639 code, or by the ISO 15924 code after it; None if unknown."""
    name, *subtags = re.split("[-_]", language)
    for subtag in subtags:
        if subtag.title() in BY_CODE:
            return BY_CODE[subtag.title()]
    return BY_LANGUAGE.get(name.lower())


@functools.cache
def script_of(character: str) -> str | None:
    """Return the script of a letter, as the first word of its name in Unicode; None for any other character."""
    if not character.isalpha():
        return None
    first, *others = unicodedata.name(character, "UNKNOWN").split()
    if first in WIDTHS and others:
        first = others[0]
    if first in OF_NO_SCRIPT:
        return None
    return ALIKE.get(first, first)


def mostly_in(text: str, scripts: tuple[str, ...]) -> bool:
    """Return whether at least half of a text's letters are in one of the scripts; so is a text without letters."""
    letters = Counter(map(script_of, text))
    del letters[None]
    return 2 * sum(letters[script] for script in scripts) >= letters.total()
