"""What the service counts, in the text format that Prometheus reads.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

BUCKETS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of the histogram's intervals, in seconds."""


class Metrics:
    """Requests by path and status, and how long translations took."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._by_bucket = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0

    def count(self, path: str, status: int) -> None:
        """Count an answer."""
        self._requests[path, status] += 1

    def took(self, seconds: float) -> None:
        """Count a translated request, from the end of its body to its translation."""
        self._by_bucket[bisect_left(BUCKETS, seconds)] += 1
        self._seconds += seconds

    def text(self, queued: int, translated: int) -> str:
        """Return all numbers; `queued` lines wait, and `translated` lines are done."""
        requests = [
            f'seqpar_requests_total{{path="{path}",status="{status}"}} {number}'
            for (path, status), number in sorted(self._requests.items())
        ]
        errors = sum(number for (_, status), number in self._requests.items() if status >= 400)
        *ends, total = accumulate(self._by_bucket)
        histogram = [
            f'seqpar_translation_seconds_bucket{{le="{end:g}"}} {number}'
            for end, number in zip(BUCKETS, ends, strict=True)
        ]
        histogram += [
            f'seqpar_translation_seconds_bucket{{le="+Inf"}} {total}',
            f"seqpar_translation_seconds_sum {self._seconds:.6f}",
            f"seqpar_translation_seconds_count {total}",
        ]
        families = [
            ("seqpar_requests_total", "counter", "Answers by path and status.", requests),
            ("seqpar_errors_total", "counter", "Answers with a status from 400 up.", [f"seqpar_errors_total {errors}"]),
            ("seqpar_queued_lines", "gauge", "Lines that wait.", [f"seqpar_queued_lines {queued}"]),
            ("seqpar_lines_total", "counter", "Lines translated.", [f"seqpar_lines_total {translated}"]),
            ("seqpar_translation_seconds", "histogram", "Time of a request in queue and search.", histogram),
        ]
        return "".join(
            f"# HELP {name} {help}\n# TYPE {name} {kind}\n" + "".join(f"{line}\n" for line in lines)
            for name, kind, help, lines in families
        )
