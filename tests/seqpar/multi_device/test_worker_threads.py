"""What the threads of several accelerators inherit; `SEQPAR_TEST_DEVICE=emulated` runs this without a GPU."""

import time
from unittest.mock import patch

import pytest
import torch

import seqpar
import seqpar.multi_device.devices as devices
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


def test_a_step_over_three_devices_has_the_same_bits_whichever_is_done_first():
    """Autograd runs a thread for each device, whose gradients are added in one order."""
    first, second = available()[:2]
    torch.manual_seed(0)
    trunk = torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.Linear(64, 64), torch.nn.Tanh()).to(first)
    tokens = torch.randint(50, (63, 33)).to(first)
    seen = set()
    # Under the switch another accelerator would stand for the CPU, and two gradients have one sum in either order
    with patch.object(devices, "_check_one", lambda device, _: torch.device(device)):
        model = seqpar.DataParallel(trunk, [first, "cpu", second], gather_outputs=False)
        for slow in range(3):
            outputs = model(tokens)
            outputs[slow].register_hook(lambda _: time.sleep(0.1))
            total = sum(output.square().sum().to(first) for output in outputs)
            gradients = torch.autograd.grad(total, list(trunk.parameters()))
            seen.add(tuple(g.cpu().numpy().tobytes() for g in gradients))
    assert len(seen) == 1
