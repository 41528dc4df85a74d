"""Hold DDP and FSDP2 with CUDA tensors against one device: two ranks that share a GPU over gloo, and one over NCCL.

    python -m benchmarks.gpu.ranks
    python -m benchmarks.gpu.ranks --dry-run     # two ranks and one on the CPU, over gloo

The gradient of both ranks' sentences together, in float64, is to be that of all sentences on one device within 1e-12.
What a backend cannot do with CUDA tensors is said, and is no failure. Two GPUs, and NCCL between them, are not tried.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqpar
from benchmarks.gpu.figures import tell
from seqpar.distributed.collectives import whole_tensor

PAD = 0
VOCAB = 211
EXACT = 1e-12
SECONDS = 45
"""That the processes of one row may take."""


def made() -> seqpar.ModelWithLoss:
    """Return a small model with its loss, the same on every rank."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, 32), nn.Tanh())
    generator = nn.Linear(32, VOCAB)
    generator.weight = trunk[0].weight
    engine = seqpar.LossCompute(generator, seqpar.LabelSmoothing(0.1, "torch", ignore_index=PAD), chunk_tokens=7)
    return seqpar.ModelWithLoss(trunk, engine).double()


def sentences(world: int) -> list[Tensor]:
    """Return each rank's sentences, the later ones with more padding."""
    torch.manual_seed(1)
    batches = [torch.randint(1, VOCAB, (4, 11)) for _ in range(world)]
    for rank, tokens in enumerate(batches):
        tokens[:, 11 - 3 * rank :] = PAD
    return batches


def whole_gradients(world: int, device: torch.device) -> dict[str, Tensor]:
    """Return the gradients of all ranks' sentences, from the plain loss on one device."""
    both = made().to(device)
    trunk = both.model
    generator = both.loss.head["generator"]
    tokens = torch.cat(sentences(world)).to(device)
    logits = generator(trunk(tokens)).flatten(0, 1)
    nn.functional.cross_entropy(logits, tokens.flatten(), ignore_index=PAD, label_smoothing=0.1).backward()
    return {name: p.grad for name, p in both.named_parameters() if p.grad is not None}


def ddp(both: nn.Module, device: torch.device) -> nn.Module:
    """Return the model in DDP."""
    return DistributedDataParallel(both)


def fsdp2(both: nn.Module, device: torch.device) -> nn.Module:
    """Return the model under FSDP2."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    fully_shard(both.model[1], mesh=mesh)
    fully_shard(both, mesh=mesh)
    return both


WAYS: dict[str, Callable[[nn.Module, torch.device], nn.Module]] = {"FSDP2": fsdp2, "DDP": ddp}


def largest_error(way: str, device: torch.device) -> float:
    """Return the largest relative error of a gradient over all parameters."""
    rank, world = dist.get_rank(), dist.get_world_size()
    right = whole_gradients(world, device)
    model = WAYS[way](made().to(device), device)
    tokens = sentences(world)[rank].to(device)
    seqpar.accumulate_gradients(
        [tokens],
        lambda tokens: model(tokens, target=tokens),
        tokens_of=lambda tokens: (tokens != PAD).sum(),
        model=model,
        group=dist.group.WORLD,
    )
    errors = []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        gradient = whole_tensor(gradient)
        expected = right[name.removeprefix("module.")]
        errors.append(float((gradient - expected).norm() / expected.norm()))
    return max(errors)


def worker(way: str, backend: str, device: torch.device) -> None:
    """Be one rank: tell the error of a way, on rank 0."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(0)
    dist.init_process_group(backend)
    world = dist.get_world_size()
    try:
        error = largest_error(way, device)
        found: dict[str, object] = {"verdict": "pass" if error <= EXACT else "FAIL", "largest error": f"{error:.1e}"}
    except RuntimeError as raised:
        # Such as "gloo: reduce_scatter of CUDA tensors is not supported"
        words = str(raised).strip().splitlines()[0]
        offered = "support" not in words and "not implemented" not in words.lower()
        found = {"verdict": "FAIL" if offered else "not offered", "largest error": words[:100]}
    if dist.get_rank() == 0:
        tell(setting(way, backend, world), **found)
    dist.destroy_process_group()


def setting(way: str, backend: str, world: int) -> str:
    """Return in words what a row is about."""
    return f"{way}, {world} rank{'s' * (world > 1)} over {backend}"


def tell_world(way: str, backend: str, world: int, device: str) -> bool:
    """Tell the error of a way in a world, or how its processes ended; return whether they passed."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m", "--"]
    arguments = ["--worker", way, "--backend", backend, "--device", device]
    command = [sys.executable, *launch, "benchmarks.gpu.ranks", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    what = setting(way, backend, world)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        tell(what, **{"verdict": "FAIL", "largest error": f"no answer in {SECONDS} s"})
        return False
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    print("\n".join(found), flush=True)
    if done.returncode:
        # A rank's own words come before those of its launcher, whose last ones name a signal
        said = [line for line in done.stderr.splitlines() if re.search(r"Error: [^$]|what\(\)|Signal \d", line)]
        words = next(iter(said), "").strip()[:200]
        tell(what, **{"verdict": "FAIL", "largest error": words or str(done.returncode)})
        print(done.stderr, file=sys.stderr)
    return not done.returncode and '"FAIL"' not in "".join(found)


def main() -> int:
    """Tell each way in each world, what ended by a signal first, or be a rank; return 1 after a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, over gloo alone")
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.backend, torch.device(options.device))
        return 0
    worlds = [("gloo", 2), ("nccl", 1)]
    device = "cuda"
    if options.dry_run:
        worlds = [("gloo", 2), ("gloo", 1)]
        device = "cpu"
    passed = [tell_world(way, backend, world, device) for way in WAYS for backend, world in worlds]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
