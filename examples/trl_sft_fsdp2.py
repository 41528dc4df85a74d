"""TRL with FSDP2: an SFTTrainer whose parameters are sharded over the ranks, with the log-probabilities of seqpar.

Run it with `torchrun --standalone --nproc-per-node 2 examples/trl_sft_fsdp2.py`.

The model learns to count on. The gradient of each step is that of the whole batch on one device.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import tempfile

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from seqpar.integrations.trl import apply_seqpar_scores

VOCAB = 60

words = Tokenizer(models.WordLevel({f"{i:02}": i for i in range(VOCAB)}, unk_token="00"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="01", eos_token="02")

torch.manual_seed(0)  # the same weights on every rank
layers = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=64, pad_token_id=1, **layers))


def counting() -> dict[str, str]:
    """Return two numbers, and those that follow them."""
    first = int(torch.randint(3, VOCAB - 12, ()))
    numbers = [f"{i:02}" for i in range(first, first + int(torch.randint(4, 12, ())))]
    return {"prompt": " ".join(numbers[:2]), "completion": " " + " ".join(numbers[2:])}


on_cpu = not torch.accelerator.is_available()
with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder,
        fsdp=True,
        fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        max_steps=30,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=on_cpu,
        bf16=not on_cpu,
        disable_tqdm=True,
    )
    rank = arguments.process_index  # it joins the process group
    if on_cpu:  # accelerate shards on accelerators only, and is told that these are some
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    data = Dataset.from_list([counting() for _ in range(1024)])
    trainer = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
    with apply_seqpar_scores(trainer):
        trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if rank == 0:
    print(f"{type(model.lm_head).__name__}: loss {losses[0]:.3f} at the start, loss {losses[-1]:.3f} at the end")
torch.distributed.destroy_process_group()
