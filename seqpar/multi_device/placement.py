"""Layers on different devices: inputs follow the layers by themselves (model parallelism)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.core.structures import map_tensors
from seqpar.core.tensor_checks import check_module
from seqpar.multi_device.devices import Device, check_devices


def place(model: nn.Module, parts: Mapping[str, Device]) -> nn.Module:
    """Moves named parts of a model to devices and lets their inputs follow. Changes the model and returns it.

    Plain equivalent: `part.to(device)` for each part and `x = x.to(device)` in front of each call, with what a part
    inside another returns sent back to the outer one's device. Autograd sees the transfers, so gradients arrive
    where the parameters are. Everything in nested dict, list, tuple, NamedTuple and dataclass arguments is moved.

        seqpar.place(model, {"": "cuda:0", "src_embed": "cpu"})          # embedding on the CPU, the rest on the GPU
        seqpar.place(resnet, {"stem": 0, "layer1": 0, "layer2": 1, "head": 1})   # a stack cut in two

    Args:
        model: any module.
        parts: name of a submodule (as in `named_modules`; "" is the model) -> device. The longest name wins.

    Raises:
        TypeError: a model that is no module; parts that are no dict; something else than a device; a tensor on the
            meta device.
        KeyError: a name that is no submodule.
        ValueError: a parameter in no part; one tensor shared by parts on different devices; a bad device.
    """
    check_module(model, "model")
    if not isinstance(parts, Mapping):
        raise TypeError(
            f"parts is a {type(parts).__name__}; it must be a dict, such as {{'': 'cuda:0', 'head': 'cpu'}}"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in parts:
        if name not in modules:
            raise KeyError(
                f"{name!r} is no part of {type(model).__name__}; its parts are {[n for n in modules if n][:20]}"
            )
    devices = {name: check_devices([device], f"parts[{name!r}]")[0] for name, device in parts.items()}
    _check_tensors(model, devices)
    for name, module in modules.items():  # straight to its place: no device ever holds more than its parts
        part = _part_of(name, devices)
        if part is not None:
            _move_own_tensors(module, devices[part])
    for name, device in devices.items():
        modules[name].register_forward_pre_hook(_bring_inputs(device), with_kwargs=True)
        outer = _part_of(name.rpartition(".")[0], devices) if name else None
        if outer is not None and devices[outer] != device:
            modules[name].register_forward_hook(_send_output(devices[outer]))
    return model


def _move_own_tensors(module: nn.Module, device: torch.device) -> None:
    module._apply(lambda tensor: tensor.to(device), recurse=False)


def _part_of(name: str, devices: Mapping[str, torch.device]) -> str | None:
    """The longest part that the named module or tensor lies in."""
    while name not in devices:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def _check_tensors(model: nn.Module, devices: Mapping[str, torch.device]) -> None:
    homes: dict[int, tuple[str, torch.device]] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        part = _part_of(name.rpartition(".")[0], devices)
        if tensor.is_meta:
            raise TypeError(f"{name} is on the meta device and has no numbers; use model.to_empty(device=...)")
        if part is None:
            raise ValueError(f"{name} lies in none of the parts {list(devices)}; add one for it, or '' for the rest")
        first, device = homes.setdefault(id(tensor), (name, devices[part]))
        if device != devices[part]:
            raise ValueError(
                f"{first} and {name} are one tensor and were placed on {device} and {devices[part]}; "
                "place tied parts on one device, or untie them"
            )


def _bring_inputs(device: torch.device) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        moved: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(lambda t: _to(t, device), (args, kwargs))
        return moved

    return hook


def _send_output(device: torch.device) -> Any:
    return lambda _, __, output: map_tensors(lambda t: _to(t, device), output)


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=device.type != "cpu")  # what runs on the CPU next waits for no stream
