"""The choice of sacreBLEU's tokeniser by target language: BLEU counts words, which not every script separates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from sacrebleu import utils
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.tokenizers import tokenizer_spm

from recipes.translation.errors import ConfigError
from recipes.translation.text.scripts import BY_LANGUAGE, scripts_of

OTHERS = ("Thai", "Laoo", "Tibt", "Mymr", "Khmr")
"""Thai, Lao, Tibetan, Burmese and Khmer."""
BY_SCRIPT = {"Hani": "zh", "Jpan": "ja-mecab", "Kore": "ko-mecab", **dict.fromkeys(OTHERS, "char")}
"""Tokenisers by the script of a language. All other languages use 13a, as in most papers."""

LOOKED_AT = 1_000
"""References from which the script is determined."""


def tokenizer_for(name: str, language: str, references: Sequence[str]) -> str:
    """Return `name`; for auto the tokeniser of the language, or else that of the references' script."""
    if name != "auto":
        return name
    code = re.split("[-_]", language.lower())[0]
    return BY_SCRIPT.get(BY_LANGUAGE.get(code, "")) or _by_script("".join(references[:LOOKED_AT]))


def _by_script(text: str) -> str:
    letters = sum(map(str.isalpha, text))
    east_asian, kana, others = (
        sum(not scripts_of(each).isdisjoint(scripts) for each in text)
        for scripts in (("Hani", "Hira", "Kana"), ("Hira", "Kana"), OTHERS)
    )
    # More than half of the letters decide, since any language quotes names in another script
    if 2 * east_asian > letters:
        if 20 * kana > east_asian:  # Chinese text has hardly any kana
            return "ja-mecab"
        return "zh"
    if 2 * others > letters:
        return "char"
    return "13a"


def check_tokenizer(name: str) -> None:
    """Raise ConfigError unless sacreBLEU has a tokeniser of this name, and everything that it needs is installed."""
    other = "choose another, such as char, with --data.tokenize (evaluate: --tokenize)"
    if name not in BLEU.TOKENIZERS:
        raise ConfigError(f"sacreBLEU has no tokeniser {name!r}; it has {', '.join(BLEU.TOKENIZERS)}")
    if name in tokenizer_spm.SPM_MODELS:
        file = tokenizer_spm.SPM_MODELS[name]["url"].rpartition("/")[2]
        path = Path(utils.SACREBLEU_DIR, "models", file)
        if not path.is_file():
            raise ConfigError(
                f"sacreBLEU's tokeniser {name} needs {path}, which is not downloaded: put it there, or {other}"
            )
        return
    try:
        BLEU(tokenize=name)
    except RuntimeError:
        extra = name.partition("-")[0]
        raise ConfigError(
            f"sacreBLEU's tokeniser {name} needs a package that is not installed: pip install 'sacrebleu[{extra}]', or "
            f"{other}"
        ) from None
