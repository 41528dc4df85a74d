"""Every setting of a translation run, as one frozen dataclass of sections.

The annotation of a field says everything about a setting: its type, its choices (`Literal`), its range (`Range`), and
its help text (`Help`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from recipes.translation.settings.data import CleaningConfig, CorpusConfig, DataConfig, NoiseConfig, SubwordConfig
from recipes.translation.settings.model import DecodingConfig, ModelConfig
from recipes.translation.settings.schema import Help
from recipes.translation.settings.training import LayoutConfig, TrainingConfig


@dataclass(frozen=True)
class RunConfig:
    """One run: everything `prepare`, `train`, `evaluate` and `translate` need to know."""

    run: Annotated[str, Help("Folder of the run: subword models, checkpoints, metrics, resolved configuration.")] = (
        "runs/demo"
    )
    data: DataConfig = field(default_factory=DataConfig)
    corpora: Annotated[
        Mapping[str, CorpusConfig],
        Help(
            "Training corpora instead of data.train, each under a name: {news: {train: [a.en, a.de], weight: 2}}. The "
            "settings of a corpus are train, valid, test, format, path, source and target, as in data; weight, of its "
            "share of an epoch; and tag, a word in front of its sources."
        ),
    ] = field(default_factory=dict)
    cleaning: CleaningConfig = field(default_factory=CleaningConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    subwords: SubwordConfig = field(default_factory=SubwordConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
