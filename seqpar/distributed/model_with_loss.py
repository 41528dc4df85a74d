"""Combine model and loss in one module, for DistributedDataParallel or FSDP2 to wrap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

from torch import Tensor, nn

from seqpar.core.checks import check_module, check_type
from seqpar.core.token_loss import TokenLoss
from seqpar.distributed.wrappers import refuse_data_parallel


class ModelWithLoss(nn.Module):
    """`loss(model(*inputs), target)` as one module, whose wrapped forward begins at the inputs and ends in the loss.

    Plain equivalent: `hidden = model(*inputs, **keywords); return loss(hidden, target)`. Under data parallelism:

        both = seqpar.ModelWithLoss(model, seqpar.LossCompute(model.generator, criterion))
        ddp = DistributedDataParallel(both)                       # or: fully_shard(both)
        loss = ddp(src, tgt_in, target=tgt_out)
        tokens = seqpar.group_sum(loss.tokens, dist.group.WORLD)  # both wrappers take the mean over ranks
        (loss.total * dist.get_world_size() / tokens).backward()  # so this is the gradient of the whole batch

    `seqpar.accumulate_gradients` does the last two lines, for any number of micro-batches.

    Args:
        model: any module that returns hidden states, or `(hidden, per_token)` where the generator needs more per
            token (copy attention): a dict of tensors, handed to the loss as keywords.
        loss: a module called with `(hidden, target, **per_token)`, such as `LossCompute`. A submodule of both (the
            generator) has one set of parameters, and `state_dict` contains it once, under the model's name.

    FSDP2: call `fully_shard` on blocks of the model as usual, then on this module. The generator may be a unit of its
    own, or belong to this module's unit (as it must when it is tied to the embedding); either way a step has the
    all-gathers and reduce-scatters of an un-chunked loss. Leave `output_dtype` unset: it would round the summed loss.

    Pipeline parallelism (`torch.distributed.pipelining`): no wrapper is needed. The last stage returns hidden states
    and the schedule takes `loss_fn=lambda hidden, target: engine(hidden, target).total / tokens` and
    `scale_grads=False`, because the loss is already divided by the tokens of the step and must not be divided by the
    number of micro-batches as well. The last stage's module should have the generator as a submodule, so that schedule
    and optimizer see its parameters. GPipe, 1F1B, interleaved 1F1B and, from torch 2.13 on, the zero-bubble schedules
    InterleavedZeroBubble, ZBVZeroBubble and DualPipeV work.

    Raises:
        RuntimeError: the model or the loss is already wrapped in DistributedDataParallel.
        TypeError: either of them is not a module.

    Example:
        >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8))
        >>> both = seqpar.ModelWithLoss(model, seqpar.LossCompute(nn.Linear(8, 50), seqpar.CrossEntropy()))
        >>> tokens = torch.randint(50, (2, 7))
        >>> loss = both(tokens[:, :-1], target=tokens[:, 1:])
        >>> loss.tokens
        tensor(12)
    """

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        for name, module in (("model", model), ("loss", loss)):
            check_module(module, name)
            refuse_data_parallel(module, name)
        self.model = model
        self.loss = loss
        # Adapters replace the generator with a different module, and the loss would keep using the earlier one
        self._shared_from_the_start = self._shared_modules()
        # A generator that both have is one module with two paths; a checkpoint has only the path in the model
        self.register_state_dict_post_hook(_drop_second_names)
        self.register_load_state_dict_pre_hook(_restore_second_names)

    def forward(
        self,
        *inputs: object,
        target: Tensor | Sequence[Tensor],
        per_token: Mapping[str, Tensor] | None = None,
        **keywords: object,
    ) -> TokenLoss:
        """Return the loss of `target` given the model's hidden states of the inputs.

        Args:
            inputs, keywords: the model's arguments.
            target: int64, hidden's leading shape.
            per_token: further per-token tensors for the generator; those that the model returns are added.

        Raises:
            TypeError: `per_token` is not a dict.
            RuntimeError: a submodule of both (the generator) was replaced in one of them after this module was made.
                Parameters are still sharded, because a submodule was called that `fully_shard` does not wrap.
            Exception: whatever `LossCompute` raises.
        """
        check_type(per_token, "per_token", (Mapping, NoneType), "a dict of per-token tensors")
        self._refuse_replaced()
        hidden = self.model(*inputs, **keywords)
        extra = dict(per_token or {})
        if isinstance(hidden, tuple) and len(hidden) == 2 and isinstance(hidden[1], Mapping):
            hidden, more = hidden
            extra |= more
        return self.loss(hidden, target, **extra)  # type: ignore[no-any-return]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield each module once, a submodule of both under the model's name alone, as in `state_dict`.

        `torch.func.functional_call` would restore a parameter with two names twice, the second time to the tensor that
        it was called with.
        """
        seconds = () if remove_duplicate else tuple(self._shared_modules())
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            inner = name.removeprefix(f"{prefix}.") if prefix else name
            if not any(inner == second or inner.startswith(f"{second}.") for second in seconds):
                yield name, module

    def _refuse_replaced(self) -> None:
        """Raise RuntimeError if a submodule of both the model and the loss was replaced in one of them."""
        for in_loss, in_model in self._shared_from_the_start.items():
            if self.get_submodule(in_loss) is not self.get_submodule(in_model):
                raise RuntimeError(
                    f"{in_loss} is no longer the module {in_model}: one of them was replaced after this ModelWithLoss "
                    "was made, as adapters do; change the model first, then make the loss and this module"
                )

    def _shared_modules(self) -> dict[str, str]:
        """Return, for each submodule of the loss that is also in the model, its path in the loss and in the model."""
        paths = {id(module): name for name, module in self.model.named_modules(prefix="model")}
        return {n: paths[id(module)] for n, module in self.loss.named_modules(prefix="loss") if id(module) in paths}


def _drop_second_names(module: ModelWithLoss, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Remove a shared submodule's tensors under the loss's name; they stay under the model's."""
    for second in module._shared_modules():
        for key in [k for k in state if k.startswith(f"{prefix}{second}.")]:
            del state[key]


def _restore_second_names(module: ModelWithLoss, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Add a shared submodule's tensors under the loss's name, which a strict load asks for."""
    for second, first in module._shared_modules().items():
        start = f"{prefix}{first}."
        for key in [k for k in state if k.startswith(start)]:
            # A checkpoint with both names, written without this class, is loaded as it is
            state.setdefault(f"{prefix}{second}.{key.removeprefix(start)}", state[key])
