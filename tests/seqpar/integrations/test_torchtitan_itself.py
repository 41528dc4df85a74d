"""torchtitan's own trainer step and decoder: with this loss, gradients are those of one batch."""

import warnings
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

from seqpar.distributed.collectives import group_sum
from seqpar.testing import Layout, assert_same_step
from tests.seqpar.integrations.small_seq2seq import whole

with warnings.catch_warnings(action="ignore"):
    import torchtitan.distributed.parallel_dims
    from torchtitan.components.loss import IGNORE_INDEX
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as titan
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.models.common import Embedding, Linear, RMSNorm, TransformerBlock
    from torchtitan.models.common.config_utils import make_ffn_config
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.models.common.decoder_sharding import (
        dense_activation_placement,
        norm_config,
        set_decoder_sharding_config,
        set_dense_ffn_sharding,
    )
    from torchtitan.trainer import Trainer

    from seqpar.integrations.torchtitan import SeqparCrossEntropy

pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB, WIDTH = 23, 8
SETTINGS = {"label_smoothing": 0.1}


class Block(TransformerBlock):
    """torchtitan's feed-forward block alone: its attention rotates in float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        pass

    def __init__(self, config):
        super().__init__()
        self.ffn_norm, self.feed_forward = config.ffn_norm.build(), config.feed_forward.build()

    def forward(self, x, attention_masks, positions=None):
        return x + self.feed_forward(self.ffn_norm(x))


def decoder(tied=False):
    normal = {"weight": partial(nn.init.normal_, std=0.5)}
    norm = RMSNorm.Config(normalized_shape=WIDTH, param_init={"weight": nn.init.ones_})
    feed_forward = make_ffn_config(dim=WIDTH, hidden_dim=2 * WIDTH, w1_param_init=normal, w2w3_param_init=normal)
    block = Block.Config(attention=None, attention_norm=norm, ffn_norm=norm, feed_forward=feed_forward)
    return Decoder.Config(
        dim=WIDTH,
        vocab_size=VOCAB,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=WIDTH, param_init=normal),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init={"weight": nn.init.ones_}),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCAB, param_init=normal),
        layers=[block],
        enable_weight_tying=tied,
    )


def batch(data_rank, index):
    """Two sequences, of which the data ranks and micro-batches ignore different parts."""
    generator = torch.Generator().manual_seed(10 * data_rank + index)
    tokens = torch.randint(VOCAB, (2, 7), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[: 1 + data_rank, 1 + index :] = IGNORE_INDEX
    return {"input": tokens[:, :-1]}, labels


def whole_batch(ranks, tied):
    """Loss and gradients in one process, of all micro-batches' logits."""
    torch.manual_seed(0)
    model = decoder(tied).build().double()
    model.init_states()
    batches = [batch(rank, index) for rank in range(ranks) for index in range(2)]
    logits = model(torch.cat([inputs["input"] for inputs, _ in batches]))
    labels = torch.cat([labels for _, labels in batches])
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, **SETTINGS)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def sharded(config, dims):
    """torchtitan's decoder with its own tensor parallelism and FSDP2, and the weights of `whole_batch`."""
    set_decoder_sharding_config(config, enable_sp=False)
    for layer in config.layers:
        layer.ffn_norm.sharding_config = norm_config(enable_sp=False)
        set_dense_ffn_sharding(layer.feed_forward, attn_x_layout=dense_activation_placement(tp=spmd.I), enable_sp=False)
    torch.manual_seed(0)
    model = config.build().double()
    model.init_states()
    if dims.tp > 1 or dims.spmd_backend == "spmd_types":
        model.parallelize(dims)
    if dims.spmd_backend == "spmd_types":
        return model  # sharding its weights, too, needs an FSDP2 that knows spmd_types, which torch 2.13 has not
    data = ["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"]
    apply_fsdp_to_decoder(model, dims.get_mesh(data), torch.float64, torch.float64, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    return model


def trainer_of(model, dims, loss_fn, accumulation):
    """torchtitan's trainer, without what its constructor needs an accelerator for."""
    trainer = Trainer.__new__(Trainer)
    trainer.loss_fn = loss_fn
    loss_fn.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    training = SimpleNamespace(disable_cuda_graphs=True, max_norm=float("inf"))
    trainer.config = SimpleNamespace(training=training, parallelism=ParallelismConfig(spmd_backend=dims.spmd_backend))
    trainer.parallel_dims, trainer.model_parts, trainer.model_config = dims, [model], None
    trainer.device, trainer.step, trainer.ntokens_seen = torch.device("cpu"), 1, 0
    trainer.gradient_accumulation_steps, trainer.num_pipeline_parallel_microbatches = accumulation, 1
    trainer.optimizers, trainer.lr_schedulers, trainer.checkpointer = MagicMock(), MagicMock(), MagicMock()
    trainer.metrics_processor = SimpleNamespace(should_log=lambda step: False)
    trainer.train_context = titan.get_spmd_context(parallel_dims=dims)
    return trainer


def step_of(trainer, batches):
    """Train for one step; the loss of this rank's share of it."""
    losses = []

    def recorded(*arguments):
        losses.append(trainer._forward_backward_body(*arguments))
        return losses[-1]

    trainer.fwd_bwd_fn = recorded
    trainer.train_step(iter(batches))
    return sum(losses).detach()


def dims_of(world, tensor_parallel, backend, replicas=1):
    torchtitan.distributed.parallel_dims.device_type = "cpu"
    titan.set_spmd_backend(backend)
    dims = ParallelDims(
        replicas, world // tensor_parallel // replicas, 1, tensor_parallel, 1, 1, world, spmd_backend=backend
    )
    dims.build_mesh()
    return dims


def trained(rank, world, tensor_parallel, backend, tied, replicas=1):
    """One step of torchtitan's trainer."""
    dims = dims_of(world, tensor_parallel, backend, replicas)
    model = sharded(decoder(tied), dims)
    trainer = trainer_of(model, dims, SeqparCrossEntropy.Config(**SETTINGS).build(), 2)
    data_rank = rank // tensor_parallel
    loss = step_of(trainer, [batch(data_rank, index) for index in range(2)])
    return data_rank, loss, {name: whole(p.grad) for name, p in model.named_parameters()}


def put_together(parts, like):
    """Return the gradient that torchtitan's ranks have, or have the parts of: by rows, else by columns."""
    if parts[0].shape == like.shape:
        return parts[0]
    return torch.cat(parts, 1 if len(parts[0]) == len(like) else 0)


@pytest.mark.parametrize(
    ("world", "tensor_parallel", "backend", "tied", "replicas"),
    [
        (2, 1, "partial_dtensor", False, 1),
        (2, 1, "partial_dtensor", True, 1),
        (2, 1, "partial_dtensor", False, 2),
        (2, 2, "partial_dtensor", False, 1),
        (2, 2, "spmd_types", False, 1),
        (4, 2, "partial_dtensor", False, 1),
    ],
)
def test_a_step_of_the_trainer_has_loss_and_gradients_of_the_whole_batch(
    world, tensor_parallel, backend, tied, replicas, own_ranks
):
    results = own_ranks(world, trained, tensor_parallel, backend, tied, replicas)
    loss, expected = whole_batch(world // tensor_parallel, tied)
    shares = {data_rank: share for data_rank, share, _ in results}
    torch.testing.assert_close(sum(shares.values()), loss, rtol=1e-12, atol=0)
    for name, gradient in expected.items():
        got = put_together([gradients[name] for _, _, gradients in results], gradient)
        assert (got - gradient).norm() < 1e-12 * gradient.norm(), name


def test_a_head_that_does_more_than_multiply_is_refused():
    class Capped(torch.nn.Linear):
        def forward(self, hidden):
            return torch.tanh(super().forward(hidden))

    loss = SeqparCrossEntropy.Config().build()
    for head, kind in ((Capped(4, 9, bias=False), "Capped"), (torch.nn.Linear(4, 9), "torch.nn.modules.linear.Linear")):
        with pytest.raises(TypeError, match=f"lm_head is a .*{kind}, not an nn.Linear without bias: use Chunked"):
            loss.set_lm_head(head)


class OfEachMicroBatch(SeqparCrossEntropy):
    """Divides by the tokens of the micro-batch, as trainers did before they counted those of the step."""

    def __call__(self, hidden, labels, global_valid_tokens):
        return super().__call__(hidden, labels, (labels != IGNORE_INDEX).sum().double())


SENTENCES = [
    (tokens, labels)
    for i in range(4)
    for tokens, labels in zip(batch(i % 2, i)[0]["input"], batch(i % 2, i)[1], strict=True)
]


def make_trainer(layout, kind=SeqparCrossEntropy):
    """torchtitan's trainer and decoder in a layout of `assert_same_step`: FSDP2 over the ranks."""
    if layout.ranks == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dims = dims_of(layout.ranks, 1, "partial_dtensor")
    model = sharded(decoder(), dims)
    loss = kind.Config(**SETTINGS).build()
    loss.__class__ = kind
    trainer = trainer_of(model, dims, loss, layout.accumulation)
    trainer.optimizers = torch.optim.SGD(model.parameters(), 0.1)
    batches = [
        ({"input": torch.stack([tokens for tokens, _ in part])}, torch.stack([labels for _, labels in part]))
        for part in layout.micro_batches(SENTENCES)
    ]

    def step():
        return group_sum(step_of(trainer, batches), None if layout.ranks == 1 else dist.group.WORLD)

    return model, step


LAYOUTS = [Layout(accumulation=2), Layout(ranks=2), Layout(ranks=2, accumulation=2)]


def test_a_step_is_the_same_in_each_layout():
    assert_same_step(make_trainer, LAYOUTS)


def test_a_mean_of_each_micro_batch_is_found():
    with pytest.raises(AssertionError, match=r"Likely cause: .*each micro-batch is divided by its own tokens"):
        assert_same_step(partial(make_trainer, kind=OfEachMicroBatch), LAYOUTS)
