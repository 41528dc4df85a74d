"""The choice of sacreBLEU's tokeniser by target language: BLEU counts words, which not every script separates.

For files without a run the language is not known, so their script decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sacrebleu import utils
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.tokenizers import tokenizer_spm

from recipes.translation.errors import ConfigError
from recipes.translation.text.scripts import count_letters, script_of_language

WITHOUT_SPACES = ("Thai", "Laoo", "Tibt", "Mymr", "Khmr")
"""Thai, Lao, Tibetan, Burmese and Khmer."""
CHINESE = dict.fromkeys(("Hani", "Hans", "Hant"), "zh")
BY_SCRIPT = {**CHINESE, "Jpan": "ja-mecab", "Kore": "ko-mecab", **dict.fromkeys(WITHOUT_SPACES, "char")}
"""Tokenisers by a language's script. All other languages use 13a, as in most papers."""


LOOKED_AT = 1_000
"""Number of references from which the script is determined."""


def tokenizer_of(language: str) -> str:
    """Return the tokeniser for a language, by the script that its code names, or that it is mostly written in."""
    return BY_SCRIPT.get(script_of_language(language) or "", "13a")


def tokenizer_of_text(text: str) -> str:
    """Return the tokeniser for a text whose language is not named, by the script of more than half its letters."""
    letters = sum(map(str.isalpha, text))
    east_asian, kana, others = (
        count_letters(text, scripts) for scripts in (("Hani", "Hira", "Kana"), ("Hira", "Kana"), WITHOUT_SPACES)
    )
    if 2 * east_asian > letters:
        return "ja-mecab" if 20 * kana > east_asian else "zh"  # Chinese text has hardly any kana
    return "char" if 2 * others > letters else "13a"


def tokenizer_for(name: str, language: str, references: Sequence[str] = ()) -> str:
    """Return `name` or, for auto, the tokeniser for the language or, without one, for the references' script.

    Raises ConfigError unless sacreBLEU has such a tokeniser, and everything that it needs is installed.
    """
    if name == "auto":
        name = tokenizer_of(language) if language else tokenizer_of_text("".join(references[:LOOKED_AT]))
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
        return name
    try:
        BLEU(tokenize=name)
    except RuntimeError:
        extra = name.partition("-")[0]
        raise ConfigError(
            f"sacreBLEU's tokeniser {name} needs a package that is not installed: pip install 'sacrebleu[{extra}]', or "
            f"{other}"
        ) from None
    return name
