"""Validation: bad input is refused before any work, eagerly and in one place."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mapfn.errors import differing, listing, message
from mapfn.layout import layout, tensors_by_name
from mapfn.spec import Spec
from mapfn.types import MapBuffers


def check_seed(seed: Any) -> None:
    """Refuse a seed that is not an int.

    Raises:
        TypeError: so it is; a bool, a float, a generator.
    """
    if type(seed) is not int:
        fix = "pass an int; mapfn derives every number from it and the group's name"
        raise TypeError(message("init(seed=)", expected="an int", got=repr(seed), fix=fix))


def target_tensors(spec: Spec, target: Any) -> dict[str, Tensor]:
    """Return the target's tensors where a base needs them, checked against the spec.

    Raises:
        ValueError: no target where one is needed, another target, or one without values.
    """
    wanted = [
        leaf.name
        for group in spec.groups
        for leaf, base in zip(group.leaves, group.bases, strict=True)
        if base == "target"
    ]
    if target is None:
        if not wanted:
            return {}
        fix = "call init(spec, seed, target=the module that holds them)"
        expected = f"the target that holds the base of {listing(wanted)}"
        raise ValueError(message("init(target=)", expected=expected, got="None", fix=fix))
    check_target(spec, target, where="init(target=)")
    tensors = tensors_by_name(target)
    if empty := [name for name in wanted if tensors[name].is_meta]:
        fix, got = "pass the target with its values", f"{listing(empty)} on meta"
        raise ValueError(message("init(target=)", expected="tensors with values", got=got, fix=fix))
    return tensors


def check_target(spec: Spec, target: Any, where: str) -> None:
    """Refuse a target whose names, shapes or dtypes are not the spec's.

    Raises:
        ValueError: so it is.
    """
    wanted = {leaf.name: (leaf.shape, leaf.dtype) for leaf in spec.layout.leaves}
    had = {leaf.name: (leaf.shape, leaf.dtype) for leaf in layout(target).leaves}
    if wrong := differing(wanted, had):
        fix = "pass the target that the spec was made from"
        raise ValueError(message(where, expected="the spec's target", got=wrong, fix=fix))
    for name, expected in wanted.items():
        if had[name] != expected:
            got, fix = f"{had[name]} for {name!r}", "make a new spec for this target"
            raise ValueError(message(where, expected=f"{expected}", got=got, fix=fix))


def check_latents(spec: Spec, latents: Any) -> None:
    """Refuse latents with a wrong group, shape or dtype.

    Raises:
        TypeError: not a dict of floating-point tensors.
        ValueError: missing or extra groups, or another length.
    """
    where, fix = "latents", "make them with init(spec, seed) of the same spec"
    wanted = {group.name: (group.latent_dim,) for group in spec.trained_groups}
    _check_names(where, wanted, latents, fix)
    for name, shape in wanted.items():
        latent = latents[name]
        if not isinstance(latent, Tensor) or not latent.is_floating_point():
            got = str(latent.dtype) if isinstance(latent, Tensor) else type(latent).__name__
            expected = "a floating-point tensor"
            raise TypeError(message(f"latents[{name!r}]", expected=expected, got=got, fix=fix))
        if tuple(latent.shape) != shape:
            got, expected = f"shape {tuple(latent.shape)}", f"shape {shape}"
            advice = fix + ", and use torch.vmap for an ensemble"
            raise ValueError(message(f"latents[{name!r}]", expected=expected, got=got, fix=advice))


def check_buffers(spec: Spec, buffers: Any) -> None:
    """Refuse buffers that another spec made.

    Raises:
        TypeError: not a dict, or integers that were cast.
        ValueError: missing or extra groups or names, or another shape.
    """
    fix = "make them with init(spec, seed) of the same spec"
    _check_names("buffers", [group.name for group in spec.groups], buffers, fix)
    for group in spec.groups:
        where, own = f"buffers[{group.name!r}]", buffers[group.name]
        wanted = group.buffer_shapes
        _check_names(where, wanted, own, fix)
        for name, shape in wanted.items():
            _check_shape(f"{where}[{name!r}]", shape, own[name], fix)
            if name in group.integer_buffers and own[name].is_floating_point():
                got, advice = str(own[name].dtype), fix + ", and cast latents only"
                raise TypeError(
                    message(f"{where}[{name!r}]", expected="integers", got=got, fix=advice)
                )


def check_devices(latents: Mapping[str, Tensor], buffers: Mapping[str, MapBuffers]) -> None:
    """Refuse latents on another device than the buffers of their map.

    Raises:
        ValueError: so they are.
    """
    for group, latent in latents.items():
        for name, tensor in buffers[group].items():
            if tensor.device != latent.device:
                where, fix = f"latents[{group!r}]", "move both, latents and buffers, to one device"
                expected = f"the device of buffers[{group!r}][{name!r}], {tensor.device}"
                got = str(latent.device)
                raise ValueError(message(where, expected=expected, got=got, fix=fix))


def check_tensors(where: str, wanted: Mapping[str, Tensor], got: Any, fix: str) -> None:
    """Refuse named tensors with a missing, extra or misspelt name, or another exact shape.

    Raises:
        TypeError: not a dict of tensors.
        ValueError: wrong names or shapes.
    """
    _check_names(where, wanted, got, fix)
    for name, tensor in wanted.items():
        _check_shape(f"{where}[{name!r}]", tuple(tensor.shape), got[name], fix)


def _check_shape(where: str, shape: tuple[int, ...], got: Any, fix: str) -> None:
    if not isinstance(got, Tensor):
        kind = type(got).__name__
        raise TypeError(message(where, expected="a tensor", got=kind, fix=fix))
    if tuple(got.shape) != shape:
        had = f"shape {tuple(got.shape)}"
        raise ValueError(message(where, expected=f"shape {shape}", got=had, fix=fix))


def _check_names(where: str, wanted: Iterable[str], got: Any, fix: str) -> None:
    if not isinstance(got, Mapping):
        kind = type(got).__name__
        raise TypeError(message(where, expected="a dict", got=kind, fix=fix))
    names = list(wanted)
    if len(got) == len(names) and all(name in got for name in names):
        return
    expected = f"the names {listing(names)}"
    raise ValueError(message(where, expected=expected, got=differing(names, got), fix=fix))


def check_module(target: Any, where: str) -> nn.Module:
    """Return the target where it is a module.

    Raises:
        TypeError: it is not.
    """
    if isinstance(target, nn.Module):
        return target
    fix = "pass the nn.Module, or a function f(params, state, *args) -> (outputs, state)"
    raise TypeError(message(where, expected="a module", got=type(target).__name__, fix=fix))


def is_traced() -> bool:
    """Say whether torch.compile or torch.export is tracing, where nothing may be raised."""
    return torch.compiler.is_compiling()
