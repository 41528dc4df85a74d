"""Training on accelerators is training on the CPU; `SEQPAR_TEST_DEVICE=emulated` runs this without a GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from recipes.translation.data.corpus import load_corpus
from recipes.translation.processes.ranks import ALONE
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.train import train
from recipes.translation.training.beginning import first_model
from recipes.translation.training.layout import Layout
from recipes.translation.training.machine import devices_of
from recipes.translation.training.progress import read_step
from tests.recipes.tiny import tiny, tiny_decoder_only

pytestmark = pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two GPUs")
STEPS = {"training.steps": 4, "training.validate_every": 2, "training.validate_bleu": 4, "model.dropout": 0.0}


def on(devices: list[int]) -> str:
    """The setting for these accelerators."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return f"[{', '.join(f'{kind.type}:{index}' for index in devices)}]"


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    """Keep a moved parameter the same object, ties included, and select the device of before in the end."""
    before = torch.accelerator.current_device_index()
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(swapped)
    torch.accelerator.set_device_index(before)


def trained(make: Any, run: Path, **changes: Any) -> list[dict[str, Any]]:
    train(make(run, STEPS | changes))
    return read_metrics(run / "metrics.jsonl")


@pytest.fixture(scope="module", params=[tiny, tiny_decoder_only])
def on_cpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """A kind of model, and what its training on the CPU records."""
    cpu = "[cpu]"
    if os.environ.get("SEQPAR_TEST_DEVICE"):  # under the switch, a CPU in a list stands for an accelerator
        cpu = "auto"
    run = tmp_path_factory.mktemp("cpu") / "run"
    return request.param, trained(request.param, run, **{"training.devices": cpu})


@pytest.mark.parametrize("devices", [[0], [1, 1, 0]])
def test_losses_gradients_and_translations_are_those_of_the_cpu(
    on_cpu: tuple[Any, list[Any]], devices: list[int], tmp_path: Path
) -> None:
    make, expected = on_cpu
    found = trained(make, tmp_path / "run", **{"training.devices": on(devices)})
    assert len(found) == len(expected) == 6
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        compared = {"loss", "gradient_norm", "valid_loss", "valid_bleu", "valid_chrf"} & theirs.keys()
        assert compared
        for name in compared:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)


def test_the_first_device_is_the_current_one_since_fsdp_and_nccl_ask_for_it(tmp_path: Path) -> None:
    torch.accelerator.set_device_index(0)
    trained(tiny, tmp_path / "run", **{"training.devices": on([1, 0])})
    assert torch.accelerator.current_device_index() == 1


@pytest.mark.parametrize("indices", [[0], [0, 1]], ids=len)
def test_a_run_of_accelerators_is_resumed_there(indices: list[int], tmp_path: Path) -> None:
    devices = {"training.devices": on(indices)}
    whole = trained(tiny, tmp_path / "whole", **devices)
    trained(tiny, tmp_path / "parts", **devices, **{"training.steps": 2})
    parts = trained(tiny, tmp_path / "parts", **devices)
    losses, expected = ([record["loss"] for record in run if "loss" in record] for run in (parts, whole))
    # The first of two devices to have its part of a gradient ready adds it first, to those of tied weights
    assert losses == (expected if len(indices) == 1 else pytest.approx(expected, rel=1e-5))


def test_weights_are_sent_before_the_model_computes_with_a_teacher_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(owner: Any, method: str) -> None:
        call = getattr(owner, method)

        def run(*given: Any, **named: Any) -> Any:
            order.append(method)
            return call(*given, **named)

        monkeypatch.setattr(owner, method, run)

    noted(seqpar.LossCompute, "prefetch")
    noted(seqpar.DataParallel, "forward")
    one_step = {"training.devices": on([0, 1]), "training.steps": 1}
    trained(tiny, tmp_path / "run", **one_step)
    trained(tiny, tmp_path / "student", **one_step, **{"training.teacher": str(tmp_path / "run")})
    assert order == ["prefetch", "forward"] * (len(order) // 2)
    assert len(order) >= 4


class Reads(TorchDispatchMode):
    """The operations whose result the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        waits = name in ("_local_scalar_dense", "nonzero", "equal", "masked_select")
        copies = name == "_to_copy" and (kwargs or {}).get("device") == torch.device("cpu")
        if (waits or copies) and args[0].device.type != "cpu":
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def test_the_host_waits_four_times_in_a_step(tmp_path: Path) -> None:
    """The range of the targets, which of them count, the tokens; at the end loss, tokens and norm together.

    None for a chunk or a layer. Where Triton counts the targets, the first two are one.
    """
    config = tiny(tmp_path / "run", STEPS | {"training.devices": on([0]), "training.chunk_tokens": 8})
    corpus = load_corpus(config)
    devices = devices_of(config.training, ALONE)
    model, weights = first_model(config, corpus, None, ALONE)
    layout = Layout(model, weights, config.training, config.layout, devices, ALONE)
    batch = corpus.train.batch(corpus.train.epoch(0)[0])

    def step() -> None:
        loss = seqpar.accumulate_gradients([batch], layout.loss_of, layout.tokens_of, model=layout.reducer)
        assert all(map(math.isfinite, read_step(loss, layout.clip(1.0))))

    step()  # the first call looks at some logits
    with Reads() as reads:
        step()
    assert sorted(reads.names) == ["_local_scalar_dense", "_local_scalar_dense", "_to_copy", "nonzero"]
