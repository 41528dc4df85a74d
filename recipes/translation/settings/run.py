"""Every setting of a translation run, as one frozen dataclass of sections.

A field says everything about a setting: its type and choices (`Literal`), its default, help text and range (`setting`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from recipes.translation.settings.data import CleaningConfig, CorpusConfig, DataConfig, SubwordConfig
from recipes.translation.settings.model import DecodingConfig, ModelConfig
from recipes.translation.settings.schema import setting
from recipes.translation.settings.training import LayoutConfig, TrainingConfig


@dataclass(frozen=True)
class RunConfig:
    """One run: everything `prepare`, `train`, `evaluate` and `translate` need to know."""

    run: str = setting(
        "runs/demo", "Folder of the run: subword models, checkpoints, metrics, resolved configuration.", path=True
    )
    data: DataConfig = field(default_factory=DataConfig)
    corpora: Mapping[str, CorpusConfig] = field(
        default_factory=dict,
        metadata={
            "help": "Training corpora instead of data.train, each under a name: {news: {train: [a.en, a.de], weight: "
            "2}}. The settings of a corpus are train, valid, test, format, path, source and target, as in data; "
            "weight, of its share of an epoch; and tag, a word in front of its sources."
        },
    )
    cleaning: CleaningConfig = field(default_factory=CleaningConfig)
    subwords: SubwordConfig = field(default_factory=SubwordConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    def with_languages(self, source: str, target: str) -> RunConfig:
        """Return the settings with these languages, which determine the tag in front of a source sentence."""
        data = self.data
        # A corpus that names no languages has those of data, and keeps them
        corpora = {
            name: replace(corpus, source=corpus.source or data.source, target=corpus.target or data.target)
            for name, corpus in self.corpora.items()
        }
        return replace(self, data=replace(data, source=source, target=target), corpora=corpora)
