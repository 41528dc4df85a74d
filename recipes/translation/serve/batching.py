"""The models of a service, a queue of requests, and a thread that translates lines of several requests together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from starlette.exceptions import HTTPException

from recipes.translation.translating.alignments import Link
from recipes.translation.translating.translate import Translation


class Line(NamedTuple):
    """The translations of one line, best first, and the links between words of the line and of the best translation."""

    translations: list[Translation]
    links: list[Link]
    refused: str = ""
    """Why the line was not translated."""


class Model(NamedTuple):
    """A model that translates between two languages."""

    name: str
    """The folder that was given for it."""
    engine: str
    source: str
    """The language that it translates from."""
    target: str
    """The language that it translates to."""
    beam: int
    """The most translations a line can have."""
    batch_sentences: int
    """Number of lines that are translated at a time."""
    aligns: bool
    """Whether it can link words, for which its run must exist, not only an export."""
    translate: Callable[[Sequence[str], int, bool], list[Line]]
    """Takes lines, the number of translations wanted of each, and whether to link words with the best translation's."""


class Wanted(NamedTuple):
    """What a request wants; requests that want the same are translated together."""

    model: int
    """The number of the model, from 0."""
    n_best: int
    links: bool = False


@dataclass(eq=False)
class Request:
    """Lines to translate, and the translations found so far."""

    wanted: Wanted
    lines: Sequence[str]
    answer: asyncio.Future[list[Line]]
    begun: int = 0
    """Number of lines that batches have taken."""
    found: dict[int, Line] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Return the number of lines that no batch has taken; a request that was given up has none."""
        if self.answer.done():
            return 0
        return len(self.lines) - self.begun


Place = tuple[Request, int]
"""A line: its request, and its number in it."""


class Batcher:
    """Translates the lines of many requests in batches, one after another, in a thread next to the event loop.

    A batch has lines from requests that want the same from the same model, one from each in turn, so that a short
    request need not wait for all of a long one. Cancelling `translate` drops its lines that no batch has taken.
    """

    def __init__(self, models: Sequence[Model], most: int) -> None:
        """Let at most `most` lines wait."""
        self.models = models
        self.most = most
        self._requests: list[Request] = []
        self._thread = ThreadPoolExecutor(1, "translation")
        self._work: asyncio.Task[None] | None = None

    async def translate(self, wanted: Wanted, lines: Sequence[str]) -> list[Line]:
        """Put lines into the queue, and return their translations; raise HTTPException if too many would wait."""
        if not lines:
            return []
        waiting = sum(request.waiting for request in self._requests)
        if waiting + len(lines) > self.most:
            message = f"{waiting:,} lines are waiting, and {len(lines):,} more would exceed {self.most:,}"
            raise HTTPException(503, f"{message}: try again in a moment", {"Retry-After": "1"})
        request = Request(wanted, lines, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._translate_all())
        return await request.answer

    async def _translate_all(self) -> None:
        """Translate batch after batch, until no line waits."""
        while batch := self._take():
            await self._translate(batch)

    def _take(self) -> list[Place]:
        """Take lines from the first request and all that want the same, one from each in turn; none if none wait."""
        self._requests = [request for request in self._requests if request.waiting]
        if not self._requests:
            return []
        wanted = self._requests[0].wanted
        size = self.models[wanted.model].batch_sentences
        same = [request for request in self._requests if request.wanted == wanted]
        batch: list[Place] = []
        while same and len(batch) < size:
            for request in same[: size - len(batch)]:
                batch.append((request, request.begun))
                request.begun += 1
            same = [request for request in same if request.waiting]
        # Requests that have had a turn go to the end, so that the next batch is for others
        had = {id(request) for request, _ in batch}
        self._requests.sort(key=lambda request: id(request) in had)
        return batch

    async def _translate(self, batch: Sequence[Place]) -> None:
        """Translate a batch; if that fails, translate its requests one by one, so that only the faulty one fails."""
        (model, n_best, links) = batch[0][0].wanted
        lines = [request.lines[number] for request, number in batch]
        translate = self.models[model].translate
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, translate, lines, n_best, links)
        except Exception as error:
            requests = list(dict.fromkeys(request for request, _ in batch))
            if len(requests) > 1:
                for one in requests:
                    await self._translate([place for place in batch if place[0] is one])
            elif not requests[0].answer.done():
                logging.getLogger(__name__).error("a translation failed", exc_info=error)
                requests[0].answer.set_exception(error)
            return
        for (request, number), line in zip(batch, found, strict=True):
            request.found[number] = line
            if len(request.found) == len(request.lines) and not request.answer.done():  # it is if it was given up
                request.answer.set_result([line for _, line in sorted(request.found.items())])
