"""The parts of the checks, losses, scores and layouts: known implementations, and the checks to run on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from conformance import loss_checks, score_checks
from conformance.adapter import Adapter, Implementation, ScoreAdapter, load
from conformance.finding import Check, Finding
from conformance.layout_adapter import LayoutAdapter
from conformance.layout_checks import LAYOUT_CHECKS
from conformance.layout_known import KNOWN_LAYOUTS
from conformance.loss_peers import KNOWN
from conformance.problem import Problem
from conformance.score_peers import KNOWN_SCORES


@dataclass(frozen=True, eq=False)
class Part:
    """One part of the suite."""

    known: Mapping[str, Implementation]
    checks: tuple[Check, ...]
    kind: type[Implementation]
    measured: Callable[[Any, int], Problem] | None = None
    """Returns the problem of so many rows whose forward and backward have their peak memory measured, if any has."""

    @property
    def name(self) -> str:
        """Return the word of the command line."""
        return self.kind.part

    def adapter_of(self, name: str) -> Implementation:
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
        found = load(name)
        if not isinstance(found, self.kind):
            raise ValueError(f"{name!r} is a {type(found).__name__}; it must be a conformance.{kind}")
        return replace(found, where=name)

    def step(self, name: str, rows: int) -> Callable[[], object]:
        """Return a function that runs the forward and backward whose peak memory is measured."""
        if self.measured is None:
            raise ValueError(f"no memory is measured of {self.name}")
        return self.measured(self.adapter_of(name), rows).answer


PARTS = {
    part.name: part
    for part in (
        Part(KNOWN, loss_checks.CHECKS, Adapter, loss_checks.measured_problem),
        Part(KNOWN_SCORES, score_checks.SCORE_CHECKS, ScoreAdapter, score_checks.measured_problem),
        Part(KNOWN_LAYOUTS, LAYOUT_CHECKS, LayoutAdapter),
    )
}


def adapter_of(part: str, name: str) -> Any:
    """Return a part's known implementation of that name, or the one at `module:object`.

    Raises:
        ValueError: there is no such implementation; the message lists the known ones.
    """
    return PARTS[part].adapter_of(name)


def run(adapter: Implementation, chosen: tuple[Check, ...] | None = None) -> dict[str, Finding]:
    """Return every check's finding, by name; all are "not measured" if the adapter cannot run here.

    The checks are those of the adapter's part unless others are given.
    """
    if chosen is None:
        chosen = PARTS[adapter.part].checks
    why = adapter.why_not()
    if why:
        return {check.name: Finding("not measured", why) for check in chosen}
    return {check.name: check(adapter) for check in chosen}
