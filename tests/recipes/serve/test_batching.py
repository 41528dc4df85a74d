"""The queue and its thread, with a model that says what it was given."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from recipes.translation.serve.batching import Batcher, NotAcceptedError, Wanted
from recipes.translation.serve.models import Line
from tests.recipes.serve.recorder import Recorder
from tests.recipes.serve.serving import batching


def texts(lines: Sequence[Line]) -> list[str]:
    return [line.translations[0].text for line in lines]


def test_a_batch_has_a_line_of_each_request_in_turn() -> None:
    model = Recorder()
    with batching(model) as batcher:
        long = batcher.submit(Wanted(0, 1), ["a1", "a2", "a3", "a4", "a5"])
        short = batcher.submit(Wanted(0, 1), ["b1"])
        model.gate.set()
        assert texts(long.result(20)) == ["A1", "A2", "A3", "A4", "A5"]
        assert texts(short.result(20)) == ["B1"]
    assert model.batches == [["first"], ["a1", "b1", "a2", "a3"], ["a4", "a5"]]


def test_requests_of_another_model_or_of_other_wishes_share_no_batch_and_take_turns() -> None:
    model = Recorder()
    with batching(model) as batcher:
        answers = [batcher.submit(Wanted(0, 1), [f"a{number}" for number in range(6)])]
        answers.append(batcher.submit(Wanted(1, 1), ["b"]))
        answers.append(batcher.submit(Wanted(0, 2), ["c"]))
        model.gate.set()
        for answer in answers:
            answer.result(20)
    assert model.batches[1:] == [["a0", "a1", "a2", "a3"], ["b"], ["c"], ["a4", "a5"]]


def test_a_full_queue_refuses_and_has_room_again_afterwards() -> None:
    model = Recorder()
    with batching(model, most=3) as batcher:
        waiting = batcher.submit(Wanted(0, 1), ["a", "b"])
        with pytest.raises(NotAcceptedError, match="2 lines are waiting, and 2 more would be above 3"):
            batcher.submit(Wanted(0, 1), ["c", "d"])
        model.gate.set()
        waiting.result(20)
        batcher.submit(Wanted(0, 1), ["c", "d"]).result(20)


def test_what_a_client_gave_up_is_not_translated() -> None:
    model = Recorder()
    with batching(model) as batcher:
        given_up = batcher.submit(Wanted(0, 1), ["gone"])
        kept = batcher.submit(Wanted(0, 1), ["kept"])
        assert given_up.cancel()
        model.gate.set()
        kept.result(20)
    assert model.batches == [["first"], ["kept"]]


def test_the_other_lines_are_translated_beside_one_that_is_too_long() -> None:
    model = Recorder()
    with batching(model) as batcher:
        some = batcher.submit(Wanted(0, 1), ["a", "long", "b", "long"])
        none = batcher.submit(Wanted(0, 1), ["long"])
        model.gate.set()
        assert [line.refused for line in some.result(20)] == ["", "is too long", "", "is too long"]
        assert texts(some.result(20)[::2]) == ["A", "B"]
        assert [line.refused for line in none.result(20)] == ["is too long"]


def test_an_error_in_a_batch_fails_the_request_that_causes_it_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model = Recorder()
    with batching(model) as batcher:
        bad = batcher.submit(Wanted(0, 1), ["poison"])
        good = batcher.submit(Wanted(0, 1), ["good"])
        model.gate.set()
        assert texts(good.result(20)) == ["GOOD"]
        with pytest.raises(RuntimeError, match="poison"):
            bad.result(20)
        assert batcher.alive
    assert "RuntimeError: poison" in capsys.readouterr().err


def test_closing_drops_what_waits_and_refuses_more() -> None:
    model = Recorder()
    with batching(model) as batcher:
        waiting = batcher.submit(Wanted(0, 1), ["a"])
        threading.Timer(0.05, model.gate.set).start()
        batcher.close(20)
        assert not batcher.alive
        with pytest.raises(NotAcceptedError, match="the service is stopping"):
            waiting.result(20)
        with pytest.raises(NotAcceptedError, match="the service is stopping"):
            batcher.submit(Wanted(0, 1), ["b"])
    assert model.batches == [["first"]]


class Watched(Batcher):
    """One whose queue is counted and changed only by a thread that has the lock: `notify` is an error without it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("_requests", "_stopped") and hasattr(self, "_changed"):
            self._changed.notify(0)
        super().__setattr__(name, value)

    def _waiting(self) -> int:
        self._changed.notify(0)
        return super()._waiting()


def test_a_thread_has_the_lock_where_it_counts_or_changes_what_waits() -> None:
    model = Recorder()
    models: Any = [model]
    model.gate.set()
    batcher = Watched(models, most=100)
    assert texts(batcher.submit(Wanted(0, 1), ["a"]).result(20)) == ["A"]
    batcher.close(20)
    assert not batcher.alive


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_ended_because_it_could_not_say_what_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_: BaseException) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("traceback.print_exception", full)
    model = Recorder()
    models: Any = [model]
    batcher = Batcher(models, most=100)
    waiting = batcher.submit(Wanted(0, 1), ["poison"])
    model.gate.set()
    with pytest.raises(NotAcceptedError, match="the service is stopping"):
        waiting.result(20)
    with pytest.raises(NotAcceptedError, match="the service is stopping"):
        batcher.submit(Wanted(0, 1), ["b"])
    batcher.close(20)


def test_nothing_to_translate_is_answered_at_once() -> None:
    model = Recorder()
    with batching(model) as batcher:
        start = time.monotonic()
        assert batcher.submit(Wanted(0, 1), []).result(20) == []
        assert time.monotonic() - start < 10
