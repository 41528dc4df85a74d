"""English names of languages, by the codes of ISO 639-1."""

from __future__ import annotations

import re

NAMES: dict[str, str] = dict(
    re.findall(
        r"(\w\w) ([^,]+)",
        "af Afrikaans, am Amharic, ar Arabic, as Assamese, az Azerbaijani, be Belarusian, bg Bulgarian, bn Bengali, "
        "bs Bosnian, ca Catalan, cs Czech, cy Welsh, da Danish, de German, el Greek, en English, eo Esperanto, "
        "es Spanish, et Estonian, eu Basque, fa Persian, fi Finnish, fr French, ga Irish, gl Galician, gu Gujarati, "
        "ha Hausa, he Hebrew, hi Hindi, hr Croatian, hu Hungarian, hy Armenian, id Indonesian, ig Igbo, is Icelandic, "
        "it Italian, ja Japanese, ka Georgian, kk Kazakh, km Khmer, kn Kannada, ko Korean, ky Kyrgyz, "
        "lb Luxembourgish, lo Lao, lt Lithuanian, lv Latvian, mg Malagasy, mk Macedonian, ml Malayalam, mn Mongolian, "
        "mr Marathi, ms Malay, mt Maltese, my Burmese, nb Norwegian Bokm\u00e5l, ne Nepali, nl Dutch, "
        "nn Norwegian Nynorsk, no Norwegian, or Odia, pa Punjabi, pl Polish, ps Pashto, pt Portuguese, "
        "ro Romanian, ru Russian, sd Sindhi, "
        "si Sinhala, sk Slovak, sl Slovenian, so Somali, sq Albanian, sr Serbian, sv Swedish, sw Swahili, ta Tamil, "
        "te Telugu, tg Tajik, th Thai, ti Tigrinya, tk Turkmen, tl Tagalog, tr Turkish, uk Ukrainian, ur Urdu, "
        "uz Uzbek, vi Vietnamese, xh Xhosa, yo Yoruba, zh Chinese, zu Zulu",
    )
)


def language_name(code: str) -> str:
    """Return the English name of a language such as de or de_DE; the code itself of one that is not known here."""
    return NAMES.get(re.split("[-_]", code)[0].lower(), code)
