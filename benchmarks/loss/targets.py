"""Hold what the library sets out to reach against what was measured: the worst case over each claim's problems."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.loss.implementations import ENGINE, OURS, OWN, OWN_SMALL, PLAIN, TORCH_DEFAULT
from benchmarks.loss.problems import SHAPES
from benchmarks.loss.results import Entry, Results, fastest_to_floor, floor_seconds, median
from benchmarks.loss.timing import CHUNKED

Ratio = Callable[[Entry], float | None]
FOUR = {(shape.rows, shape.width, shape.vocab_size) for shape in SHAPES[:4]}


class Target(NamedTuple):
    """State one claim: its limit as text, the worst that was measured, where, and whether that is within the limit."""

    claim: str
    limit: str
    measured: str
    where: str
    reached: bool


def targets(results: Results) -> list[Target]:
    """Return every claim that the file has figures for."""
    return [
        *_of_shapes(results),
        *_of_padding(results),
        *_of_memory(results),
        *_of_linear(results),
        *_of_devices(results),
    ]


def _of_shapes(results: Results) -> Iterator[Target]:
    engine = f"`{ENGINE}`"
    single = _entries(results, "shapes", "float32")
    smooth = [entry for entry in single if entry["problem"]["smoothing"]]
    rough = [entry for entry in single if not entry["problem"]["smoothing"]]
    half = _entries(results, "shapes", "bfloat16")
    yield from most(f"float32, {engine}: time / three products", single, to_floor, 1.15)
    yield from most(f"float32, {engine}: time / three products, fastest runs", single, _fastest_to_floor, 1.15)
    yield from _least(f"float32, smoothing: plain's time / {engine}'s", smooth, time_ratio(PLAIN, ENGINE), 1.6)
    yield from _least(f"float32, no smoothing: plain's time / {engine}'s", rough, time_ratio(PLAIN, ENGINE), 1.3)
    yield from _least(f"float32: fastest peer's time / {engine}'s", single, _fastest_peer, 1.0)
    yield from most(f"bfloat16, {engine}: time / three products", half, to_floor, 1.4)
    yield from most(f"bfloat16, {engine}: time / three products, fastest runs", half, _fastest_to_floor, 1.4)
    yield from _least(f"bfloat16: plain's time / {engine}'s", half, time_ratio(PLAIN, ENGINE), 2.0)
    chunked = [entry for entry in half if not entry["problem"]["smoothing"]]
    claim = f"bfloat16: torch op's time, default options, / {engine}'s"
    yield from _least(claim, chunked, time_ratio(TORCH_DEFAULT, ENGINE), 3.0)
    yield from _least(f"bfloat16: fastest peer's time / {engine}'s", half, _fastest_peer, 1.0)
    everything = list(results["parts"].get("shapes", {}).values())
    yield from most(f"{engine}: peak memory / what is allowed", everything, _to_allowance, 1.0)
    claim = f"{engine}: peak memory, less what the bare products' libraries take, / what is allowed"
    yield from most(claim, everything, _own_to_allowance, 1.0)
    both = single + half
    yield from most("own generator: time / plain's", both, time_ratio(OWN, PLAIN), 1.25)
    small = list(results["parts"].get("small", {}).values())
    name = "own generator, 128 rows"
    yield from most(f"{name}: time / plain's", small, time_ratio(OWN_SMALL, PLAIN), 1.25)
    yield from most(f"{name}: peak memory / plain's", small, _memory_to_plain, 1 / 8)


def _of_padding(results: Results) -> Iterator[Target]:
    entries = list(results["parts"].get("padding", {}).values())
    by_padding = {bool(entry["problem"]["padding"]): entry for entry in entries}
    if len(by_padding) == 2:
        whole = by_padding[False]
        claim = f"30 % padding, `{ENGINE}`: time without / time with"
        yield from _least(claim, [by_padding[True]], lambda padded: faster(whole, padded, ENGINE), 1.25)


def faster(whole: Entry, padded: Entry, name: str) -> float | None:
    """Return how many times as long an implementation takes without padding."""
    return _ratio(median(whole, name), median(padded, name))


def _of_memory(results: Results) -> Iterator[Target]:
    entries = list(results["parts"].get("memory", {}).values())
    yield from most(f"`{ENGINE}`, N from 1,024 to 16,384: peak memory / what is allowed", entries, _to_allowance, 1.0)
    beyond = [above for entry in entries if (above := beyond_hidden(entry, ENGINE)) is not None]
    if len(beyond) > 1:
        growth = max(beyond) / beyond[0]
        text = f"`{ENGINE}`: peak memory without the hidden gradient, N 16-fold"
        yield Target(text, "<= 1.10 x", f"{growth:.2f} x", "the part `memory`", growth <= 1.1)


def _of_linear(results: Results) -> Iterator[Target]:
    for name, (sizes, times) in lines(results).items():
        worst = max(abs(deviation) for deviation in fit(sizes, times)[2])
        where = f"{name} from {sizes[0]:,} to {sizes[-1]:,}"
        yield Target(f"`{ENGINE}`: time off a line in {name}", "<= 10 %", f"{worst:.1%}", where, worst <= 0.1)


def _of_devices(results: Results) -> Iterator[Target]:
    entries = list(results["parts"].get("devices", {}).values())
    for name in (ENGINE, OWN):
        ratio = time_ratio(f"{name}, 4 replicas", f"{name}, 1 replica")
        yield from most(f"`{name}`: four replicas' time / one's", entries, ratio, 1.05)


def _entries(results: Results, part: str, dtype: str) -> list[Entry]:
    """Return the entries of the first four shapes in that dtype."""
    found = []
    for entry in results["parts"].get(part, {}).values():
        problem = entry["problem"]
        if problem["dtype"] == dtype and (problem["rows"], problem["width"], problem["vocab_size"]) in FOUR:
            found.append(entry)
    return found


def most(claim: str, entries: list[Entry], ratio: Ratio, limit: float) -> Iterator[Target]:
    """Claim that a ratio is at most the limit in every entry; yield nothing where there is no figure."""
    yield from _judged(claim, entries, ratio, limit, f"<= {limit:.3g}", largest=True)


def _least(claim: str, entries: list[Entry], ratio: Ratio, limit: float) -> Iterator[Target]:
    yield from _judged(claim, entries, ratio, limit, f">= {limit:.3g}", largest=False)


def _judged(
    claim: str, entries: list[Entry], ratio: Ratio, limit: float, text: str, *, largest: bool
) -> Iterator[Target]:
    found = [(value, entry) for entry in entries if (value := ratio(entry)) is not None]
    if not found:
        return
    ordered = sorted(found, key=lambda pair: pair[0], reverse=largest)
    worst, entry = ordered[0]
    measured = f"{worst:.3g}"
    if len(found) > 1:
        measured += f" (best {ordered[-1][0]:.3g})"
    is_inside = operator.ge
    if largest:
        is_inside = operator.le
    inside = sum(is_inside(value, limit) for value, _ in found)
    yield Target(claim, text, measured, f"{title(entry)}; {inside} of {len(found)} inside", inside == len(found))


def title(entry: Entry) -> str:
    """Return the problem in short."""
    problem = entry["problem"]
    words = [shape_title(entry)]
    if problem["smoothing"]:
        words.append(f"smoothing {problem['smoothing']:g}")
    return ", ".join([*words, problem["dtype"]])


def shape_title(entry: Entry) -> str:
    """Return the problem's shape in short."""
    problem = entry["problem"]
    shape = f"{problem['rows']:,} x {problem['width']:,} x {problem['vocab_size']:,}"
    if problem["padding"]:
        return f"{shape}, {problem['padding']:.0%} padding"
    return shape


def to_floor(entry: Entry) -> float | None:
    """Return the engine's time over that of the three products."""
    return _ratio(median(entry, ENGINE), floor_seconds(entry))


def _fastest_to_floor(entry: Entry) -> float | None:
    return fastest_to_floor(entry, ENGINE)


def time_ratio(name: str, other: str) -> Ratio:
    """Return a function that gives one implementation's time over another's."""
    return lambda entry: _ratio(median(entry, name), median(entry, other))


def _ratio(value: float | None, other: float | None) -> float | None:
    if value is None or other is None:
        return None
    return value / other


def _fastest_peer(entry: Entry) -> float | None:
    theirs = [median(entry, name) for name in entry["seconds"] if name not in OURS]
    fastest = min((time for time in theirs if time is not None), default=None)
    return _ratio(fastest, median(entry, ENGINE))


def peak(entry: Entry, name: str) -> int | None:
    """Return the peak bytes of an implementation, or None where there is no figure."""
    found = entry["peak bytes"].get(name)
    if not isinstance(found, int):  # text says what became of the process
        return None
    return found


def _to_allowance(entry: Entry) -> float | None:
    return _ratio(peak(entry, ENGINE), entry["allowed bytes"])


def _own_to_allowance(entry: Entry) -> float | None:
    whole = peak(entry, ENGINE)
    libraries = peak(entry, CHUNKED)
    if whole is None or libraries is None:
        return None
    return (whole - libraries) / entry["allowed bytes"]


def _memory_to_plain(entry: Entry) -> float | None:
    return _ratio(peak(entry, OWN_SMALL), peak(entry, PLAIN))


def beyond_hidden(entry: Entry, name: str) -> int | None:
    """Return an implementation's peak less the hidden gradient, which every implementation must hand back."""
    whole = peak(entry, name)
    if whole is None:
        return None
    problem = entry["problem"]
    itemsize = 4 if problem["dtype"] == "float32" else 2
    return whole - problem["rows"] * problem["width"] * itemsize


def lines(results: Results) -> dict[str, tuple[list[int], list[float]]]:
    """Return for each of N, D and V the sizes and the engine's seconds, the other two fixed."""
    entries = list(results["parts"].get("linear", {}).values())
    fields = {"N": "rows", "D": "width", "V": "vocab_size"}
    found = {}
    for name, field in fields.items():
        # All three lines cross at one base problem, so the commonest value of each other field is the base's
        rest = [f for f in fields.values() if f != field]
        values = {f: [entry["problem"][f] for entry in entries] for f in rest}
        base = {f: max(set(seen), key=seen.count) for f, seen in values.items() if seen}
        line = sorted(
            (entry["problem"][field], median(entry, ENGINE) or 0.0)
            for entry in entries
            if all(entry["problem"][f] == base[f] for f in rest)
        )
        if len(line) > 2:
            found[name] = ([size for size, _ in line], [time for _, time in line])
    return found


def fit(sizes: list[int], times: list[float]) -> tuple[float, float, list[float]]:
    """Return start and slope of the line with the least squared relative deviations, and those deviations.

    With weights w = 1/t^2, slope = sum w (s - s') (t - t') / sum w (s - s')^2, where ' is the weighted mean.
    """
    # sum ((t - line) / t)^2 is the weighted sum of squares with w = 1 / t^2
    weights = [1 / time**2 for time in times]
    total = sum(weights)
    mean_size = sum(w * s for w, s in zip(weights, sizes, strict=True)) / total
    mean_time = sum(w * t for w, t in zip(weights, times, strict=True)) / total
    points = list(zip(weights, sizes, times, strict=True))
    slope = sum(w * (s - mean_size) * (t - mean_time) for w, s, t in points)
    slope /= sum(w * (s - mean_size) ** 2 for w, s, _ in points)
    start = mean_time - slope * mean_size
    return start, slope, [t / (start + slope * s) - 1 for s, t in zip(sizes, times, strict=True)]
