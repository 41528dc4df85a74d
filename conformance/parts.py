"""The parts of the checks, losses, scores and layouts: known implementations, and the checks to run on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from conformance.adapter import Adapter, Implementation, ScoreAdapter, load
from conformance.checks import CHECKS, SCORE_CHECKS
from conformance.finding import Check, Finding
from conformance.layout_adapter import LayoutAdapter
from conformance.layout_checks import LAYOUT_CHECKS
from conformance.layout_peers import KNOWN_LAYOUTS
from conformance.peers import KNOWN, KNOWN_SCORES


@dataclass(frozen=True, eq=False)
class Part:
    """One part of the suite."""

    known: Mapping[str, Implementation]
    checks: tuple[Check, ...]
    kind: type[Implementation]


PARTS = {
    "losses": Part(KNOWN, CHECKS, Adapter),
    "scores": Part(KNOWN_SCORES, SCORE_CHECKS, ScoreAdapter),
    "layouts": Part(KNOWN_LAYOUTS, LAYOUT_CHECKS, LayoutAdapter),
}


def adapter_of(part: str, name: str) -> Any:
    """Return a part's known implementation with this name, or the one at `module:object`.

    Raises:
        ValueError: if there is no such adapter; the message lists the known ones.
    """
    known, kind = PARTS[part].known, PARTS[part].kind
    if name in known:
        return known[name]
    if ":" not in name:
        own = f"module:object for your own {kind.__name__}"
        raise ValueError(f"{name!r} is not known; there are {', '.join(known)}, and {own}")
    found = load(name)
    if not isinstance(found, kind):
        raise ValueError(f"{name!r} is a {type(found).__name__}; it must be a conformance.{kind.__name__}")
    return replace(found, where=name)


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
