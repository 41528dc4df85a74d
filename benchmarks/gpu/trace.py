"""Trace a step of the loss on a GPU, and say where the device waits between its kernels.

    python -m benchmarks.gpu.trace
    python -m benchmarks.gpu.trace --dry-run     # small, on the CPU, which has no kernels of a device

The traced steps follow others, so that nothing is compiled in them. Busy is the time in which a kernel or a copy runs,
over the time of the steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.figures import options_of, tell
from benchmarks.gpu.loss_steps import SIZES, ours
from benchmarks.loss.problems import Inputs, Problem
from benchmarks.loss.timing import forward_and_backward, wall_seconds

TRACED = 5
"""Steps in a trace."""
MOST = 12
"""Gaps and kernels that are told."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaFree")
"""Calls of CUDA's runtime that wait for the device, or may."""


class Span(NamedTuple):
    """When something ran on the device, in microseconds."""

    start: float
    end: float
    name: str


class Trace(NamedTuple):
    """What was seen in some steps."""

    seconds: float
    """Of all of them, while they were traced."""
    spans: list[Span]
    waits: Counter[str]
    """Calls of the host that wait, over all steps."""

    @property
    def busy(self) -> float:
        """Return the share of the time in which the device works."""
        return covered(self.spans) / 1e6 / self.seconds

    @property
    def launches(self) -> int:
        """Return how many kernels there were, copies and fills left out."""
        return sum(not span.name.startswith(("Memcpy", "Memset")) for span in self.spans)


def traced(run: Callable[[], object], steps: int, device: str) -> Trace:
    """Return what happens on the device while `run` is called so often; it is called as often before."""
    activities = [ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(ProfilerActivity.CUDA)

    def all_steps() -> None:
        for _ in range(steps):
            run()

    all_steps()
    with profile(activities=activities) as record:
        seconds = wall_seconds(all_steps, device != "cpu")
    spans = []
    waits: Counter[str] = Counter()
    for event in record.events():
        if event.device_type != DeviceType.CPU:
            spans.append(Span(event.time_range.start, event.time_range.end, event.name))
        elif event.name in WAITS:
            waits[event.name] += 1
    return Trace(seconds, sorted(spans), waits)


def covered(spans: list[Span]) -> float:
    """Return the length of the union of spans."""
    total = 0.0
    reached = float("-inf")
    for start, end, _ in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def gaps(spans: list[Span]) -> list[tuple[float, str, str]]:
    """Return the times in which nothing runs, the longest first, with what runs before and after."""
    found = []
    last = spans[:1]
    for span in spans[1:]:
        if span.start > last[0].end:
            found.append((round(span.start - last[0].end, 1), last[0].name[:60], span.name[:60]))
        last = [max(last[0], span, key=lambda each: each.end)]
    return sorted(found, reverse=True)


def main() -> None:
    """Tell the whole, the longest gaps, and the kernels that take longest."""
    device, problem = "cuda", Problem(*SIZES[0], bias=False, dtype=torch.bfloat16)
    if options_of(__doc__).dry_run:
        device, problem = "cpu", Problem(64, 8, 100, bias=False, dtype=torch.bfloat16)
    x = Inputs.drawn(problem, device)
    run = forward_and_backward(ours(x, None))  # type: ignore[arg-type]

    def cleared() -> None:
        x.clear()
        run()

    for _ in range(5):
        cleared()
    found = traced(cleared, TRACED, device)
    waits = {name: count / TRACED for name, count in found.waits.items()}
    ms = round(found.seconds * 1e3 / TRACED, 3)
    tell(f"a step, {problem.title}", ms=ms, busy=round(found.busy, 3), launches=found.launches / TRACED, waits=waits)
    for length, before, after in gaps(found.spans)[:MOST]:
        tell("a gap", us=length, after=before, before=after)
    kernels: Counter[str] = Counter()
    for span in found.spans:
        kernels[span.name[:90]] += span.end - span.start  # type: ignore[assignment]
    for name, us in kernels.most_common(MOST):
        tell("a kernel", kernel=name, us=round(us / TRACED, 1))


if __name__ == "__main__":
    main()
