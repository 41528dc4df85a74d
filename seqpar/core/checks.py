"""Check arguments. Each error is one line: what is wrong and where, both numbers, and how to fix it.

A check takes the argument's name in the caller's code. `wanted` is how its message continues after "it must be".
Only `check_entries` reads a tensor's data on an accelerator, and so waits for the device.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from seqpar.core.chunks import Chunk, cover
from seqpar.core.device_facts import FACTS, is_capturing, is_on_host, may_read
from seqpar.core.graphs import leaves_of_graph, nodes_of_graph
from seqpar.core.token_loss import wide

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CLASS_INDICES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""The dtypes that torch's own cross-entropy takes (int64, uint8), and the narrower signed ones. A narrow target must be
widened to int64 before it is compared with `ignore_index`, which torch would wrap around: -100 is 156 in uint8."""

Kind = TypeVar("Kind")

PLAIN_TENSORS = (Tensor, nn.Parameter)
"""Classes that are not DTensor."""

LOWEST, HIGHEST = -(2**63), 2**63 - 1
"""The range of int64."""

PROVED: ContextVar[bool] = ContextVar("seqpar_proved", default=False)
"""Whether a proof is computing the loss under test: an adapter must then not fall back to the plain loss."""


# What a value is


def check_type(
    value: object, name: str, kinds: type[Kind] | tuple[type[Kind], ...], wanted: str, *, verb: str = "is"
) -> Kind:
    """Return `value`; raise TypeError unless it is one of these kinds.

    Args:
        verb: "returned" if `value` is what the function `name` returned.
    """
    if not isinstance(value, kinds):
        must = "return" if verb == "returned" else "be"
        shown = f"{value!r:.60}" if kinds is bool else kind_of(value)
        raise TypeError(f"{name} {verb} {shown}; it must {must} {wanted}")
    return value


def kind_of(value: object) -> str:
    """Return what a value is, for an error message."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    article = "an" if name[0] in "AEIOaeio" or name == "ndarray" else "a"
    count = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"{article} {name}{count}"


def check_function(value: object, name: str, wanted: str = "a function") -> None:
    """Raise TypeError unless `value` can be called."""
    check_type(value, name, Callable, wanted)  # type: ignore[arg-type]


def check_module(value: object, name: str) -> None:
    """Raise TypeError unless `value` is a `torch.nn.Module`."""
    call = f": {value.__name__}(...)" if isinstance(value, type) else ""
    check_type(value, name, nn.Module, f"a torch.nn.Module{call}")


def check_choice(value: object, name: str, known: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of the known words."""
    if value not in known:
        *others, last = map(repr, known)
        words = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{name} is {value!r}; it must be {words}")


# Numbers


def check_integer(
    value: object, name: str, at_least: int = LOWEST, at_most: int = HIGHEST, *, wrong_kind: type[Exception] = TypeError
) -> None:
    """Raise `wrong_kind` unless `value` is a whole number (no bool), ValueError unless it fits the range and int64."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if is_whole and at_least <= int(value) <= at_most:  # type: ignore[call-overload]
        return
    wanted = "an int64" if is_whole else "an int"
    if at_least > LOWEST:
        wanted = f"a whole number of at least {at_least}"
    if at_most < HIGHEST:
        wanted = f"a whole number in [{at_least}, {at_most}]"
    shown = repr(value) if is_whole or value is None or isinstance(value, (bool, float, str)) else kind_of(value)
    raise (ValueError if is_whole else wrong_kind)(f"{name} is {shown:.60}; it must be {wanted}")


def check_size(value: object, name: str) -> None:
    """Raise ValueError unless `value` is an int of at least 1, or None, which lets the library choose the size."""
    if value is not None:
        check_integer(value, name, 1, wrong_kind=ValueError)


def check_number(
    value: object, name: str, *, at_least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> None:
    """Raise TypeError unless `value` is a real number (no bool), ValueError unless it is finite and in the range."""
    # A bool is a Real: True would pass as 1
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    # An int above the largest float is not a finite number, either
    with contextlib.suppress(OverflowError):
        # The comparisons exclude nan, and infinite bounds the infinities themselves
        if is_number and at_least <= float(value) and above < float(value) < below:  # type: ignore[arg-type]
            return
    bounds = (("at least", at_least), ("above", above), ("below", below))
    wanted = " and ".join(f"{words} {bound:g}" for words, bound in bounds if math.isfinite(bound))
    shown, error = (repr(value), ValueError) if is_number else (kind_of(value), TypeError)
    raise error(f"{name} is {shown:.60}; it must be a finite number {wanted}".rstrip())


def check_scalar(value: object, name: str) -> float | None:
    """Return the number in `value`, which may be a tensor of one; raise unless it is finite.

    None for a tensor on an accelerator, because reading it would wait for the device, and for a traced one, which has
    no number.
    """
    if isinstance(value, Tensor):
        check_dense(value, name)
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
            described = f"shape {tuple(value.shape)} and dtype {value.dtype}"
            raise TypeError(f"{name} has {described}; it must be a number, or a tensor of one")
        if not may_read(value):
            return None
        value = value.item()
    check_number(value, name)
    return float(value)  # type: ignore[arg-type]


def check_loss_scale(value: object) -> None:
    """Raise unless `value` is a finite number other than 0, or a tensor of one such number."""
    # Usually it is the default
    if type(value) is float and value == 1:
        return
    if check_scalar(value, "loss_scale") == 0:
        raise ValueError("loss_scale is 0; gradients are multiplied and later divided by it: pass 1 for no scaling")


# Tensors


def is_dtensor(value: object) -> bool:
    """Return whether `value` is a DTensor, without an import of DTensor, which takes longer than this whole library."""
    # A program that has not imported the class cannot have an instance of it
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def check_dense(value: object, name: str) -> Tensor:
    """Return `value`; raise TypeError unless it is a strided tensor with data of its own."""
    if not isinstance(value, Tensor):
        return check_type(value, name, Tensor, "a tensor")
    # A short cut: most are plain, and every call comes here for each of its tensors
    is_plain = type(value) in PLAIN_TENSORS and value.layout is torch.strided
    if is_plain and not (value.is_nested or value.is_quantized or value.is_meta):
        return value
    if remedy := _why_not_dense(value, name):
        raise TypeError(f"{name} is {remedy}")
    return value


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is strided and has data of its own."""
    return not _why_not_dense(tensor, "")


def _why_not_dense(tensor: Tensor, name: str) -> str:
    """Return why a tensor is not dense and how to make it so; an empty string if it is."""
    # First, because a DTensor is strided, but its numbers are only this rank's
    if is_dtensor(tensor):
        return f"a DTensor; pass this rank's own tensor ({name}.to_local() or full_tensor())"
    if tensor.is_nested:
        return f"a nested tensor; pad it ({name}.to_padded_tensor(0.0)) and mark the padding as ignored targets"
    if tensor.is_quantized:
        return f"quantised ({tensor.dtype}); use {name}.dequantize()"
    if tensor.layout is not torch.strided:
        return f"sparse ({tensor.layout}); use {name}.to_dense()"
    if tensor.is_meta:
        return "on the meta device and has no data; create it on the device that computes"
    return ""


def has_own_functions(tensor: object) -> bool:
    """Return whether a tensor's class replaces torch's functions, so that `F.linear` may be more than a product."""
    kind: Any = type(tensor)
    # A DTensor computes what a plain tensor does; `_why_not_dense` is about where its numbers are
    if kind in (Tensor, nn.Parameter) or not isinstance(tensor, Tensor) or is_dtensor(tensor):
        return False
    # None where a class has disabled it, as nn.Parameter has
    functions = getattr(kind.__torch_function__, "__func__", None)
    inherited = getattr(Tensor.__torch_function__, "__func__", None)
    is_plain = functions is inherited or kind.__torch_function__ is nn.Parameter.__torch_function__
    if is_plain and kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return False
    # Those of `torch._subclasses` stand for plain tensors while torch.export traces
    return not kind.__module__.startswith("torch._subclasses")


LAYER = "use seqpar.LossCompute, which calls the layer itself"


def check_plain_products(tensor: object, name: str, way_out: str = LAYER) -> None:
    """Raise TypeError if the class of a weight or bias computes in its own way, such as with rounded numbers."""
    if has_own_functions(tensor):
        own = "a class with its own __torch_function__ or __torch_dispatch__, which need not multiply plainly"
        raise TypeError(f"{name} is {kind_of(tensor)}, {own}; {way_out}")


def check_floating(value: object, name: str) -> Tensor:
    """Return `value`; raise TypeError unless it is a dense tensor of float16, bfloat16, float32 or float64."""
    tensor = check_dense(value, name)
    # The 8-bit floats have neither sums nor products in torch
    if tensor.dtype in FLOATING:
        return tensor
    return check_dtype(value, name, FLOATING, "be a floating dtype: float16, bfloat16, float32 or float64")


def check_integer_target(value: object, name: str = "target", *, beside: Tensor | None = None) -> Tensor:
    """Return `value`; raise TypeError unless it is a dense tensor of class indices; see `CLASS_INDICES`.

    Args:
        beside: scores or hidden states; a floating target with as many dimensions is taken for class probabilities.
    """
    target = check_dense(value, name)
    if target.dtype in CLASS_INDICES:
        return target
    if beside is not None and target.is_floating_point() and target.dim() == beside.dim():
        raise TypeError(
            f"{name} has dtype {target.dtype} and shape {tuple(target.shape)}, as probabilities of classes; it must "
            "hold class indices: for probabilities use seqpar.linear_distillation with "
            f"TeacherLogProbs(lambda rows: {name}.flatten(0, -2)[rows].log()), or, of few classes, "
            "linear_cross_entropy(soft_target=SparseTarget(ids, probs))"
        )
    return check_dtype(value, name, CLASS_INDICES, f"hold class indices, int64: use {name}.long()")


def check_mask(value: object, name: str, **like: Tensor) -> None:
    """Raise TypeError unless `value` is a dense tensor of bools, ValueError unless it fits; see `check_like`."""
    mask = check_dtype(value, name, (torch.bool,), f"be bool, True where a score counts: use {name}.bool()")
    check_like(mask, name, **like)


def check_dtype(value: object, name: str, dtypes: tuple[torch.dtype, ...], must: str) -> Tensor:
    """Return `value`; raise TypeError unless it is a dense tensor of one of these dtypes."""
    tensor = check_dense(value, name)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must {must}")
    return tensor


def check_shapes(fits: bool, wanted: str, **tensors: Tensor) -> None:
    """Raise ValueError, with the shapes of the named tensors, unless `fits` is true."""
    if not fits:
        (name, first), *others = tensors.items()
        *shapes, last = [f"{tuple(first.shape)}", *(f"{other} {tuple(tensor.shape)}" for other, tensor in others)]
        listed = f"{', '.join(shapes)} and {last}; they" if others else f"{last}; it"
        raise ValueError(f"{name} has shape {listed} must be {wanted}")


def check_one_device(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all named tensors are on the first one's device."""
    (first, reference), *others = tensors.items()
    assert reference is not None
    for name, tensor in others:
        if tensor is not None and tensor.device != reference.device:
            places = f"{first} is on {reference.device} and {name} on {tensor.device}"
            raise ValueError(f"{places}; move them to one device")


def check_dim(dim: object, **tensor: Tensor) -> None:
    """Raise unless `dim` is a dimension of the tensor, the only keyword; it may be counted from the end."""
    check_integer(dim, "dim")
    ((name, given),) = tensor.items()
    if not -given.dim() <= dim < given.dim():  # type: ignore[operator]
        raise ValueError(f"dim is {dim}, and {name} has shape {tuple(given.shape)}, without such a dimension")


def check_joinable(dim: int, **tensors: Tensor) -> None:
    """Raise ValueError unless the named tensors can be joined along a dimension."""
    (first, reference), *_ = tensors.items()
    check_dim(dim, **{first: reference})
    for name, tensor in tensors.items():
        # Cut to size 0 in the one dimension that may differ
        fits = tensor.dim() == reference.dim() and tensor.narrow(dim, 0, 0).shape == reference.narrow(dim, 0, 0).shape
        check_shapes(fits, f"the same in all dimensions but {dim}", **{first: reference, name: tensor})


def check_like(tensor: Tensor, name: str, **other: Tensor) -> None:
    """Raise ValueError unless a tensor has the shape and device of another, the only keyword."""
    (like,) = other.values()
    both = {name: tensor} | other
    check_shapes(tensor.shape == like.shape, "the same", **both)
    check_one_device(**both)


def check_scores(**scores: Tensor) -> tuple[Tensor, ...]:
    """Return the scores in float32 or wider, in the order of their names.

    Raises:
        TypeError: one is not a dense floating tensor.
        ValueError: they differ in shape or device.
    """
    for name, score in scores.items():
        check_floating(score, name)
    first = next(iter(scores))
    for name, score in scores.items():
        check_like(score, name, **{first: scores[first]})
    return tuple(score.to(wide(score.dtype)) for score in scores.values())


def check_groups(group_size: int, at_least: int, **scores: Tensor) -> None:
    """Raise unless the scores, the only keyword, are a vector that `group_size` divides."""
    check_integer(group_size, "group_size", at_least)
    for vector in scores.values():
        fits = vector.dim() == 1 and len(vector) % group_size == 0
        wanted = f"a vector of whole groups of group_size {group_size}, one after the other: (groups x {group_size},)"
        check_shapes(fits, wanted, **scores)


def check_target(target: Tensor, **hidden: Tensor) -> None:
    """Raise unless targets are class indices of the leading shape of hidden states, the only keyword."""
    ((name, states),) = hidden.items()
    check_floating(states, name)
    check_integer_target(target, beside=states)
    fits = states.dim() >= 2 and states.shape[:-1] == target.shape
    wanted = "(N, D) with (N,), or (batch, time, D) with (batch, time): target must have hidden's leading shape"
    check_shapes(fits, wanted, **{name: states}, target=target)


def check_per_token(tensors: Mapping[str, object], target: Tensor) -> None:
    """Raise unless all are dense tensors whose first dimensions are target's shape, or hold one number per sentence."""
    for name, value in tensors.items():
        tensor = check_dense(value, name)
        # For a (B, T) batch, also one number for each of its B sentences
        fits = tensor.shape[: target.dim()] == target.shape or tensor.shape == target.shape[:1]
        wanted = f"a per-token tensor, whose first dimensions are target's shape {tuple(target.shape)}"
        if target.dim() > 1:
            wanted += f", or one number for each sentence, ({len(target)},)"
        check_shapes(fits, wanted, **{name: tensor})


# Entries of tensors


def check_entries(
    good: Tensor, values: Tensor, what: str, why: str, error: type[Exception] = ValueError, above: int = 0
) -> None:
    """Raise `error`, with the value and its position, for the first of the values where `good` is not true.

    Nothing is checked while a CUDA graph is captured, because no number can be read then.

    Args:
        what, why: the beginning and the end of the message, "`what` 9 at position (2,)`why`".
        above: how many rows of the batch come before these; the message counts positions in the whole batch.
    """
    if not is_capturing(good.device) and not good.all():
        # Read only now that the caller is about to see the error
        where = tuple((~good).nonzero()[0].tolist())
        value = values[where].item()
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        place = tuple(above + index if dim == 0 else index for dim, index in enumerate(where))
        raise error(f"{what} {shown} at position {place}{why}")


def check_segments(segment_ids: object, sequences: int | None = None, **scores: Tensor) -> None:
    """Raise unless `segment_ids` are integers below `sequences`, with the shape and device of any scores given.

    The range is checked on the CPU only: other devices would have to be waited for, and their indexing checks it.
    """
    segment_ids = check_dtype(segment_ids, "segment_ids", CLASS_INDICES, "be int64: use segment_ids.long()")
    for name, like in scores.items():
        check_like(segment_ids, "segment_ids", **{name: like})
    if sequences is None:
        return
    check_integer(sequences, "sequences", 0)
    if may_read(segment_ids):
        why = f" and there are {sequences} sequences; ids count from 0, and a negative one is for what does not count"
        check_entries(segment_ids.long() < sequences, segment_ids, "segment_ids has", why, IndexError)


def check_classes(ids: object, name: str, target: Tensor, counted: Tensor, classes: range, why: str) -> None:
    """Raise unless `ids` are class indices for each target, and within `classes` where the mask `counted` is true.

    Args:
        classes: a range that begins below 0 admits negative ids, which fill up a row; then a row has at least one id.
        why: the end of the message about an id outside the vocabulary.
    """
    ids = check_integer_target(ids, name)
    fewest = 1 if classes.start < 0 else 0
    fits = ids.dim() == target.dim() + 1 and ids.shape[:-1] == target.shape and ids.size(-1) >= fewest
    wanted = f"(target's shape, k) with k of at least {fewest}, and target's shape"
    check_shapes(fits, wanted, **{name: ids}, target=target)
    check_one_device(target=target, **{name: ids})
    if is_capturing(target.device):
        return
    ids = ids.detach().long()
    good = ~counted.unsqueeze(-1) | ((ids >= classes.start) & (ids < classes.stop))
    outside = f", outside the vocabulary [0, {classes.stop}); {why}"
    check_entries(good, ids, f"{name} has", outside, IndexError)


def check_range(target: Tensor, counted: Tensor, vocab_size: int, above: int = 0) -> None:
    """Raise IndexError if a target that is not ignored, where the mask `counted` is true, is not a class."""
    if is_capturing(target.device):
        return
    good = ~counted | (target.clamp(0, vocab_size - 1) == target)
    why = f" is outside the vocabulary [0, {vocab_size}) and is not the ignored one; check its size and ignore_index"
    check_entries(good, target, "target", why, IndexError, above)


def check_chunks(chunks: object, rows: int, device: torch.device) -> None:
    """Raise ValueError if a row is in two chunks, or twice in one: its gradients would overwrite each other.

    On an accelerator a device-side assertion checks this, so that the host does not wait for the device. Nothing is
    checked while a CUDA graph is captured.
    """
    chunks = check_type(chunks, "chunks", (list, tuple), "a list of slices or of index tensors")
    for i, chunk in enumerate(chunks):
        _check_chunk(chunk, f"chunks[{i}]", rows)
    if cover(chunks, rows) or is_capturing(device):
        return
    uses_N = _uses(chunks, rows, device)
    if not FACTS[device.type].is_host:
        torch._assert_async((uses_N <= 1).all(), "chunks overlap: each row may occur once")
    elif (uses_N > 1).any():
        row = int(uses_N.argmax())
        raise ValueError(f"chunks overlap: row {row} occurs {int(uses_N[row])} times; each row may occur once")


def _uses(chunks: Iterable[Chunk], rows: int, device: torch.device) -> Tensor:
    """Return how many times each row occurs (N,)."""
    uses_N = torch.zeros(rows, dtype=torch.int32, device=device)
    for chunk in chunks:
        if isinstance(chunk, slice):
            uses_N[chunk] += 1
        else:
            # Unlike `uses_N[chunk] += 1`, this counts an index twice if it is in the chunk twice
            uses_N.index_put_((chunk,), torch.ones_like(chunk, dtype=torch.int32), accumulate=True)
    return uses_N


def _check_chunk(chunk: object, name: str, rows: int) -> None:
    """Raise unless a chunk is a slice with a positive step, or a vector of int64 indices below `rows`."""
    if isinstance(chunk, slice):
        if chunk.step is not None and chunk.step < 1:
            raise ValueError(f"{name} is {chunk}; a slice of rows must have a positive step")
        return
    wanted = "a slice or a vector of int64 indices"
    chunk = check_type(chunk, name, Tensor, wanted)
    if chunk.dtype != torch.int64 or chunk.dim() != 1:
        raise TypeError(f"{name} is a Tensor of shape {tuple(chunk.shape)} and {chunk.dtype}; it must be {wanted}")
    # On an accelerator the indexing itself asserts this; reading the smallest index would wait for the device
    if is_on_host(chunk) and len(chunk) and not -rows <= int(chunk.min()) <= int(chunk.max()) < rows:
        raise IndexError(f"{name} has rows from {int(chunk.min())} to {int(chunk.max())}, and there are {rows} rows")


# Where the loss is called


def refuse_transforms(tensors: Iterable[object] = ()) -> None:
    """Raise RuntimeError inside `torch.func.grad`, `vmap` or `jvp`, and for tensors with a forward-mode tangent.

    The chunked loss cannot go through them: its gradient is stored, not traced.
    """
    if torch.compiler.is_compiling():
        return
    instead = "the chunked loss runs under plain autograd only: use torch.nn.functional.cross_entropy there"
    within = f"called inside a transform of torch.func, or by a batched gradient; {instead}"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(within)
    # Anything that is not a tensor is refused elsewhere
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        # is_grads_batched has its own vmap, which is not on the interpreter stack
        if torch._C._functorch.is_legacy_batchedtensor(tensor):
            raise RuntimeError(within)
        # -1 outside of forward_ad.dual_level, so that this costs nothing there
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(f"a tensor of shape {tuple(tensor.shape)} has a forward-mode derivative; {instead}")


def refuse_second_derivative(what: str, instead: str) -> None:
    """Raise RuntimeError in a backward that is recorded, because what forward stored for it has no graph."""
    if torch.is_grad_enabled():
        asked = f"{what} was asked for a second derivative (create_graph=True), and it keeps no graph of what it stores"
        raise RuntimeError(f"{asked}; use {instead} where you need one")


def refuse_second_backward(is_second: bool, what: str) -> None:
    """Raise RuntimeError if an earlier backward has taken what forward stored."""
    if is_second:
        again = f"backward went through {what} a second time"
        raise RuntimeError(f"{again}; call it again, or add the losses up first")


REENTRANT = (
    "the generator or the loss has a checkpoint with use_reentrant=True, whose backward cannot be a chunk's: pass "
    "use_reentrant=False to torch.utils.checkpoint.checkpoint"
)


def refuse_reentrant(result: Tensor) -> None:
    """Raise RuntimeError if the result's graph has a checkpoint that itself calls backward, and so writes `.grad`."""
    # torch's own, and the copies of it in Megatron, DeepSpeed and fairscale
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes_of_graph(result.grad_fn)):
        raise RuntimeError(REENTRANT)


def refuse_unknown_leaves(result: Tensor, known: Iterable[Tensor], used: str, instead: str) -> None:
    """Raise RuntimeError if the graph of a result has an unknown leaf, whose gradient would be lost silently."""
    ids = {id(t) for t in known}
    for leaf in leaves_of_graph(result):
        if id(leaf) not in ids:
            raise RuntimeError(f"{used} a tensor of shape {tuple(leaf.shape)} that needs a gradient {instead}")
