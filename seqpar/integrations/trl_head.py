"""Read the output embeddings of a model that TRL trains, and check them against the model's own logits.

They may be a plain `nn.Linear`, or one that PEFT has copied (`modules_to_save`) or put a LoRA adapter on.

Shape suffixes: N rows, D hidden, R rank of the adapter, V vocabulary, W tokens of the made-up text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqpar.core.token_loss import wide
from seqpar.distributed.collectives import whole_tensor
from seqpar.distributed.wrappers import inside_unit, refuse_sharded
from seqpar.integrations.made_up import (
    WINDOW,
    RefusedModelError,
    evaluating,
    full_name,
    in_one_line,
    keep_state,
    made_up_logits,
    more_than_linear,
    same_logits,
    undo_rounding,
)
from seqpar.integrations.peft_adapters import Adapter, adapter_of, linear_of
from seqpar.integrations.transformers_check import matching_reading
from seqpar.integrations.transformers_head import number_of_classes, with_adapter
from seqpar.integrations.transformers_model import (
    Reading,
    Settings,
    readings,
    settings_of,
    special_labels,
)

Computed = TypeVar("Computed")

WITHOUT = "train it without apply_seqpar_scores"
NEEDED = f"the scores need a torch.nn.Linear, alone or with PEFT's LoRA or modules_to_save; {WITHOUT}"


def scored_head(model: PreTrainedModel) -> Any:
    """Return the output embeddings; raise TypeError unless the scores can be computed with them."""
    head: Any = model.get_output_embeddings()
    name = type(model).__name__
    linear_of(head, name, NEEDED)
    # TRL reads the attribute `bias`, which PEFT's layer with trained tokens does not have
    if not hasattr(head, "bias"):
        raise TypeError(f"the output embeddings of {name} are a {full_name(head)}; {NEEDED}")
    adapter_of(model)
    return head


class ReadModels:
    """What models do to their logits; a model is examined again when its configuration has changed."""

    def __init__(self) -> None:
        self.checked: dict[int, tuple[Settings, Reading]] = {}

    def reading(self, model: PreTrainedModel) -> Reading:
        """Return what a model does to its logits."""
        settings = settings_of(model, {})
        before, reading = self.checked.get(id(model), (None, None))
        if reading is None or settings != before:
            reading = examine(model)
            self.checked[id(model)] = (settings, reading)
        return reading


def inside_head(head: Any, compute: Callable[[Tensor], Computed], hidden: Tensor) -> Computed:
    """Return `compute(hidden)`, called inside the FSDP2 unit of the output embeddings, which TRL itself never calls.

    The result has not been rounded to the unit's `output_dtype`; the unit's backward hooks are on it.
    """
    found: list[Computed] = []

    def checked(hidden: Tensor) -> Computed:
        refuse_sharded(head, f"let the trainer's fsdp_config shard the model; {WITHOUT}")
        found.append(compute(hidden))
        return found[0]

    inside_unit(head, checked, hidden)
    return found[0]


Seen = defaultdict[str, list[Tensor]]
"""The tensors that passed through the output embeddings in one forward, by name."""


def examine(model: PreTrainedModel) -> Reading:
    """Return what the model does to its logits, after running it once on a few tokens.

    Its output embeddings must get the backbone's last hidden states unchanged and return hidden x weight (plus the
    adapter's part), and the model may change random logits only by a softcap or factor that its configuration names.
    Raises TypeError or RuntimeError otherwise.
    """
    name = type(model).__name__
    head = scored_head(model)
    ids_1W = _made_up_text(model, head)
    text: dict[str, Any] = {"input_ids": ids_1W, "attention_mask": torch.ones_like(ids_1W), "use_cache": False}
    seen: Seen = defaultdict(list)
    with keep_state(model, head.weight.device), evaluating(model), torch.no_grad():
        try:
            with _watch(model, head, text, seen):
                logits = model(**text).logits
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            failed = f"{name} fails on a text of a few tokens ({in_one_line(error)})"
            raise RefusedModelError(f"{failed}; {WITHOUT}") from error
    if len(seen["hidden"]) != 1:
        raise RefusedModelError(
            f"{name} calls its output embeddings {len(seen['hidden'])} times in a forward; {WITHOUT}"
        )
    # The model's own numbers, compared in its own precision
    if not seen["last_hidden"] or not same_logits(seen["last_hidden"][0], seen["hidden"][0], seen["hidden"][0].dtype):
        between = "changes its hidden states between its backbone and its output embeddings"
        raise RefusedModelError(f"{name} {between}; {WITHOUT}")
    own = seen["own_logits"][0]
    if not same_logits(seen["plain_logits"][0], own, own.dtype):
        raise RefusedModelError(f"{more_than_linear(name)}; {WITHOUT}")
    theirs = undo_rounding(logits, seen["theirs"][-1])
    return matching_reading(name, readings(model), seen["made_up"][0], theirs, WITHOUT)


def _made_up_text(model: PreTrainedModel, head: Any) -> Tensor:
    """Return ids (1, W) spread over the vocabulary, without those that the configuration names."""
    embeddings: Any = model.get_input_embeddings()
    size = min(number_of_classes(head), number_of_classes(embeddings))
    special = special_labels(model, size)
    ordinary = [i for i in range(size) if i not in special] or list(range(size))
    steps = torch.linspace(0, len(ordinary) - 1, WINDOW, device="cpu").long().tolist()
    return torch.tensor([[ordinary[step] for step in steps]], device=embeddings.weight.device)


@contextmanager
def _watch(model: PreTrainedModel, head: nn.Module, text: dict[str, Any], seen: Seen) -> Iterator[None]:
    """Record the hidden states and logits of the output embeddings, and make them return random logits."""

    def after_head(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        seen["hidden"].append(args[0])
        if len(seen["hidden"]) == 1 and model.base_model is not model:
            # TRL calls the backbone itself and projects its result. Called here, it has the forward's autocast settings
            last_hidden = getattr(model.base_model(**text), "last_hidden_state", None)
            if last_hidden is not None:
                seen["last_hidden"].append(last_hidden)
        seen["own_logits"].append(output)
        # At this point the weights are gathered under FSDP2 too
        seen["plain_logits"].append(_plain_logits(args[0], head, adapter_of(model)))
        seen["made_up"].append(made_up_logits(text["input_ids"], output))
        # A copy, because a model may change its logits in place
        return seen["made_up"][-1].clone()

    def last_after_head(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return undo_rounding(output, seen["made_up"][-1]).clone()

    def after_model(module: Any, args: tuple[Any, ...], outputs: Any) -> None:
        seen["theirs"].append(outputs.logits)

    hooks = [
        # Before other hooks, so that whatever these do to the random logits is noticed
        head.register_forward_hook(after_head, prepend=True),
        head.register_forward_hook(last_after_head),
        model.register_forward_hook(after_model, prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _plain_logits(hidden: Tensor, head: Any, adapter: Adapter | None) -> Tensor:
    """Return hidden x weight plus the bias and the adapter's part, in at least hidden's precision."""
    dtype = wide(hidden.dtype)
    rows, weight = with_adapter(hidden.to(dtype), whole_tensor(head.weight).to(dtype), adapter)
    return F.linear(rows, weight, None if head.bias is None else whole_tensor(head.bias).to(dtype))
