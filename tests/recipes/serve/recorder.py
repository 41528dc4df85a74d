"""A model for tests that waits at a gate, and notes what it was given."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from recipes.translation.serve.batching import Line
from recipes.translation.translating.translate import Translation


@dataclass
class Recorder:
    """Translates into capitals once its gate is open."""

    source: str = "en"
    target: str = "de"
    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    batches: list[list[str]] = field(default_factory=list)
    wishes: list[tuple[int, bool]] = field(default_factory=list)
    """Of each batch: how many translations of each line, and whether they are to be linked."""
    beam: int = 4
    batch_sentences: int = 4

    def translate(self, lines: Sequence[str], n_best: int, links: bool) -> list[Line]:
        """Wait at the gate; the line "poison" is an error, and "long" is refused."""
        self.begun.set()
        assert self.gate.wait(20)
        self.batches.append(list(lines))
        self.wishes.append((n_best, links))
        if "poison" in lines:
            raise RuntimeError("poison")
        return [
            Line([], [], "is too long") if line == "long" else Line([Translation(line.upper(), 0.0, 0.0)], [])
            for line in lines
        ]
