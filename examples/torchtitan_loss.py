"""torchtitan: its trainer hands this loss the hidden states, so that the logits of all tokens never exist.

Run it with `torchrun --standalone --nproc-per-node 2 examples/torchtitan_loss.py`.

In a configuration of torchtitan's own trainer it takes the place of the loss: `loss=ChunkedLoss.Config(...)`.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

from dataclasses import dataclass

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, ChunkedLossWrapper
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

import seqpar


class ChunkedLoss(ChunkedLossWrapper):  # the one kind of BaseLoss that the trainer hands hidden states and `lm_head`
    """The cross-entropy of a torchtitan model, divided by the tokens of all ranks and micro-batches."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        label_smoothing: float = 0.0
        z_loss: float = 0.0

    def __init__(self, config, *, compile_config=None):
        self.settings = {"label_smoothing": config.label_smoothing, "z_loss": config.z_loss}

    def set_lm_head(self, lm_head):
        # FSDP2 gathers a weight around the forward of its module, so the loss has to be this forward
        lm_head.forward = lambda hidden, labels: self.of_tokens(hidden, lm_head, labels)
        self.lm_head = lm_head

    def of_tokens(self, hidden, lm_head, labels):
        if lm_head.bias is not None:
            raise TypeError("lm_head has a bias, which torchtitan's models have not; pass it to linear_cross_entropy")
        vocab = None
        if (
            not isinstance(lm_head.weight, DTensor) and spmd_mesh_size("tp") > 1
        ):  # a DTensor says itself how it is split
            tensor_parallel = current_spmd_mesh().get_group("tp")
            vocab = seqpar.VocabShard.of(len(lm_head.weight), tensor_parallel)
            # linear_cross_entropy sums hidden's gradient over the group, and torchtitan's norm would do so again
            hidden = spmd.convert(hidden, tensor_parallel, src=spmd.R, dst=spmd.I, expert_mode=True)
        return seqpar.linear_cross_entropy(
            hidden, lm_head.weight, labels, ignore_index=IGNORE_INDEX, vocab=vocab, **self.settings
        )

    def __call__(self, pred, labels, global_valid_tokens=None, **loss_inputs):
        with spmd.no_typecheck():
            total = self.lm_head(pred, labels).total
            if global_valid_tokens is not None:
                total = total / global_valid_tokens
        return total, {}


if __name__ == "__main__":  # a training step as the trainer takes it, on CPUs, which the trainer itself does not run on
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    config = llama3_configs["debugmodel"](attn_backend="flex")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention needs a compiler
    config.layers = config.layers[:2]
    model = config.build()
    model.init_states()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    apply_fsdp_to_decoder(model, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    loss_fn = ChunkedLoss.Config(label_smoothing=0.1).build()
    loss_fn.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    for step in range(15):
        tokens = torch.randint(20, (4, 33))
        labels = tokens[:, :-1].clone()
        labels[rank:, 16:] = IGNORE_INDEX
        valid = (labels != IGNORE_INDEX).sum()
        dist.all_reduce(valid)
        loss, _ = loss_fn(model(tokens[:, :-1]), labels, valid)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach()
        dist.all_reduce(whole)
        if rank == 0 and step in (0, 14):
            print(f"step {step}: loss {whole:.3f} over {valid} tokens of {dist.get_world_size()} ranks")
    dist.destroy_process_group()
