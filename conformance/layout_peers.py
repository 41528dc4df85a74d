"""Train one step over several ranks with other projects' losses, as their documentation describes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from conformance.adapter import Package, why_missing, why_no_nemo_rl
from conformance.layout_adapter import EVERY_LAYOUT, ROWS, LayoutAdapter, Work
from conformance.layout_adapters import (
    Both,
    Loss,
    accumulated,
    as_dtensor,
    counted,
    fsdp,
    loss_parallel_step,
    run_micro_batches,
    seqpar_step,
    torch_loss,
    torch_step,
    train,
    wrapped,
)
from seqpar.distributed.collectives import copy_to_group, group_sum, rank_in, world_size

deepspeed = Package("deepspeed")
liger_modules = Package("liger_kernel.transformers")
megatron_state = Package("megatron.core.parallel_state")
megatron_tensors = Package("megatron.core.tensor_parallel")
nemo = Package("nemo_rl.distributed.model_utils")
titan = Package("torchtitan.components.loss")
titan_backend = Package("torchtitan.distributed.utils")
trl = Package("trl.trainer.utils")
verl_algorithms = Package("verl.trainer.ppo.core_algos")
verl_logits = Package("verl.utils.torch_functional")
verl_megatron = Package("verl.utils.megatron.tensor_parallel")
verl_sequence = Package("verl.utils.ulysses")

Step = Callable[[Work], Any]


def over_vocabulary(loss: Callable[..., Any]) -> Step:
    """Return the step with a loss over a split vocabulary, under DDP if there are data ranks."""

    @wraps(loss)
    def step(work: Work) -> Tensor:
        return train(work, loss)

    return step


def by_megatron(losses: Callable[..., Any]) -> Step:
    """Return the step with per-token losses of logits that are split as in Megatron's linear layers."""

    @wraps(losses)
    def loss(work: Work, hidden: Tensor, target: Tensor) -> Any:
        ranks = world_size(work.vocab_group)
        is_ready = megatron_state.model_parallel_is_initialized()
        if is_ready and megatron_state.get_tensor_model_parallel_world_size() != ranks:
            megatron_state.destroy_model_parallel()
        if not megatron_state.model_parallel_is_initialized():
            megatron_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        given = megatron_tensors.copy_to_tensor_model_parallel_region(hidden)
        kept = target != work.ignore_index
        return (losses(work, F.linear(given, work.model.head.weight), target.where(kept, 0)) * kept).sum()

    return over_vocabulary(loss)


def megatron(work: Work, logits: Tensor, target: Tensor) -> Any:
    """`vocab_parallel_cross_entropy`, after `copy_to_tensor_model_parallel_region` as in its linear layers, computed in
    float32; of vocabularies divisible by the number of ranks.
    """
    # It gives the other classes eps / (V - 1); torch gives every class eps / V
    eps = work.label_smoothing * (work.vocab_size - 1) / work.vocab_size
    return megatron_tensors.vocab_parallel_cross_entropy(logits, target, eps)


def verl_vocabulary(work: Work, logits: Tensor, target: Tensor) -> Any:
    """verl's `vocab_parallel_log_probs_from_logits`, of the logits of its Megatron engine."""
    return -verl_megatron.vocab_parallel_log_probs_from_logits(logits, target)


def verl_loss(work: Work, hidden: Tensor, target: Tensor, count: int) -> Any:
    """Return verl's `agg_loss` of `logprobs_from_logits`, with a split sequence gathered as in its FSDP engine."""
    kept = target != work.ignore_index
    found = verl_logits.logprobs_from_logits(work.model.head(hidden), target.where(kept, 0))
    log_probs, mask = found.flatten(), kept.flatten().to(found)
    if work.sequence_group is not None:
        gather = partial(verl_sequence.gather_outputs_and_unpad, gather_dim=0, group=work.sequence_group)
        log_probs, mask = gather(log_probs), gather(mask)
    return verl_algorithms.agg_loss(-log_probs, mask, "token-mean", world_size(work.data_group), count)


def verl_step(work: Work) -> Any:
    """Train as verl's FSDP engine does: `agg_loss` of `logprobs_from_logits`.

    With a split vocabulary as its Megatron engine does: `vocab_parallel_log_probs_from_logits`, computed in float32, of
    vocabularies divisible by the number of ranks.
    """
    if work.vocab_group is not None:
        return by_megatron(verl_vocabulary)(work)
    loss = partial(verl_loss, count=int(group_sum(counted(work), work.token_group)))
    total = run_micro_batches(work, wrapped(Both(work.model, Loss(work, loss)), work))
    return group_sum(total, work.data_group) / world_size(work.data_group)


def deepspeed_step(work: Work) -> Tensor:
    """Train with `F.cross_entropy` under DeepSpeed's ZeRO-3, in float32."""
    rank, ranks = rank_in(work.token_group), world_size(work.token_group)
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_PORT": 29500}
    launched = {name: str(value) for name, value in sizes.items()} | {"MASTER_ADDR": "127.0.0.1"}
    config = {
        "train_micro_batch_size_per_gpu": len(work.micro_batches[0][0]),
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    both = Both(work.model.float(), Loss(work, torch_loss))
    trained = [p for p in both.parameters() if p.requires_grad]
    with patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"} | launched):
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it would be compiled first
        engine, *_ = deepspeed.initialize(model=both, optimizer=torch.optim.SGD(trained, 0.1), config=config)
    ((tokens, target),) = work.micro_batches
    count = group_sum(counted(work), work.token_group).clamp(min=1)
    total = engine(tokens, target)
    # DeepSpeed takes the mean over the ranks
    engine.backward(total * work.loss_scale * ranks / count)
    gradient = deepspeed.utils.safe_get_full_grad
    found = {name: gradient(p).clone() for name, p in work.model.named_parameters() if p.requires_grad}
    engine.destroy()
    # The engine has partitioned and released the parameters: replace them, to hold the gradients that are compared
    for name, whole in found.items():
        path, _, last = name.rpartition(".")
        parameter = nn.Parameter(torch.zeros_like(whole))
        parameter.grad = whole
        setattr(work.model.get_submodule(path), last, parameter)
    return group_sum(total.detach(), work.token_group) / count


def by_nemo_rl(log_probs: Callable[..., Any]) -> Step:
    """Return the step with the log-probability of each token except a sentence's first."""

    @wraps(log_probs)
    def loss(work: Work, hidden: Tensor, target: Tensor) -> Any:
        kept = target != work.ignore_index
        # Add a token before the first target, and a last position without a target
        tokens, longer = F.pad(target.where(kept, 0), (1, 0)), F.pad(hidden, (0, 0, 0, 1))
        rows = work.start, work.start + len(work.model.head.weight)
        return -(log_probs(work, copy_to_group(longer, work.vocab_group), tokens, *rows) * kept).sum()

    return over_vocabulary(loss)


def nemo_rl(work: Work, hidden: Tensor, tokens: Tensor, start: int, end: int) -> Any:
    """`from_parallel_logits_to_logprobs`, which shifts its targets itself, computed in float32; a split sequence
    needs a GPU, in `AllGatherCPTensor`.
    """
    logits = F.linear(hidden, work.model.head.weight)
    return nemo.from_parallel_logits_to_logprobs(logits, tokens, start, end, work.vocab_group)


def nemo_rl_fused(work: Work, hidden: Tensor, tokens: Tensor, start: int, end: int) -> Any:
    """Its `from_parallel_hidden_states_to_logprobs`, of hidden states of which each rank has some time steps, in
    float32; it refuses a split sequence.
    """
    group = work.vocab_group
    # Time first, as in Megatron; 4 steps, which 2 and 4 ranks divide
    own = hidden.transpose(0, 1).chunk(world_size(group))[rank_in(group)].contiguous()
    given = own, work.model.head.weight, False, tokens, start, end, group
    return nemo.from_parallel_hidden_states_to_logprobs(*given, chunk_size=3)


def liger(work: Work, hidden: Tensor, target: Tensor) -> Any:
    """`LigerVocabParallelCrossEntropy`, computed in float32; its kernels need a GPU, or Triton's interpreter."""
    logits = F.linear(copy_to_group(hidden, work.vocab_group), work.model.head.weight).float()
    loss = liger_modules.LigerVocabParallelCrossEntropy(label_smoothing=work.label_smoothing)
    return loss(logits, target, work.vocab_group).sum()


def titan_loss(work: Work, hidden: Tensor, target: Tensor) -> Any:
    """Return torchtitan's `cross_entropy_loss` of DTensor logits."""
    titan_backend.set_spmd_backend("partial_dtensor")
    weight = as_dtensor(work.model.head.weight, work.vocab_group, work.vocab_size)
    return titan.cross_entropy_loss(F.linear(as_dtensor(hidden, work.vocab_group), weight), target)


def tied_modules(model: Any) -> list[nn.Module]:
    """Return the modules that have the generator's weight, which must be one unit of FSDP2."""
    if model.head.weight is model.embed.weight:
        return [model.head, model.embed]
    return [model.head]


def titan_step(work: Work) -> Tensor:
    """Train with `ChunkedLossWrapper` under FSDP2, or `cross_entropy_loss` of DTensor logits, computed in float32."""
    if work.vocab_group is not None:
        return train(work, titan_loss)
    group = work.token_group
    assert group is not None
    model, mesh = work.model, DeviceMesh.from_group(group, "cpu")
    fsdp.fully_shard(tied_modules(model), mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    # As in its trainer: gradients are summed over the ranks, and the loss is already divided by all tokens
    for unit in (model.head, model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    chunked = titan.ChunkedLossWrapper
    loss = chunked(chunked.Config(num_chunks=3, loss_fn=titan.CrossEntropyLoss.Config()))
    loss.set_lm_head(model.head)
    count = group_sum(counted(work), group).clamp(min=1)
    total = torch.zeros((), dtype=torch.float64)
    for tokens, target in work.micro_batches:
        mean, _ = loss(model(tokens), target, count)
        (mean * work.loss_scale).backward()
        total += mean.detach()
    return group_sum(total, group)


class CausalModel(nn.Module):
    """The parts of a transformers model that TRL needs, and nothing else."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.backbone = model
        text_config = SimpleNamespace(num_experts=0)
        self.config = SimpleNamespace(get_text_config=lambda: text_config)

    def get_output_embeddings(self) -> Any:
        return self.backbone.head

    @property
    def base_model(self) -> Any:
        return lambda tokens, use_cache: SimpleNamespace(last_hidden_state=self.backbone(tokens))

    def forward(self, tokens: Tensor) -> Any:
        """Return the logits, as the model would without TRL's head."""
        return self.backbone.head(self.backbone(tokens))


class TrlSum(nn.Module):
    """The summed loss of TRL's fused head."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, target: Tensor) -> Any:
        return -self.model(tokens, shift_labels=target, fused_lm_head=True).log_probs.sum()


def trl_step(work: Work) -> Tensor:
    """Train with the log-probabilities of `add_fused_lm_head`, called inside DDP or FSDP2, computed in float32."""
    model: Any = CausalModel(work.model)
    trl.add_fused_lm_head(model)
    return accumulated(work, wrapped(TrlSum(model), work))


def trl_head_unit_step(work: Work) -> Tensor:
    """Do the same with the head as an FSDP2 unit of its own."""
    assert work.token_group is not None
    fsdp.fully_shard(tied_modules(work.model), mesh=DeviceMesh.from_group(work.token_group, "cpu"))
    return trl_step(work)


def why_no_liger() -> str:
    """Return why Liger's kernels cannot run in the ranks, which are on the CPU; empty if they can."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "needs Triton's interpreter on the CPU: TRITON_INTERPRET=1 in the environment"
    return why_missing("liger_kernel.transformers")


VOCABULARY = frozenset(name for name, row in ROWS.items() if row.inner in ("classes", "time and classes"))
REPLICATED = frozenset(name for name, row in ROWS.items() if row.wrap and not (row.inner or row.is_alone))
UNEVEN = VOCABULARY | {"uneven vocabulary"}
SMOOTH = VOCABULARY | {"smoothing"}
TORCH = EVERY_LAYOUT - VOCABULARY - {"DTensor model"}
has = partial(partial, why_missing)
PEERS = (
    LayoutAdapter("torch", torch_step, TORCH),
    LayoutAdapter("torch-loss-parallel", loss_parallel_step, UNEVEN | {"float64"}),
    LayoutAdapter("megatron", by_megatron(megatron), SMOOTH, "megatron-core", has("megatron.core.tensor_parallel")),
    LayoutAdapter("liger", over_vocabulary(liger), SMOOTH | UNEVEN, "liger-kernel", why_no_liger),
    LayoutAdapter("torchtitan", titan_step, UNEVEN | {"FSDP2"}, "torchtitan", has("torchtitan.components.loss")),
    LayoutAdapter("trl", trl_step, REPLICATED, "trl", has("trl.trainer.utils")),
    LayoutAdapter("trl-head-unit", trl_head_unit_step, frozenset({"FSDP2"}), "trl", has("trl.trainer.utils")),
    LayoutAdapter("verl", verl_step, VOCABULARY | REPLICATED, "verl", has("verl.trainer.ppo.core_algos")),
    LayoutAdapter("nemo-rl", by_nemo_rl(nemo_rl), UNEVEN, "nemo-rl", why_no_nemo_rl),
    LayoutAdapter("nemo-rl-fused", by_nemo_rl(nemo_rl_fused), UNEVEN, "nemo-rl", why_no_nemo_rl),
    LayoutAdapter("deepspeed", deepspeed_step, frozenset({"ZeRO-3", "smoothing"}), "deepspeed", has("deepspeed")),
    LayoutAdapter("seqpar", seqpar_step, package="seqpar"),
)
KNOWN_LAYOUTS = {adapter.name: adapter for adapter in PEERS}
"""The known implementations of a training step over several ranks, by name."""
