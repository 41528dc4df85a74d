"""Outliers: steps whose loss or gradient norm is far above those before: a bad batch, or the beginning of a divergence.

A value is an outlier if it is above

    median + 10 x 1.4826 x MAD

of the last 100 steps, where MAD is the median of the absolute deviations from the median, and 1.4826 MAD estimates the
standard deviation of a normal distribution (Hampel 1974). Neither is moved by the outliers themselves. The first 20
steps are not judged, and a MAD below a hundredth of the median counts as that much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

LENGTH = 100
"""Steps that a value is compared with, at most."""
LEAST = 20
"""Steps that it is compared with, at least."""
MOST_SAID = 3
"""Steps that are reported on the console; where a few rare sentences decide the gradient, there are dozens."""
NAMES = {"loss": "loss", "gradient_norm": "gradient norm"}
"""The numbers of a record in `metrics.jsonl` that are judged, and what they are called."""


class Outliers:
    """The last steps' losses and gradient norms, by which the next ones are judged."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        """Begin after the steps in `records`, of `metrics.jsonl`."""
        self.before = {name: deque[float](maxlen=LENGTH) for name in NAMES}
        self.found: dict[str, str] = {}
        """The numbers of the last step that are outliers, and what is said of each."""
        self.follows = False
        """Whether the step before had one, too."""
        self.said = 0
        """Steps that `lines` has reported."""
        for record in records:
            if isinstance(record.get("loss"), float) and isinstance(record.get("gradient_norm"), float):
                self.judge(loss=record["loss"], gradient_norm=record["gradient_norm"])

    def judge(self, **values: float) -> None:
        """Judge the numbers of the next step, and set `found`."""
        self.follows = bool(self.found)
        self.found = {}
        for name, value in values.items():
            before = self.before[name]
            if len(before) >= LEAST:
                middle = median(before)
                if value > middle + 10 * 1.4826 * max(median(abs(each - middle) for each in before), 0.01 * middle):
                    self.found[name] = (
                        f"outlier: {NAMES[name]} {value:.3g}, while the median of the previous steps is {middle:.3g}"
                    )
            before.append(value)

    def record(self) -> dict[str, list[str]]:
        """Return what `metrics.jsonl` says of the step: nothing, or the names of the numbers that are outliers."""
        if not self.found:
            return {}
        return {"outliers": list(self.found)}

    def lines(self, step: int) -> list[str]:
        """Return a line for each outlier.

        Of several such steps in a row the first is reported; after MOST_SAID reports one line says where the rest is.
        """
        if self.follows or not self.found or self.said > MOST_SAID:
            return []
        self.said += 1
        if self.said > MOST_SAID:
            return [f"[train] step {step:>6,}   another outlier; metrics.jsonl has this and all further ones"]
        return [f"[train] step {step:>6,}   {said}" for said in self.found.values()]
