"""The engine: generator and criterion over any device list, in chunks, with the gradient of the single-device loss.

Shape suffixes: B batch, T time, N rows (B*T, or the rows of a 2-D hidden), K rows of one chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqpar.core.chunked_gradient import check_loss_scale, chunked_gradient
from seqpar.core.chunks import Chunk, check_size, cut_rows, cut_time, recording, rows_per_chunk
from seqpar.core.tensor_checks import check_module
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.distributed.wrappers import inside_unit, refuse_data_parallel, refuse_sharded
from seqpar.engine.contract import (
    check_additive,
    check_roles,
    criterion_loss,
    first_scores,
    probe_index,
    project,
    refuse_mixing,
)
from seqpar.engine.formula_match import check_class_weight, linear_of, settings_of, soft_target_of, why_no_formula
from seqpar.engine.shards import Shard, check_targets, check_width, one_for_each_device, rows_of, scattered
from seqpar.kernels.row_kernel import why_no_kernel
from seqpar.linear.compiled_op import compiled_cross_entropy
from seqpar.linear.formula import LinearFormula, LinearLeaves, Projection, differentiable_loss, product_dtype
from seqpar.linear.inputs import Inputs, Settings
from seqpar.losses.criteria import ignored_target
from seqpar.multi_device.devices import Device, check_devices
from seqpar.multi_device.replicas import bind, check_replicable, parallel_apply, replicate


class Facts(NamedTuple):
    """What the first call found out."""

    vocab_size: int
    dtype: torch.dtype
    """Of the logits."""
    settled: bool
    """Whether the criterion is known to sum."""


class LossCompute(nn.Module):
    """`criterion(generator(hidden), target)`, summed, without the logits of all tokens ever existing at once.

    Plain equivalent: `criterion(generator(hidden).flatten(0, -2), target.flatten())`. The pattern is the
    `MultiGPULossCompute` of The Annotated Transformer (Harvard NLP, 2018), with the gradient kept exact.

    An `nn.Linear` with `seqpar.CrossEntropy`, `seqpar.LabelSmoothing` or `nn.CrossEntropyLoss` has its gradient by
    formula, as `linear_cross_entropy`; any other pair has it by autograd, chunk by chunk. `explain()` says which.

    Args:
        generator: any module from hidden states `(..., D)` to scores `(..., V)` of the same number of dimensions
            that treats every token alone.
        criterion: any module that sums; `seqpar.criteria` says what is asked of it.
        devices: where replicas of both compute, each on its share of the rows; None is where hidden is.
        chunk_tokens: the most tokens whose logits exist at once on a device; None chooses by bytes.
        chunk_size: instead of that, time steps of the whole batch (2018's way); hidden must be `(B, T, D)`.

    Raises:
        TypeError, ValueError: a bad device list or chunk size; a generator or criterion that is no module.
        ValueError: a criterion whose `reduction` is not "sum".
    """

    def __init__(
        self,
        generator: nn.Module,
        criterion: nn.Module,
        devices: Sequence[Device] | None = None,
        chunk_tokens: int | None = None,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        for name, part in (("generator", generator), ("criterion", criterion)):
            check_module(part, name)
            refuse_data_parallel(part, name)
        check_roles(generator, criterion)
        check_size(chunk_tokens, "chunk_tokens")
        check_size(chunk_size, "chunk_size")
        if chunk_tokens is not None and chunk_size is not None:
            raise ValueError(f"chunk_tokens={chunk_tokens} and chunk_size={chunk_size}: pass one of them")
        reduction = getattr(criterion, "reduction", "sum")
        if reduction != "sum":
            raise ValueError(f"the criterion has reduction={reduction!r}; the criterion must sum: reduction='sum'")
        self.head = nn.ModuleDict({"generator": generator, "criterion": criterion})
        self.devices = None if devices is None else check_devices(devices)
        self.chunk_tokens = chunk_tokens
        self.chunk_size = chunk_size
        self._facts: dict[tuple[object, ...], Facts] = {}

    def forward(
        self,
        hidden: Tensor | Sequence[Tensor],
        target: Tensor | Sequence[Tensor],
        *,
        loss_scale: float | Tensor = 1.0,
        **per_token: Any,
    ) -> TokenLoss:
        """The summed loss of all tokens.

        Args:
            hidden: `(N, D)` or `(B, T, D)`; or already scattered, a list of such with one per device.
            target: int64, hidden's leading shape; or a list like hidden's.
            loss_scale: what `total` will be multiplied by before `backward`, for float16: `scaler.get_scale() / tokens`
                with a GradScaler. Gradients are kept so many times as large; any factor gives the right gradient.
            per_token: further tensors the generator takes as keywords (copy attention, a teacher's states), each
                with target's shape first; scattered and chunked with the rest, and differentiated where they need
                it. None passes through.

        Returns:
            `TokenLoss` on the first device. `(loss.total / tokens_of_the_step).backward()` is the one backward.

        Raises:
            TypeError, ValueError: what is no dense tensor, or of another dtype or shape than it should be; class
                weights of another number of classes; a `loss_scale` of 0 or nan.
            ValueError: on the first call, a generator that mixes rows, or a criterion that does not add up
                (`seqpar.contract` says what is found and what is not).
            IndexError: a target outside [0, V) that is not ignored (with value and position).
            RuntimeError: the generator's parameters are sharded and FSDP2 has not unsharded them; in `backward`, a
                criterion that returned a detached number or a generator that ran under `torch.no_grad`.
        """
        check_loss_scale(loss_scale)
        if torch.compiler.is_compiling() and self.devices is None and self.chunk_size is None and not per_token:
            generator, criterion = linear_of(self.head["generator"]), self.head["criterion"]
            if isinstance(hidden, Tensor) and not why_no_formula(self.head["generator"], criterion):
                weights = getattr(criterion, "weight", None)
                inputs = Inputs(hidden, generator.weight, target, generator.bias, weights)  # type: ignore[arg-type]
                settings = Settings(*settings_of(criterion), chunk_tokens=self.chunk_tokens)
                return compiled_cross_entropy(inputs, settings, loss_scale)
        arguments = hidden, target, loss_scale, per_token
        return inside_unit(self.head["generator"], self._loss, *arguments)  # type: ignore[no-any-return]

    def _loss(self, hidden: Any, target: Any, loss_scale: float | Tensor, per_token: dict[str, Any]) -> TokenLoss:
        refuse_sharded(self.head)
        check_replicable(self.head)
        given = {name: value for name, value in per_token.items() if value is not None}
        shards = scattered(hidden, target, given, self.devices, self.chunk_size)
        kept = [self._kept(shard.target) for shard in shards]
        walk, facts = self._walk, None
        if not self._no_formula_for(shards[0]):
            vocab_size, width = linear_of(self.head["generator"]).weight.shape
            check_width(shards, width)
            walk, facts = self._walk_by_formula, Facts(vocab_size, product_dtype(shards[0].hidden), True)
            check_targets(shards, kept, vocab_size)
            check_class_weight(self.head["criterion"], vocab_size)
            if self.chunk_size is None:
                shards = one_for_each_device(shards)
                kept = [self._kept(shard.target) for shard in shards]
        devices = [shard.hidden.device for shard in shards]
        at_home = len(shards) == 1 and all(p.device == devices[0] for p in self.head.parameters())
        heads = [self.head] if at_home else replicate(self.head, devices)
        if facts is None:
            facts = self._inspect(heads, shards, kept)
        walks = zip(heads, shards, kept, strict=True)
        inputs = [(h, s, self._chunks(s, k, facts), loss_scale) for h, s, k in walks]
        losses = parallel_apply([walk] * len(shards), inputs, devices=devices)
        return sum((_moved(loss, devices[0]) for loss in losses[1:]), start=losses[0])

    def _kept(self, target: Tensor) -> Tensor:
        ignored = ignored_target(self.head["criterion"])
        return torch.ones_like(target, dtype=torch.bool) if ignored is None else target != ignored

    def _inspect(self, heads: list[nn.ModuleDict], shards: list[Shard], kept: list[Tensor]) -> Facts:
        """The logits' size and dtype, with every target checked against it and, once, what is asked of both modules.

        Once for each mode and dtype: batch normalisation mixes rows in training alone.
        """
        hidden = shards[0].hidden
        shapes = tuple(p.shape for p in self.head.parameters())
        modes = tuple(part.training for part in self.head.modules())
        about = (shapes, modes, product_dtype(hidden), self._wants_gradients(shards[0]))
        known = self._facts.get(about)
        if recording(hidden.device):  # nothing can be looked at, so what another mode has found must do
            known = next((facts for key, facts in self._facts.items() if key[0] == shapes and facts.settled), None)
            if known is None:
                raise RuntimeError(
                    "the first call of the engine is being recorded in a CUDA graph, and it looks at the logits; call "
                    "it once before (torch.cuda.graph asks for a warm-up in any case)"
                )
        if known is not None and known.settled:
            check_targets(shards, kept, known.vocab_size)
            return known
        for head, shard, keep in zip(heads, shards, kept, strict=True):
            index_K = probe_index(keep.flatten())
            if len(index_K):
                fork = [] if shard.hidden.device.type == "cpu" else [shard.hidden.device]
                with torch.random.fork_rng(fork, device_type=shard.hidden.device.type):
                    facts = self._probe(head, shard, index_K, lambda size: check_targets(shards, kept, size))
                self._facts[about] = facts
                return facts
        return Facts(1, hidden.dtype, False)  # every target is ignored: there is nothing to project

    def _probe(self, head: nn.ModuleDict, shard: Shard, index_K: Tensor, check_classes: Callable[[int], None]) -> Facts:
        """What a few rows say, on a copy of the head."""
        copies = {id(p): p.detach() for p in head.parameters()} | {id(b): b.clone() for b in head.buffers()}
        copy, lead = bind(head, copies), shard.target.dim()
        rows = [t.detach()[index_K] for t in rows_of(shard)]

        def scores(shape: tuple[int, ...], rows: Sequence[Tensor]) -> Tensor:
            return project(copy["generator"], tuple(shard.per_token), shape, rows)

        with torch.no_grad():
            logits_KV = first_scores(copy["generator"], scores, (*(1,) * (lead - 1), len(index_K)), rows)
            check_classes(logits_KV.size(-1))
            check_class_weight(head["criterion"], logits_KV.size(-1))
            sums = check_additive(copy["criterion"], logits_KV, shard.target.flatten()[index_K])
        refuse_mixing(copy["generator"], scores, rows, lead, self._wants_gradients(shard))
        return Facts(logits_KV.size(-1), logits_KV.dtype, sums)

    def _wants_gradients(self, shard: Shard) -> bool:
        tensors = (shard.hidden, *shard.per_token.values(), *self.head.parameters())
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)

    def _no_formula_for(self, shard: Shard) -> str:
        """`why_no_formula`, for these inputs."""
        if shard.per_token:
            return f"the generator takes {', '.join(shard.per_token)} for each token"
        why = why_no_formula(self.head["generator"], self.head["criterion"])
        if not why and shard.hidden.dtype != linear_of(self.head["generator"]).weight.dtype:
            # Only autocast brings them together; anywhere else torch's own error follows
            return "" if torch.is_autocast_enabled(shard.hidden.device.type) else "hidden and weight differ in dtype"
        return why

    def explain(self, tokens: int = 4096) -> str:
        """How the loss of so many kept tokens of one device is computed, and why; for a person to read."""
        generator, criterion = self.head["generator"], self.head["criterion"]
        why = why_no_formula(generator, criterion)
        pair = f"{type(generator).__name__}, {type(criterion).__name__}"
        how = f"by autograd, chunk by chunk ({why})" if why else f"by formula ({pair})"
        kind = next((p.device.type for p in generator.parameters()), "cpu")
        if not why and not why_no_kernel(kind):
            how += ", the softmax and its gradient in one Triton kernel"
        elif not why and kind != "cpu":
            how += f", the softmax and its gradient in torch operations ({why_no_kernel(kind)})"
        if self.chunk_size is not None:
            return f"{how}; {self.chunk_size} time steps of the batch at a time"
        weight: Tensor | None = next(generator.parameters(), None)
        facts = next(reversed(self._facts.values()), None)
        if not why:
            facts = Facts(linear_of(generator).out_features, product_dtype(linear_of(generator).weight), True)
        if facts is None or weight is None:
            return f"{how}; how large a chunk is will be known after the first call"
        rows = min(tokens, self.chunk_tokens or rows_per_chunk(facts.vocab_size, facts.dtype, weight.device.type))
        size = rows * facts.vocab_size * wide(facts.dtype).itemsize
        return (
            f"{how}; {tokens:,} tokens in {-(-tokens // rows):,} chunks of at most {rows:,}, whose logits "
            f"({facts.vocab_size:,} each) take {size / 2**20:,.1f} MiB"
        )

    def _chunks(self, shard: Shard, kept: Tensor, facts: Facts) -> list[Chunk]:
        if self.chunk_size is not None:
            return cut_time(kept, self.chunk_size)
        most = self.chunk_tokens or rows_per_chunk(facts.vocab_size, facts.dtype, shard.hidden.device.type)
        return cut_rows(kept.flatten(), most)

    def _walk_by_formula(
        self, head: nn.ModuleDict, shard: Shard, chunks: list[Chunk], loss_scale: float | Tensor
    ) -> TokenLoss:
        linear = linear_of(head["generator"])
        q = soft_target_of(head["criterion"], linear.weight.size(0))
        (hidden_ND,) = rows_of(shard)
        projection = Projection(linear.weight, linear.bias, product_dtype(hidden_ND))
        ignored = ignored_target(head["criterion"]) if recording(hidden_ND.device) else None
        formula = LinearFormula(projection, shard.target.flatten(), q, ignored=ignored)
        return differentiable_loss(formula, chunks, LinearLeaves(hidden_ND, linear.weight, linear.bias), loss_scale)

    def _walk(self, head: nn.ModuleDict, shard: Shard, chunks: list[Chunk], loss_scale: float | Tensor) -> TokenLoss:
        """One device's loss, chunk by chunk."""
        params, names, target_N = tuple(head.parameters()), tuple(shard.per_token), shard.target.flatten()

        def per_chunk(leaves: tuple[Tensor, ...], rows: tuple[Tensor, ...], chunk: Chunk) -> TokenLoss:
            bound = bind(head, {id(p): leaf for p, leaf in zip(params, leaves, strict=True)})
            shape = (*(1,) * (shard.target.dim() - 1), len(rows[0]))
            logits_KV = project(bound["generator"], names, shape, rows)
            return criterion_loss(bound["criterion"], logits_KV, target_N[chunk])

        empty = TokenLoss.zero(shard.hidden.dtype, shard.hidden.device, hasattr(head["criterion"], "token_loss"))
        return chunked_gradient(per_chunk, chunks, rows_of(shard), params, empty, loss_scale)

    def extra_repr(self) -> str:
        """What `print(module)` adds."""
        devices = None if self.devices is None else [str(d) for d in self.devices]
        return f"devices={devices}, chunk_tokens={self.chunk_tokens}, chunk_size={self.chunk_size}"


def _moved(loss: TokenLoss, device: torch.device) -> TokenLoss:
    return TokenLoss(*(None if t is None else t.to(device) for t in loss))  # type: ignore[arg-type]
