"""Streams of two emulated accelerators: nothing is used on one before it is written on another; planted races are seen.

Every other test under `SEQPAR_TEST_DEVICE=emulated` fails if streams race, too (`tests/conftest.py`).
"""

from unittest.mock import patch

import pytest
import torch

import seqpar
from seqpar.core.device_facts import current_streams, is_capturing, select_streams
from tests import emulated
from tests.emulated.races import Judge

pytestmark = pytest.mark.skipif(
    torch._C._get_privateuse1_backend_name() != emulated.NAME, reason="needs the emulated accelerators"
)
TWO = [torch.device("privateuseone", i) for i in range(2)]


def races():
    """What raced since the last call."""
    return Judge().read(emulated.take_journal())


def side_streams(which):
    """Streams of the caller's on these devices, which wait for what was done so far."""
    streams = [torch.Stream(device=TWO[i]) for i in which]
    for stream in streams:
        stream.wait_stream(torch.accelerator.current_stream(stream.device.index))
    return streams


class Own(torch.nn.Linear):
    """Without a closed form that the engine knows."""

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden, self.weight, self.bias)


def whole_step(gather, prefetch=False):
    trunk = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16), torch.nn.Tanh()).to(TWO[0])
    generator = torch.nn.Linear(16, 50).to(TWO[0])
    model = seqpar.DataParallel(trunk, TWO, gather_outputs=gather)
    engine = seqpar.LossCompute(generator, seqpar.LabelSmoothing(0.1, "torch"), TWO, chunk_tokens=8)
    optimizer = torch.optim.SGD([*trunk.parameters(), *generator.parameters()], 0.1)

    def run():
        if prefetch:
            engine.prefetch()
        loss = engine(model(torch.randint(50, (6, 9))), torch.randint(50, (6, 9)))
        (loss.total / loss.tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def of_engine(call, generator=torch.nn.Linear, home=0):
    engine = seqpar.LossCompute(generator(16, 50).to(TWO[home]), seqpar.CrossEntropy(), TWO, chunk_tokens=8)
    hidden = torch.randn(30, 16).requires_grad_()
    target = torch.randint(50, (30,))
    return lambda: call(engine, hidden, target).backward()


def of_2018():
    generator = torch.nn.Linear(16, 50).to(TWO[0])
    compute = seqpar.MultiGPULossCompute(
        generator, seqpar.CrossEntropy(), TWO, torch.optim.SGD(generator.parameters(), 0.1)
    )
    hidden = torch.randn(4, 12, 16).requires_grad_()
    return lambda: compute(hidden, torch.randint(50, (4, 12)), 48)


def placed():
    model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 50))
    seqpar.place(model, {"": TWO[0], "1": TWO[1]})
    return lambda: model(torch.randint(50, (6, 9))).square().sum().backward()


def scores_of(engine, hidden, target):
    scores = engine.token_scores(hidden, target, entropy=True)
    return scores.log_prob.sum() + scores.entropy.sum()


STEPS = {
    "a whole step": lambda: whole_step(gather=False),
    "a whole step, outputs gathered": lambda: whole_step(gather=True),
    "a whole step, weights sent before": lambda: whole_step(gather=False, prefetch=True),
    "the loss by formula": lambda: of_engine(lambda engine, *batch: engine(*batch).total),
    "the loss by autograd": lambda: of_engine(lambda engine, *batch: engine(*batch).total, generator=Own),
    "the generator on the second device": lambda: of_engine(lambda engine, *batch: engine(*batch).total, home=1),
    "scores": lambda: of_engine(scores_of),
    "a loss of scores": lambda: of_engine(lambda e, h, t: e.scored_loss(h, t, lambda s: -s.log_prob).total),
    "the loss of 2018": of_2018,
    "placed layers": placed,
}


# torch's word about a parameter on another device than the loss, once in a process
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("which", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_two_steps_race_on_no_stream_of_the_callers(step, which):
    run = STEPS[step]()
    streams = side_streams(which)
    before = current_streams(TWO)
    with select_streams(streams):
        run()
        run()
    assert current_streams(TWO) == before
    assert torch.accelerator.current_device_index() == 0
    for stream in streams:
        torch.accelerator.current_stream(stream.device.index).wait_stream(stream)
    journal = emulated.take_journal()
    used = {entry[2:4] for entry in journal if entry[0] in ("read", "write")}
    assert {(stream.device.index, stream.stream_id) for stream in streams} <= used
    assert Judge().read(journal) == []


def test_a_side_stream_that_waits_for_nothing_is_found():
    x = torch.zeros(4, device=TWO[0])
    with select_streams([torch.Stream(device=TWO[0])]):
        x.mul_(5)
    torch.accelerator.synchronize(0)
    found = races()
    assert len(found) == 2
    assert "aten::mul on stream" in found[0]
    assert "aten::zero_ on stream 0 of device 0" in found[0]


def test_one_that_waits_is_not():
    x = torch.zeros(4, device=TWO[0])
    with select_streams(side_streams([0])):
        x.mul_(5)
        done = torch.accelerator.current_stream(0).record_event()
    torch.accelerator.current_stream(0).wait_event(done)
    x.add_(1)
    assert races() == []


def test_a_number_that_is_read_waits_for_its_own_stream_alone():
    x, y = torch.ones(4, device=TWO[0]), torch.ones(4, device=TWO[0])
    streams = side_streams([0, 0])
    with select_streams(streams[:1]):
        x.mul_(2)
        float(x[0])
    with select_streams(streams[1:]):
        y.mul_(2)
    x.mul_(2)
    journal = emulated.take_journal()
    assert Judge().read(journal) == []
    y.mul_(2)
    assert len(Judge().read([*journal, *emulated.take_journal()])) == 2


def test_memory_that_is_freed_while_another_stream_uses_it_is_found_unless_the_allocator_knows():
    def use(keep):
        x = torch.zeros(4, device=TWO[0])
        (stream,) = side_streams([0])
        with select_streams([stream]):
            x + 1
        if keep:
            x.record_stream(stream)

    use(keep=True)
    assert races() == []
    use(keep=False)
    (found,) = races()
    assert found.endswith("may still use memory that is freed, and given out again on stream 0 of device 0")


def test_threads_that_keep_their_default_streams_are_found():
    run = whole_step(gather=False)
    streams = side_streams([0, 1])
    with select_streams(streams), patch("seqpar.multi_device.parallel_apply.current_streams", lambda devices: []):
        run()
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    assert any(race.startswith("aten::addmm on stream 0 of device 1 reads what") for race in races())


def test_a_copy_of_weights_on_a_stream_that_does_not_wait_for_the_optimizer_is_found():
    weight = torch.ones(4, device=TWO[0])
    (stream,) = side_streams([0])
    weight.add_(1)
    with select_streams([stream]):
        weight.to(TWO[1])
    torch.accelerator.synchronize(0)
    assert "copy_ on stream" in races()[0]


@pytest.fixture
def capturing():
    """Say that a graph is captured on the second device."""
    emulated.CAPTURING.add(1)
    yield
    emulated.CAPTURING.clear()


def test_whether_a_graph_is_captured_is_asked_of_the_device_that_is_given(capturing):
    assert [is_capturing(device) for device in [*TWO, torch.device("cpu")]] == [False, True, False]
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.parametrize("call", ["scattered", "whole", "trunk"])
def test_capture_over_two_devices_is_refused_in_one_line(call, capturing):
    engine = seqpar.LossCompute(torch.nn.Linear(4, 7).to(TWO[0]), seqpar.CrossEntropy(), TWO)
    hidden, target = torch.randn(6, 4), torch.randint(7, (6,))
    calls = {
        "scattered": lambda: engine([hidden.to(device) for device in TWO], target.repeat(2)),
        "whole": lambda: engine(hidden, target),
        "trunk": lambda: seqpar.DataParallel(torch.nn.Linear(4, 7).to(TWO[0]), TWO)(hidden),
    }
    with pytest.raises(RuntimeError, match=r"captured.*2 devices \(emulated:0, emulated:1\).*\['emulated:0'\]") as told:
        calls[call]()
    assert "\n" not in str(told.value)
