"""Place the layers of a model on different devices, and move their inputs there (model parallelism)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import nn

from seqpar.core.checks import check_module, check_type
from seqpar.core.structures import map_tensors
from seqpar.multi_device.devices import Device, check_devices, move


def place(model: nn.Module, parts: Mapping[str, Device]) -> nn.Module:
    """Move named submodules to devices and make their inputs follow; change the model in place and return it.

    Plain equivalent: `module.to(device)` for each submodule and `x = x.to(device)` in front of each call; the output of
    a submodule inside another placed one is sent back to the outer one's device. Autograd sees the transfers, so
    gradients arrive where the parameters are. Tensors in nested dict, list, tuple, NamedTuple and dataclass arguments
    are moved as well.

        seqpar.place(model, {"": "cuda:0", "src_embed": "cpu"})          # embedding on the CPU, the rest on the GPU
        seqpar.place(resnet, {"stem": 0, "layer1": 0, "layer2": 1, "head": 1})   # a stack cut in two

    Args:
        model: any module.
        parts: the device of each submodule, by its name in `named_modules` ("" is the model). An inner name takes
            precedence over an outer one. A second placement of a model replaces the first.

    Raises:
        TypeError: a model that is not a module, `parts` that is not a dict, a value that is not a device, or a tensor
            on the meta device.
        KeyError: a name that is not a submodule.
        ValueError: a parameter outside all named submodules, one tensor shared by submodules on different devices, or a
            device that does not exist.

    Example:
        >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
        >>> model = seqpar.place(model, {"0": "cpu", "1": "cpu"})  # with two GPUs: {"0": "cuda:0", "1": "cuda:1"}
        >>> model(torch.randint(50, (2, 6))).shape
        torch.Size([2, 6, 50])
    """
    check_module(model, "model")
    check_type(parts, "parts", Mapping, "a dict, such as {'': 'cuda:0', 'head': 'cpu'}")
    modules = dict(_named_modules(model))
    for name in parts:
        if name not in modules:
            raise KeyError(
                f"{name!r} is not a part of {type(model).__name__}; its parts are {[n for n in modules if n][:20]}"
            )
    devices = {name: check_devices([device], f"parts[{name!r}]")[0] for name, device in parts.items()}
    _check_tensors(model, devices)
    _remove_earlier_hooks(model)
    # Each tensor goes directly to its own device, so no device ever holds more than its own
    for name, module in modules.items():
        owner = _innermost(name, devices)
        if owner is not None:
            _move_own_tensors(module, devices[owner])
    for name, device in devices.items():
        modules[name].register_forward_pre_hook(partial(_bring_inputs, device), with_kwargs=True)
        # The output of a submodule goes back to the device where the module around it continues
        outer = _innermost(name.rpartition(".")[0], devices)
        if name and outer is not None and devices[outer] != device:
            modules[name].register_forward_hook(partial(_send_output, devices[outer]))
    return model


def _named_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield all submodules under all of their names, also those that a `ModelWithLoss` does not list twice."""
    yield name, module
    for own, child in module._modules.items():
        if child is not None:
            yield from _named_modules(child, f"{name}.{own}" if name else own)


def _move_own_tensors(module: nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers of the module, but not those of its submodules."""
    # `_apply` is what `module.to` calls; it replaces a parameter's data, so that optimizers and ties keep the parameter
    module._apply(lambda tensor: tensor.to(device), recurse=False)


def _innermost(name: str, devices: Mapping[str, torch.device]) -> str | None:
    """Return the longest name in `devices` that is the named module or one around it; None if there is none."""
    while name not in devices:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def _check_tensors(model: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Raise TypeError or ValueError unless every tensor has data and goes to exactly one device."""
    # By identity: a tied tensor is listed under each of its names
    homes: dict[int, tuple[str, torch.device]] = {}
    named = (
        (f"{name}.{own}" if name else own, tensor)
        for name, module in _named_modules(model)
        for own, tensor in (module._parameters | module._buffers).items()
        if tensor is not None
    )
    for name, tensor in named:
        owner = _innermost(name.rpartition(".")[0], devices)
        if tensor.is_meta:
            raise TypeError(f"{name} is on the meta device and has no numbers; use model.to_empty(device=...)")
        if owner is None:
            raise ValueError(f"{name} is in none of the parts {list(devices)}; add one for it, or '' for the rest")
        first, device = homes.setdefault(id(tensor), (name, devices[owner]))
        if device != devices[owner]:
            places = f"{first} and {name} are one tensor and were placed on {device} and {devices[owner]}"
            raise ValueError(f"{places}; place tied parts on one device, or untie them")


CallArguments = tuple[tuple[object, ...], dict[str, object]]
"""The positional arguments and the keywords of a call."""


def _bring_inputs(
    device: torch.device, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> CallArguments:
    """Move the arguments to the device: a forward pre-hook."""
    brought: CallArguments = map_tensors(lambda t: move(t, device), (args, kwargs))
    return brought


def _send_output(device: torch.device, _: nn.Module, __: object, output: object) -> object:
    """Move the output to the device: a forward hook."""
    return map_tensors(lambda t: move(t, device), output)


def _remove_earlier_hooks(model: nn.Module) -> None:
    """Remove the hooks of an earlier placement, which would still move tensors to its devices."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number, hook in list(hooks.items()):
                kind = getattr(hook, "func", None)
                # A hook that sends the model's own output somewhere belongs to the placement of a model around it
                if kind is _bring_inputs or (kind is _send_output and module is not model):
                    del hooks[number]
