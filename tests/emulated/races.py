"""Find in the emulated accelerator's journal what a real one would do at the same time: races between streams.

The rules are CUDA's. An operation runs on its device's current stream of the thread that asks for it, after all that
this stream was asked for before. Another stream's work comes before it only where an event says so: recorded on that
stream after the work, and waited for on this one. The host waits for what it reads, and what it asks for afterwards
comes after that on every stream. Freed memory is given out again on the stream on which it was allocated, so another
stream that used it must have been waited for by then, or be known to the allocator (`record_stream`).

Each stream has a clock that says how many operations of every stream are done before its next one (Lamport's vector
clocks, as in torch.cuda._sanitizer).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

Stream = tuple[int, int]
"""The device and the number of a stream; 0 is the device's default stream."""
Clock = dict[Stream, int]
Happened = tuple[str, int, int, int, str]
"""What, an address or the number of an event, device, stream, operation."""


class Use(NamedTuple):
    """One operation's use of some memory."""

    stream: Stream
    number: int
    """How many operations the stream was asked for by then."""
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} on stream {self.stream[1]} of device {self.stream[0]}"


class Memory:
    """What one allocation was used for."""

    def __init__(self, home: Stream | None) -> None:
        self.home = home
        """The stream on which it was allocated; None before the journal began."""
        self.written: Use | None = None
        self.reads: list[Use] = []
        self.kept: set[Stream] = set()
        """The streams for which the allocator waits before it gives the memory out again."""

    def uses(self) -> list[Use]:
        """Return the last writing, and what has read it since."""
        return [*self.reads, *([self.written] if self.written else [])]


class Judge:
    """Read a journal, entry by entry, and collect the races in words."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.clocks: dict[Stream, Clock] = defaultdict(lambda: dict(self.host))
        self.host: Clock = {}
        self.events: dict[int, Clock] = {}
        self.memory: dict[int, Memory] = {}

    def read(self, journal: Iterable[Happened]) -> list[str]:
        """Return all races so far, after these entries."""
        for what, which, device, number, operation in journal:
            stream = (device, number)
            if what in ("read", "write"):
                self._use(which, stream, operation, what == "write")
            elif what.startswith("wait for"):
                self._wait(what, which, stream)
            elif what == "record":
                self.events[which] = dict(self.clocks[stream])
            elif what == "block":
                _raise(self.clocks[stream], self.events.get(which, {}))
            elif what == "allocate":
                self.memory[which] = Memory(stream)
            elif what == "keep":
                self.memory.setdefault(which, Memory(None)).kept.add(stream)
            elif what == "free":
                self._free(self.memory.pop(which, Memory(None)))
        return self.races

    def _wait(self, what: str, event: int, stream: Stream) -> None:
        """Let the host wait, and with it all that it asks for afterwards."""
        waited = {
            "wait for event": [self.events.get(event, {})],
            "wait for stream": [self.clocks[stream]],
            "wait for device": [clock for other, clock in self.clocks.items() if other[0] == stream[0]],
        }[what]
        for clock in waited:
            for other in [self.host, *self.clocks.values()]:
                _raise(other, dict(clock))

    def _after(self, stream: Stream, use: Use) -> bool:
        """Return whether the stream's next operation comes after that use."""
        return use.stream == stream or self.clocks[stream].get(use.stream, 0) >= use.number

    def _use(self, address: int, stream: Stream, operation: str, writes: bool) -> None:
        memory = self.memory.setdefault(address, Memory(None))
        clock = self.clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1
        use = Use(stream, clock[stream], operation)
        before = memory.uses() if writes else [memory.written] * bool(memory.written)
        for other in before:
            if other is not None and not self._after(stream, other):
                verb = "writes" if writes else "reads"
                self.races.append(f"{use} {verb} what {other} uses, and neither waits for the other")
        if writes:
            memory.written = use
            memory.reads = []
        else:
            # Of a stream's readings the last one counts
            memory.reads = [each for each in memory.reads if each.stream != stream] + [use]

    def _free(self, memory: Memory) -> None:
        for use in memory.uses() if memory.home else []:
            if use.stream not in memory.kept and not self._after(memory.home, use):
                home = f"stream {memory.home[1]} of device {memory.home[0]}"
                self.races.append(f"{use} may still use memory that is freed, and given out again on {home}")


def _raise(clock: Clock, other: Clock) -> None:
    """Let a clock know what another knows."""
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)
