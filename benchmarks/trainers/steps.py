"""Take one training step in each trainer, as it comes or with this library's loss, and measure its peak memory."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from conformance import peak_memory


class Size(NamedTuple):
    """A step's batch of rows with `time` tokens each, and the model's width and classes."""

    rows: int
    time: int
    width: int
    vocab: int

    def tokens(self) -> Tensor:
        """Return the token ids of the batch."""
        return torch.randint(3, self.vocab, (self.rows, self.time))


TINY = Size(2, 8, 32, 64)
"""On which lazily loaded code is loaded."""

Step = Callable[[], Any]
Measured = Callable[[Step], Any]
"""What a trainer hands its forward and backward to."""


def llama(size: Size) -> Any:
    """Return a Llama of one layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    layers = {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 2 * size.width}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=size.vocab, hidden_size=size.width, **layers, **ids))


class Decoder(nn.Module):
    """A Llama's layers and its output embeddings: token ids to hidden states, or to logits."""

    def __init__(self, size: Size, logits: bool) -> None:
        super().__init__()
        made = llama(size)
        self.layers = made.model
        self.generator = made.lm_head
        self.logits = logits

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, or the hidden states of which a loss makes them."""
        hidden: Tensor = self.layers(input_ids=tokens, use_cache=False).last_hidden_state
        return self.generator(hidden) if self.logits else hidden  # type: ignore[no-any-return]


def with_loss(size: Size) -> seqpar.ModelWithLoss:
    """Return hidden states and their loss as one module."""
    decoder = Decoder(size, logits=False)
    return seqpar.ModelWithLoss(decoder, seqpar.LossCompute(decoder.generator, seqpar.CrossEntropy(ignore_index=0)))


def plain_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of all logits."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


def own_loss(model: nn.Module, tokens: Tensor) -> seqpar.TokenLoss:
    """Return the loss of a model that contains it."""
    return model(tokens[:, :-1], target=tokens[:, 1:])  # type: ignore[no-any-return]


def count(tokens: Tensor) -> Tensor:
    """Return the number of targets."""
    return (tokens[:, 1:] != 0).sum()


def of_transformers(size: Size, ours: bool, measured: Measured) -> None:
    """Take a step of the Trainer of Hugging Face transformers."""
    from transformers import Trainer, TrainingArguments

    from seqpar.integrations.transformers import apply_seqpar_loss

    model = llama(size)
    if ours:
        apply_seqpar_loss(model)
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"input_ids": row, "labels": row} for row in size.tokens()]
        trainer = Trainer(model, TrainingArguments(folder, **arguments(size)), train_dataset=rows)  # type: ignore[arg-type]
        wrap_step(trainer, measured)
        trainer.train()


def of_trl(size: Size, ours: bool, measured: Measured) -> None:
    """Take a step of TRL's SFTTrainer."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            llama(size),
            args=SFTConfig(folder, max_length=None, **IN_FLOAT32, **arguments(size)),
            train_dataset=Dataset.from_dict({"input_ids": size.tokens().tolist()}),
            processing_class=words(size),
        )
        train(trainer, ours, measured)


def of_trl_distillation(size: Size, ours: bool, measured: Measured) -> None:
    """Take a step of TRL's DistillationTrainer, with a teacher of the same size and completions that are given."""
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = DistillationTrainer(
            llama(size),
            llama(size),
            args=DistillationConfig(folder, beta=0.5, **IN_FLOAT32, **arguments(size)),
            train_dataset=Dataset.from_dict({"prompt": ["w3"] * size.rows}),
            processing_class=words(size),
        )
        trainer._generate_single_turn = lambda *_: size.tokens().tolist()
        train(trainer, ours, measured)


IN_FLOAT32 = {"bf16": False, "gradient_checkpointing": False}


def words(size: Size) -> Any:
    """Return a tokenizer of the words w0, w1 and so on."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size.vocab)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w2", eos_token="w1")


def train(trainer: Any, ours: bool, measured: Measured) -> None:
    """Train with TRL's trainer."""
    from seqpar.integrations.trl import apply_seqpar_scores

    if ours:
        apply_seqpar_scores(trainer)
    wrap_step(trainer, measured)
    trainer.train()


def arguments(size: Size) -> dict[str, Any]:
    """Return the arguments of every Trainer, for one step without files, messages and clipping."""
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    step = {"per_device_train_batch_size": size.rows, "max_steps": 1, "max_grad_norm": 0.0, "use_cpu": True}
    return quiet | step | {"dataloader_pin_memory": False}


def wrap_step(trainer: Any, measured: Measured) -> None:
    """Hand the Trainer's forward and backward to `measured`."""
    step = trainer.training_step
    trainer.training_step = lambda *args, **kwargs: measured(partial(step, *args, **kwargs))


def of_accelerate(size: Size, ours: bool, measured: Measured) -> None:
    """Take a step of a loop on Accelerate."""
    from accelerate import Accelerator

    from seqpar.integrations.accumulate import accumulate_step

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(with_loss(size) if ours else Decoder(size, logits=True))
    tokens = size.tokens()
    if ours:
        measured(lambda: accumulate_step(accelerator, model, [tokens], partial(own_loss, model), count))
    else:
        measured(lambda: accelerator.backward(plain_loss(model, tokens)))


def of_fabric(size: Size, ours: bool, measured: Measured) -> None:
    """Take a step of a loop on Lightning Fabric."""
    from lightning.fabric import Fabric

    from seqpar.integrations.accumulate import accumulate_step

    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup_module(with_loss(size) if ours else Decoder(size, logits=True))
    tokens = size.tokens()
    if ours:
        measured(lambda: accumulate_step(fabric, model, [tokens], partial(own_loss, model), count))
    else:
        measured(lambda: fabric.backward(plain_loss(model, tokens)))


def of_lightning(size: Size, ours: bool, measured: Measured) -> None:
    """Take a step of Lightning's Trainer, whose own loop calls backward where the loss is plain."""
    from lightning.pytorch import LightningModule, Trainer

    from seqpar.integrations.accumulate import accumulate_step

    class Training(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not ours
            self.model = with_loss(size) if ours else Decoder(size, logits=True)

        def training_step(self, tokens: Tensor, index: int) -> Tensor | None:
            if not ours:
                return plain_loss(self.model, tokens)
            measured(lambda: accumulate_step(self.trainer, self, [tokens], partial(own_loss, self.model), count))
            return None

        def optimizer_step(self, epoch: int, index: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            """Run forward and backward, which Lightning puts into the optimizer's step."""
            measured(optimizer_closure)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=1, accelerator="cpu", devices=1, enable_model_summary=False, **quiet)  # type: ignore[arg-type]
    trainer.fit(Training(), torch.utils.data.DataLoader([size.tokens()], batch_size=None))  # type: ignore[arg-type]


def of_fsdp2(size: Size, ours: bool, measured: Measured) -> None:
    """Take a step of one rank of a loop of one's own, under FSDP2."""
    from torch.distributed.fsdp import fully_shard

    group = alone()
    model: Any = with_loss(size) if ours else Decoder(size, logits=True)
    fully_shard(model)
    tokens = size.tokens()
    if ours:
        measured(
            lambda: seqpar.accumulate_gradients([tokens], partial(own_loss, model), count, model=model, group=group)
        )
    else:
        measured(lambda: plain_loss(model, tokens).backward())


def alone() -> Any:
    """Return the group of one rank over gloo."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return dist.group.WORLD


def of_torchtitan(size: Size, ours: bool, measured: Measured, chunked: bool) -> None:
    """Take a step of torchtitan's Llama 3, with its own loss of all logits or of chunks."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    from seqpar.integrations.torchtitan import SeqparCrossEntropy

    alone()
    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:1]
    config.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = size.vocab
    model = config.build()
    model.init_states()
    loss_of: Any = CrossEntropyLoss.Config().build()
    if ours:
        loss_of = SeqparCrossEntropy.Config().build()
    elif chunked:
        loss_of = ChunkedLossWrapper.Config().build()
    if ours or chunked:
        loss_of.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    tokens = size.tokens()
    labels = tokens.roll(-1, 1)
    measured(lambda: loss_of(model(tokens), labels, torch.tensor(labels.numel()))[0].backward())


class Kind(NamedTuple):
    """A trainer: the package that has to be installed, and what takes a step of it."""

    package: str
    take: Callable[[Size, bool, Measured], None]


KINDS = {
    "Hugging Face Trainer": Kind("transformers", of_transformers),
    "TRL SFTTrainer": Kind("trl", of_trl),
    "TRL DistillationTrainer": Kind("trl", of_trl_distillation),
    "Accelerate": Kind("accelerate", of_accelerate),
    "Lightning Trainer": Kind("lightning", of_lightning),
    "Lightning Fabric": Kind("lightning", of_fabric),
    "FSDP2, a loop of one's own": Kind("transformers", of_fsdp2),
    "torchtitan, all logits": Kind("torchtitan", partial(of_torchtitan, chunked=False)),
    "torchtitan, its chunks": Kind("torchtitan", partial(of_torchtitan, chunked=True)),
}


def step_peak(name: str, size: Size, ours: bool) -> int:
    """Return this process's peak during one step, above what it had resident before."""
    warnings.simplefilter("ignore")
    found: list[int] = []

    def measure(step: Step) -> Any:
        results: list[Any] = []
        found.append(peak_memory.peak_bytes(lambda: results.append(step())))
        return results[0]

    KINDS[name].take(TINY, ours, lambda step: step())
    KINDS[name].take(size, ours, measure)
    (peak,) = found
    return peak
