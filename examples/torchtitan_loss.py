"""torchtitan: its trainer hands this loss the hidden states, so that the logits of all tokens never exist.

Run it with `torchrun --standalone --nproc-per-node 2 examples/torchtitan_loss.py`.

In a configuration of torchtitan's own trainer the loss is `loss=SeqparCrossEntropy.Config(...)`.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

from seqpar.integrations.torchtitan import SeqparCrossEntropy

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
    loss_fn = SeqparCrossEntropy.Config(label_smoothing=0.1).build()
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
