"""A queue of requests, and one thread that translates lines of several requests together."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from recipes.translation.serve.models import Line, Model


class NotAcceptedError(Exception):
    """Lines are not translated, as there is no room for them or the service stops; the message is one line."""


class Wanted(NamedTuple):
    """What a request wants; requests that want the same are translated together."""

    model: int
    """The number of the model, from 0."""
    n_best: int
    links: bool = False


@dataclass(eq=False)
class Request:
    """Lines to translate, and how many of them are."""

    wanted: Wanted
    lines: Sequence[str]
    answer: Future[list[Line]] = field(default_factory=Future)
    begun: int = 0
    """The lines that the worker has taken."""
    found: dict[int, Line] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Return the number of lines that the worker has not taken; a request that was given up has none."""
        if self.answer.done():
            return 0
        return len(self.lines) - self.begun


Place = tuple[Request, int]
"""A line: its request, and its number there."""


class Batcher:
    """Translates the lines of many requests in batches, in one thread.

    A batch has lines of requests that want the same of one model, a line of each in turn, so that a short request need
    not wait for all of a long one. Cancelling a request's `answer` drops those of its lines that no batch has.
    """

    def __init__(self, models: Sequence[Model], most: int) -> None:
        """Start the thread; `most` lines can wait."""
        self.models = models
        self.most = most
        self._requests: list[Request] = []
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="translation", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, wanted: Wanted, lines: Sequence[str]) -> Future[list[Line]]:
        """Put lines into the queue; the future returns their translations.

        Raises NotAcceptedError if more than `most` lines would wait, and after `close`.
        """
        request = Request(wanted, lines)
        if not lines:
            request.answer.set_result([])
            return request.answer
        with self._changed:
            if self._stopped:
                raise NotAcceptedError("the service is stopping")
            waiting = self._waiting()
            if waiting + len(lines) > self.most:
                raise NotAcceptedError(
                    f"{waiting:,} lines are waiting, and {len(lines):,} more would be above {self.most:,}: try again "
                    "in a moment"
                )
            self._requests.append(request)
            self._changed.notify()
        return request.answer

    def _waiting(self) -> int:
        return sum(request.waiting for request in self._requests)

    def close(self, seconds: float) -> None:
        """Drop what waits, and wait for the end of the present batch, at most so many seconds."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(seconds)
        self._drop()

    def _drop(self) -> None:
        for request in self._requests:
            fail(request, NotAcceptedError("the service is stopping"))

    def _run(self) -> None:
        try:
            while batch := self._next():
                self._translate(batch)
        finally:
            # Also where stderr cannot be written to: nobody waits for a thread that has ended
            with self._changed:
                self._stopped = True
            self._drop()

    def _next(self) -> list[Place]:
        """Wait for lines and return the next batch; an empty one after `close`."""
        with self._changed:
            while not self._stopped:
                self._requests = [request for request in self._requests if request.waiting]
                if self._requests:
                    return self._take()
                self._changed.wait()
        return []

    def _take(self) -> list[Place]:
        """Take lines of the first request and of all that want the same, one of each in turn."""
        wanted = self._requests[0].wanted
        size = self.models[wanted.model].batch_sentences
        same = [request for request in self._requests if request.wanted == wanted]
        batch: list[Place] = []
        while same and len(batch) < size:
            for request in same[: size - len(batch)]:
                batch.append((request, request.begun))
                request.begun += 1
            same = [request for request in same if request.waiting]
        # Those that have had a turn go to the end, so that the next batch is another's
        had = {id(request) for request, _ in batch}
        self._requests.sort(key=lambda request: id(request) in had)
        return batch

    def _translate(self, batch: Sequence[Place]) -> None:
        """Translate a batch; where that fails, translate the requests one by one, so that only one of them fails."""
        batch = [(request, number) for request, number in batch if not request.answer.done()]
        if not batch:
            return
        (model, n_best, links) = batch[0][0].wanted
        lines = [request.lines[number] for request, number in batch]
        try:
            found = self.models[model].translate(lines, n_best, links)
        except Exception as error:
            requests = list(dict.fromkeys(request for request, _ in batch))
            if len(requests) == 1:
                traceback.print_exception(error)
                fail(requests[0], error)
                return
            for one in requests:
                self._translate([place for place in batch if place[0] is one])
            return
        for (request, number), line in zip(batch, found, strict=True):
            request.found[number] = line
            if len(request.found) == len(request.lines):
                with suppress(InvalidStateError):  # it was given up
                    request.answer.set_result([line for _, line in sorted(request.found.items())])


def fail(request: Request, error: Exception) -> None:
    """Answer a request with an error, unless it was given up."""
    with suppress(InvalidStateError):
        request.answer.set_exception(error)
