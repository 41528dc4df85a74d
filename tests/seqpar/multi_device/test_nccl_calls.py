"""Distinct CUDA devices go through torch's own NCCL-backed calls. A mock, since it stands where no two GPUs are:
fake tensors that say they lie on GPUs, and stand-ins that record what torch's calls are asked. test_gpu.py runs the
real ones on a machine with two."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar.multi_device import replicas

GPUS = [torch.device("cuda", i) for i in range(4)]


@pytest.fixture
def asked(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("stands in for GPUs where there are none; test_gpu.py asks NCCL on a machine with two")
    calls = []

    class Broadcast:
        @staticmethod
        def apply(ids, *parameters):
            calls.append(("broadcast", ids, len(parameters)))
            return tuple(torch.empty(p.shape, device=f"cuda:{i}") for i in ids for p in parameters)

    class Scatter:
        @staticmethod
        def apply(ids, sizes, dim, tensor):
            calls.append(("scatter", ids, sizes, dim))
            return tuple(torch.empty(n, *tensor.shape[1:], device=f"cuda:{i}") for i, n in zip(ids, sizes, strict=True))

    class Gather:
        @staticmethod
        def apply(device, dim, *tensors):
            calls.append(("gather", device, dim, len(tensors)))
            return torch.empty(sum(map(len, tensors)), device=f"cuda:{device}")

    for stand_in in (Broadcast, Scatter, Gather):
        monkeypatch.setattr(replicas, stand_in.__name__, stand_in)
    monkeypatch.setattr(replicas, "check_devices", lambda devices, *_: tuple(torch.device(d) for d in devices))
    with FakeTensorMode(), torch.no_grad():
        yield calls


def test_scatter_cuts_evenly_where_torch_would_leave_a_device_idle(asked):
    shards = seqpar.scatter(torch.empty(6, 3, device="cuda:0"), GPUS)
    assert asked == [("scatter", [0, 1, 2, 3], [2, 2, 1, 1], 0)]
    assert [str(s.device) for s in shards] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_a_batch_smaller_than_the_list_uses_the_first_devices(asked):
    seqpar.scatter(torch.empty(2, 3, device="cuda:0"), GPUS)
    assert asked == [("scatter", [0, 1], [1, 1], 0)]


def test_a_copy_to_the_cpu_is_waited_for_and_one_to_a_gpu_is_not(asked):
    seen = {}

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default:
                seen[str(kwargs["device"])] = kwargs.get("non_blocking", False)
            return function(*args, **(kwargs or {}))

    with Copies():
        seqpar.scatter(torch.empty(6, 3, device="cuda:1"), [torch.device("cpu"), GPUS[0], torch.device("cpu")])
    assert seen == {"cpu": False, "cuda:0": True}


def on_gpu(layer):
    for name, parameter in layer.named_parameters():
        setattr(layer, name, nn.Parameter(torch.empty(parameter.shape, device="cuda:0")))
    return layer


def test_replicate_broadcasts_once_and_gives_each_replica_its_own_devices_tensors(asked):
    made = seqpar.replicate(on_gpu(nn.Linear(2, 3)), GPUS[:2])
    assert asked == [("broadcast", [0, 1], 2)]
    assert [{str(p.device) for p in m.parameters()} for m in made] == [{"cuda:0"}, {"cuda:1"}]
    assert [tuple(m.weight.shape) for m in made] == [(3, 2), (3, 2)]


def test_a_repeated_device_is_sent_to_once_and_aliased(asked):
    made = seqpar.replicate(on_gpu(nn.Linear(2, 3)), [GPUS[0], GPUS[1], GPUS[0]])
    assert asked == [("broadcast", [0, 1], 2)]
    assert [str(m.weight.device) for m in made] == ["cuda:0", "cuda:1", "cuda:0"]


def test_gather_joins_on_the_output_device(asked):
    out = seqpar.gather([torch.empty(2, device="cuda:0"), torch.empty(1, device="cuda:1")], GPUS[1])
    assert asked == [("gather", 1, 0, 2)]
    assert str(out.device) == "cuda:1"
