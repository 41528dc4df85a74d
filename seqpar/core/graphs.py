"""Keep what happens inside a chunked loss out of the caller's graphs, those of `torch.compile` and of autograd.

Also find the leaves and other nodes of autograd's graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

REASON = (
    "this loss is computed in chunks, whose number depends on the targets, and stays outside the graph: leave out "
    "fullgraph=True; torch.export can contain only seqpar.linear_cross_entropy, on one device and without soft targets"
)


def outside_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function that `torch.compile` must call between two graphs: traced, it would be compiled many times.

    Like `torch.compiler.disable`, but without importing the compiler if nothing is compiled.
    """
    disabled: Any = None

    @functools.wraps(function)
    def outside(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        nonlocal disabled
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        # An export without dynamo calls even a disabled function, which would come here again
        if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
            raise RuntimeError(REASON)
        if disabled is None:
            # This puts the reason in the error of fullgraph=True; the compiler is imported by now, since it traces this
            torch._dynamo.graph_break(msg=REASON)
            disabled = torch.compiler.disable(function, reason=REASON)
        return disabled(*args, **kwargs)  # type: ignore[no-any-return]

    return outside


def graph_of_its_own() -> contextlib.AbstractContextManager[object]:
    """Hide the tensors that autograd saves in the block from saved-tensor hooks around it, such as a checkpoint's.

    A graph that begins and ends inside the loss is not the caller's. A checkpoint would recompute the whole loss for
    each chunk's backward, and would count the tensors of a check that only the first call makes.
    """
    # Our own hooks run twice for each saved tensor, which takes a fifth of the time of a small module's layers
    if not hooks_around():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(with_version, check_unchanged)


def hooks_around() -> bool:
    """Return whether autograd would pass the tensors that it saves to hooks; True if this torch does not tell."""
    innermost = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    # True: also while a graph is traced
    return innermost is None or innermost(True) is not None


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Return a context without autocast: an empty one if it is off, because entering another takes as long as a sum."""
    if not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def autocast_of_now(kinds: Iterable[str]) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager that applies the present autocast settings of these kinds of devices when entered."""
    states = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in kinds]
    cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each, enabled, dtype in states:
                stack.enter_context(torch.autocast(each, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield

    return enter


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor has been changed in place; 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def with_version(tensor: Tensor) -> tuple[Tensor, int]:
    """Return a tensor and how often it has been changed in place."""
    return tensor, version_of(tensor)


def check_unchanged(saved: tuple[Tensor, int]) -> Tensor:
    """Return the tensor; raise RuntimeError if it has been changed, which autograd with hooks does not notice."""
    tensor, version = saved
    if version_of(tensor) != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that is needed for the gradient was changed in place after its "
            "use in the generator or the criterion; leave out the in-place operation"
        )
    return tensor


def is_asked_for(node: Any) -> bool:
    """Return whether the backward under way reaches a node; None stands for a tensor without a gradient.

    `ctx.needs_input_grad` says only which arguments required one in forward; `torch.autograd.grad` may want fewer.
    """
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # torch does not answer for a leaf whose gradient `torch.autograd.grad` returns, and such a leaf is asked for
        return True


def leaves_of_graph(result: Tensor) -> list[Tensor]:
    """Return each leaf that needs a gradient and that the result depends on."""
    # Only AccumulateGrad, the node of a leaf, has this attribute and nothing before it
    ends = [getattr(node, "variable", None) for node, before in _walk(result.grad_fn) if not before]
    return [leaf for leaf in ends if leaf is not None]


def dtypes_of_graph(result: Tensor) -> set[torch.dtype]:
    """Return the dtypes of all tensors between the leaves and the result."""
    return {made.dtype for node in nodes_of_graph(result.grad_fn) for made in node._input_metadata}


def has_custom_nodes(result: Tensor) -> bool:
    """Return whether a node is the backward of an autograd function written in Python, other than seqpar's own."""
    functions = (getattr(node, "_forward_cls", None) for node in nodes_of_graph(result.grad_fn))
    return any(function is not None and not function.__module__.startswith("seqpar.") for function in functions)


def nodes_of_graph(first: Any) -> Iterator[Any]:
    """Yield the node and all those before it in forward, the nearest first."""
    return (node for node, _ in _walk(first))


def _walk(first: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the node and all those before it in forward, the nearest first, each with what is just before it."""
    if first is None:
        return
    todo = [first]
    # A node is reached once by each use of its result: without this set the search would take exponential time
    seen = {None, first}
    # The list grows during the loop
    for node in todo:
        # Read once, because every chunk asks for its leaves
        before = node.next_functions
        for parent, _ in before:
            if parent not in seen:
                seen.add(parent)
                todo.append(parent)
        yield node, before
