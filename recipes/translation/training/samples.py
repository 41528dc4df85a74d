"""What a run keeps of its validations' translations.

`samples.jsonl` has, for each validation, the translations of a few sentences that stay the same throughout the run,
with the attention of the first of them. `validation.json` has all sentences of the newest validation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.translation.data.model_text import source_text, target_text
from recipes.translation.files.writing import replace_file
from recipes.translation.run_folder.translator import Translator
from recipes.translation.text.pair import Pair
from recipes.translation.text.subwords import Subwords
from recipes.translation.translating.alignments import attention_of_subwords

SAMPLES = 6
"""Sentences of each validation that are kept."""
MAPS = 3
"""The most of them whose attention is kept."""
LONGEST = 40
"""The most subwords, on either side, of a sentence whose attention is kept."""


def sample_rows(sentences: int) -> list[int]:
    """Return the numbers of the sentences that are kept: evenly spaced, so that they are not all of one document."""
    kept = min(SAMPLES, sentences)
    return [sentences * number // kept for number in range(kept)]


def samples_of(translator: Translator, pairs: Sequence[Pair], translations: Sequence[str]) -> list[dict[str, Any]]:
    """Return the kept sentences as records of `samples.jsonl`."""
    found = []
    maps = 0
    for row in sample_rows(len(translations)):
        sample: dict[str, Any] = {
            "source": pairs[row].source,
            "reference": pairs[row].target,
            "translation": translations[row],
        }
        attention = None
        if maps < MAPS:
            attention = attention_map(translator, pairs[row].source, translations[row])
        if attention:
            maps += 1
            sample["attention"] = attention
        found.append(sample)
    return found


def attention_map(translator: Translator, source: str, translation: str) -> dict[str, Any] | None:
    """Return the attention of each subword of a translation to those of its source, with three decimals.

    The last row and column are the end symbols. None for empty and for long sentences.
    """
    (source_ids,) = translator.source.encode([source_text(translator.config, source)])
    (target_ids,) = translator.target.encode([target_text(translator.config, translation)])
    if not source_ids or not target_ids or max(len(source_ids), len(target_ids)) > LONGEST:
        return None
    weights_BTS = attention_of_subwords(translator, [source_ids], [target_ids])
    weights_TS = weights_BTS[0, : len(target_ids) + 1, : len(source_ids) + 1]
    return {
        "source": [*_pieces(translator.source, source_ids), "</s>"],
        "target": [*_pieces(translator.target, target_ids), "</s>"],
        "read": translator.model.attention_read,
        "weights": [[round(weight, 3) for weight in row] for row in weights_TS.tolist()],
    }


def write_newest(path: Path, step: int, pairs: Sequence[Pair], translations: Sequence[str]) -> None:
    """Replace `validation.json` by the translations of a validation."""
    record = {
        "step": step,
        "sources": [pair.source for pair in pairs],
        "references": [pair.target for pair in pairs],
        "translations": list(translations),
    }
    replace_file(path, (json.dumps(record, ensure_ascii=False) + "\n").encode())


def _pieces(subwords: Subwords, ids: Sequence[int]) -> list[str]:
    pieces = subwords.pieces()
    return [pieces[each] for each in ids]
