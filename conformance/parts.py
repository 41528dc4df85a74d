"""The parts of the checks, losses, scores and layouts: known implementations, and the checks to run on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic

from conformance import checks, score_checks
from conformance.adapter import Adapter, loaded
from conformance.adapters import KNOWN
from conformance.finding import Check, Finding, Kind
from conformance.layout_adapter import LayoutAdapter
from conformance.layout_checks import LAYOUT_CHECKS
from conformance.layout_known import KNOWN_LAYOUTS
from conformance.problem import Problem
from conformance.score_adapter import ScoreAdapter
from conformance.score_adapters import KNOWN_SCORES


@dataclass(frozen=True, eq=False)
class Part(Generic[Kind]):
    """One part of the suite."""

    name: str
    known: Mapping[str, Kind]
    checks: tuple[Check[Kind], ...]
    kind: type[Kind]
    measured: Callable[[Kind, int], Problem] | None = None
    """Returns the problem of so many rows whose forward and backward have their peak memory measured, if any has."""

    def adapter_of(self, name: str) -> Kind:
        """Return the known adapter of that name, or the one at `module:object`.

        Raises:
            ValueError: there is no such adapter; the message lists the known ones.
        """
        if name in self.known:
            return self.known[name]
        kind = self.kind.__name__
        if ":" not in name:
            known = ", ".join(self.known)
            raise ValueError(f"{name!r} is not known; there are {known}, and module:object for your own {kind}")
        found = loaded(name)
        if not isinstance(found, self.kind):
            wanted = f"conformance.{kind}"
            raise ValueError(f"{name!r} is a {type(found).__name__}; it must be a {wanted}")
        return replace(found, where=name)

    def step(self, name: str, rows: int) -> Callable[[], object]:
        """Return a function that runs the forward and backward whose peak memory is measured."""
        assert self.measured is not None
        return self.measured(self.adapter_of(name), rows).answer


LOSSES = Part("losses", KNOWN, checks.CHECKS, Adapter, checks.measured_inputs)
SCORES = Part("scores", KNOWN_SCORES, score_checks.SCORE_CHECKS, ScoreAdapter, score_checks.measured_inputs)
LAYOUTS = Part("layouts", KNOWN_LAYOUTS, LAYOUT_CHECKS, LayoutAdapter)
PARTS: dict[str, Part[Any]] = {part.name: part for part in (LOSSES, SCORES, LAYOUTS)}


def adapter_of(name: str) -> Adapter:
    """Return the known implementation of the loss of that name, or the `Adapter` at `module:object`.

    Raises:
        ValueError: there is no such adapter; the message lists the known ones.
    """
    found: Adapter = LOSSES.adapter_of(name)
    return found


def score_adapter_of(name: str) -> ScoreAdapter:
    """Return the known implementation of the scores of that name, or the `ScoreAdapter` at `module:object`.

    Raises:
        ValueError: there is no such adapter; the message lists the known ones.
    """
    found: ScoreAdapter = SCORES.adapter_of(name)
    return found


def layout_adapter_of(name: str) -> LayoutAdapter:
    """Return the known implementation of a step over ranks of that name, or the `LayoutAdapter` at `module:object`.

    Raises:
        ValueError: there is no such adapter; the message lists the known ones.
    """
    found: LayoutAdapter = LAYOUTS.adapter_of(name)
    return found


def run(adapter: Kind, chosen: tuple[Check[Kind], ...] | None = None) -> dict[str, Finding]:
    """Return every check's finding, by name; all are "not measured" if the adapter cannot run here.

    The checks are those of the adapter's part, `CHECKS`, `SCORE_CHECKS` or `LAYOUT_CHECKS`, unless others are given.
    """
    if chosen is None:
        chosen = next(part for part in PARTS.values() if isinstance(adapter, part.kind)).checks
    why = adapter.why_not()
    if why:
        return {check.name: Finding("not measured", why) for check in chosen}
    return {check.name: check(adapter) for check in chosen}
