"""The queue and its thread, with a model that says what it was given."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from starlette.exceptions import HTTPException

from recipes.translation.serve.batching import Batcher, Line, Wanted
from tests.recipes.serve.recorder import Recorder
from tests.recipes.serve.serving import batched, waiting


def texts(lines: Sequence[Line]) -> list[str]:
    return [line.translations[0].text for line in lines]


def test_a_batch_has_a_line_of_each_request_in_turn() -> None:
    async def clients(batcher: Batcher) -> None:
        long = await waiting(batcher, Wanted(0, 1), ["a1", "a2", "a3", "a4", "a5"])
        short = await waiting(batcher, Wanted(0, 1), ["b1"])
        model.gate.set()
        assert texts(await long) == ["A1", "A2", "A3", "A4", "A5"]
        assert texts(await short) == ["B1"]

    model = Recorder()
    batched(model, clients)
    assert model.batches == [["first"], ["a1", "b1", "a2", "a3"], ["a4", "a5"]]


def test_requests_of_another_model_or_of_other_wishes_share_no_batch_and_take_turns() -> None:
    async def clients(batcher: Batcher) -> None:
        answers = [await waiting(batcher, Wanted(0, 1), [f"a{number}" for number in range(6)])]
        answers.append(await waiting(batcher, Wanted(1, 1), ["b"]))
        answers.append(await waiting(batcher, Wanted(0, 2), ["c"]))
        model.gate.set()
        await asyncio.gather(*answers)

    model = Recorder()
    batched(model, clients)
    assert model.batches[1:] == [["a0", "a1", "a2", "a3"], ["b"], ["c"], ["a4", "a5"]]


def test_a_full_queue_refuses_and_has_room_again_afterwards() -> None:
    async def clients(batcher: Batcher) -> None:
        there = await waiting(batcher, Wanted(0, 1), ["a", "b"])
        with pytest.raises(HTTPException, match="2 lines are waiting, and 2 more would exceed 3"):
            await batcher.translate(Wanted(0, 1), ["c", "d"])
        model.gate.set()
        await there
        await batcher.translate(Wanted(0, 1), ["c", "d"])

    model = Recorder()
    batched(model, clients, most=3)


def test_what_a_client_gave_up_is_not_translated_and_leaves_its_room_to_others() -> None:
    async def clients(batcher: Batcher) -> None:
        given_up = await waiting(batcher, Wanted(0, 1), ["gone"])
        kept = await waiting(batcher, Wanted(0, 1), ["kept"])
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        more = await waiting(batcher, Wanted(0, 1), ["more"])
        model.gate.set()
        await kept
        await more

    model = Recorder()
    batched(model, clients, most=2)
    assert model.batches == [["first"], ["kept", "more"]]


@pytest.mark.parametrize("line", ["gone", "poison"])
def test_another_client_gets_its_answer_where_one_gives_up_while_both_are_translated(line: str) -> None:
    class Leaving(Recorder):
        def translate(self, lines: Sequence[str], n_best: int, links: bool) -> list[Line]:
            if line in lines:
                given_up[0].get_loop().call_soon_threadsafe(given_up[0].cancel)
            return super().translate(lines, n_best, links)

    async def clients(batcher: Batcher) -> None:
        given_up.append(await waiting(batcher, Wanted(0, 1), [line]))
        kept = await waiting(batcher, Wanted(0, 1), ["kept"])
        model.gate.set()
        assert texts(await kept) == ["KEPT"]
        assert given_up[0].cancelled()

    given_up: list[asyncio.Task[list[Line]]] = []
    model = Leaving()
    batched(model, clients)


def test_the_other_lines_are_translated_beside_one_that_is_too_long() -> None:
    async def clients(batcher: Batcher) -> None:
        some = await waiting(batcher, Wanted(0, 1), ["a", "long", "b", "long"])
        none = await waiting(batcher, Wanted(0, 1), ["long"])
        model.gate.set()
        assert [line.refused for line in await some] == ["", "is too long", "", "is too long"]
        assert texts((await some)[::2]) == ["A", "B"]
        assert [line.refused for line in await none] == ["is too long"]

    model = Recorder()
    batched(model, clients)


def test_an_error_in_a_batch_fails_the_request_that_causes_it_alone(capsys: pytest.CaptureFixture[str]) -> None:
    async def clients(batcher: Batcher) -> None:
        bad = await waiting(batcher, Wanted(0, 1), ["poison"])
        good = await waiting(batcher, Wanted(0, 1), ["good"])
        model.gate.set()
        assert texts(await good) == ["GOOD"]
        with pytest.raises(RuntimeError, match="poison"):
            await bad
        assert texts(await batcher.translate(Wanted(0, 1), ["next"])) == ["NEXT"]

    model = Recorder()
    batched(model, clients)


def test_nothing_to_translate_is_answered_at_once() -> None:
    async def clients(batcher: Batcher) -> None:
        start = time.monotonic()
        assert await batcher.translate(Wanted(0, 1), []) == []
        assert time.monotonic() - start < 10

    batched(Recorder(), clients)
