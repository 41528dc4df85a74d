"""What the threads of several accelerators inherit; `SEQPAR_TEST_DEVICE=emulated` runs this without a GPU."""

import pytest
import torch

import seqpar
from seqpar.multi_device.devices import available

pytestmark = pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two GPUs")


def selected() -> tuple[int, list[int]]:
    """This thread's current device, and its stream on each device."""
    count = torch.accelerator.device_count()
    return torch.accelerator.current_device_index(), [
        torch.accelerator.current_stream(i).stream_id for i in range(count)
    ]


def seen(_: torch.Tensor) -> tuple[int, list[int]]:
    return selected()


@pytest.mark.parametrize("current", [0, 1])
def test_a_thread_has_the_callers_streams_and_its_own_device(current):
    first, second = available()[:2]
    inputs = [torch.ones(1).to(first), torch.ones(1).to(second), torch.ones(1).cpu()]
    before = torch.accelerator.current_device_index()
    streams = [torch.accelerator.current_stream(device.index) for device in (first, second)]
    side = torch.Stream(device=second)
    try:
        torch.accelerator.set_stream(side)
        torch.accelerator.set_device_index(current)
        _, expected = selected()
        found = seqpar.parallel_apply([seen] * 3, inputs)
        assert selected() == (current, expected)
    finally:
        for stream in streams:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(before)
    assert expected[second.index] == side.stream_id != streams[1].stream_id
    assert found == [(first.index, expected), (second.index, expected), (current, expected)]
