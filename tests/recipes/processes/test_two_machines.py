"""Two network namespaces with a cable between them stand for two machines: torchrun trains over both, then one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.translation.commands import main
from tests.recipes.processes.layouts import EXACT, assert_same_weights, records
from tests.recipes.processes.started import ended, wait_for_steps, workers_of
from tests.recipes.tiny import options

pytestmark = pytest.mark.launched

NAMES = (f"seqpar-a-{os.getpid()}", f"seqpar-b-{os.getpid()}")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
CHANGES = {**EXACT, "training.steps": 40, "training.validate_every": 10, "training.validate_bleu": 0}


def ip(*words: str) -> None:
    """Run iproute2; an error has what it said."""
    found = subprocess.run(["ip", *words], capture_output=True, text=True)
    if found.returncode:
        raise PermissionError(f"ip {' '.join(words)}: {found.stderr.strip()}")


@pytest.fixture
def two_machines() -> Iterator[None]:
    """The two namespaces; they see each other and nothing else."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (iproute2) to make network namespaces")
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", NAMES[0], "type", "veth", "peer", "name", "cable", "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield
    except PermissionError as error:
        pytest.skip(f"needs the right to make network namespaces: {error}")
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def on_machine(number: int, run: Path) -> subprocess.Popen[str]:
    """The command of docs/scaling.md, on one of the two; here no name resolves to the address, so it says who hosts."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    # torchrun waits for further machines this long once there are enough, where its own default is half a minute
    elastic = ["--nnodes", "1:2", "--max-restarts", "1", "--rdzv-conf"]
    elastic.append(f"is_host={number == 0},join_timeout=60,last_call_timeout=3")
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500", "--rdzv-id", "demo"]
    here = ["--local-addr", ADDRESSES[number]]
    recipe = ["-m", "recipes.translation", "train"]
    recipe += ["--folder" if word == "--run" else word for word in options(run, CHANGES)]
    return subprocess.Popen(
        ["ip", "netns", "exec", NAMES[number], *torchrun, *elastic, *meeting, *here, *recipe],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"},
    )


@pytest.mark.usefixtures("two_machines")
def test_two_machines_train_and_when_one_goes_away_the_other_goes_on_to_the_weights_of_one_process(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "two", tmp_path / "of the other machine"
    here, other = (on_machine(number, runs[number]) for number in (0, 1))
    wait_for_steps(runs[0], here, 15)
    (rank,) = workers_of(other, rank=0)
    for process in (other.pid, rank):
        os.kill(process, signal.SIGKILL)
    with other:
        said = ended(here)[1]
    assert here.returncode == 0, said
    assert said.count("2 processes (data 2), here cpu") == 1
    assert "resuming from step" in said
    # No file system is shared, and rank 0 writes for both: the other has its own store of the text, and nothing else
    assert [path.name for path in runs[1].iterdir()] == ["data"]
    assert main(["train", *options(tmp_path / "one", {**CHANGES, "training.devices": "cpu"})]) == 0
    assert_same_weights(runs[0], tmp_path / "one", 1e-10)
    for kind in ("loss", "valid_loss"):
        assert records(runs[0], kind) == pytest.approx(records(tmp_path / "one", kind), rel=1e-10)
