"""Hugging Face with FSDP2: a decoder-only model under the stock Trainer, whose parameters are sharded over the ranks.

Run it with `torchrun --standalone --nproc-per-node 2 examples/hf_fsdp2.py`.

accelerate makes a unit of the last norm and the output embeddings. Their weight is gathered once a forward, for all
chunks of the loss, and its gradient is reduced once. The gradient is that of the whole batch on one device.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import tempfile

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from seqpar.integrations.transformers import apply_seqpar_loss

PAD = 0
VOCAB = 60

torch.manual_seed(0)  # the same weights on every rank
layers = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=64, pad_token_id=PAD, **layers))


def counting() -> list[int]:
    """Return a run of consecutive numbers."""
    first = int(torch.randint(1, VOCAB - 12, ()))
    return list(range(first, first + int(torch.randint(4, 12, ()))))


def collate(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Pad the rows to one batch; labels of -100 are ignored."""
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)
    labels = tokens.masked_fill(tokens == PAD, -100)
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long(), "labels": labels}


on_cpu = not torch.accelerator.is_available()
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        fsdp=True,
        fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=30,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=on_cpu,
        disable_tqdm=True,
    )
    rank = arguments.process_index  # it joins the process group
    if on_cpu:  # accelerate shards on accelerators only, and is told that these are some
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    data = [counting() for _ in range(1024)]
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=collate)
    with apply_seqpar_loss(trainer):
        trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if rank == 0:
    print(f"{type(model.lm_head).__name__}: loss {losses[0]:.3f} at the start, loss {losses[-1]:.3f} at the end")
torch.distributed.destroy_process_group()
