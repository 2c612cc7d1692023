"""Linear maps made tile by tile in cache, with every transform of torch.func.

A kernel is a pair of plain functions, a linear map and its adjoint. Eager code runs it inside two
autograd Functions that are each other's derivative, so that only cache-sized scratch exists beside
the result. Traced code uses plain operations instead and never comes here: a Python loop over
tiles would unroll in a graph.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Kernel(NamedTuple):
    """A linear map ``(latent [d], shift []) -> numbers [num_rows]`` and its adjoint.

    ``rows(key, latent, shift, out)`` writes ``W latent + shift`` to ``out [num_rows]``;
    ``adjoint(key, gradient [num_rows])`` returns ``(W^T gradient [d], gradient.sum() [])``.
    """

    rows: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    adjoint: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    num_rows: int


def tiled(kernel: Kernel, key: Tensor, latent: Tensor, shift: Tensor) -> Tensor:
    """Apply a kernel as one differentiable operation that saves nothing but the key."""
    if kernel.num_rows == 0:
        return shift.expand(0)
    numbers: Tensor = _run(_Rows, kernel, key, latent, shift)
    return numbers


def _run(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply a Function; the one place where torch's missing types are met."""
    return function.apply(*args)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(kernel: Kernel, key: Tensor, latent: Tensor, shift: Tensor) -> Tensor:
        out = latent.new_empty(*key.shape, kernel.num_rows)
        for member in _members(key, latent, shift, out):
            kernel.rows(*member)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.kernel, key, _, _ = inputs
        ctx.save_for_backward(key)
        ctx.save_for_forward(key)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (key,) = ctx.saved_tensors
        return None, None, *_run(_Adjoint, ctx.kernel, key, gradient)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        (key,) = ctx.saved_tensors
        return _run(_Rows, ctx.kernel, key, tangents[2], tangents[3])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], kernel: Kernel, *tensors: Tensor) -> Any:
        return _run(_Rows, kernel, *_batched(info.batch_size, in_dims[1:], tensors)), 0


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(kernel: Kernel, key: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [kernel.adjoint(*member) for member in _members(key, gradient)]
        if key.dim() == 0:
            return pairs[0]
        latents, shifts = zip(*pairs, strict=True)
        return torch.stack(latents).view(*key.shape, -1), torch.stack(shifts).view(key.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.kernel, key, _ = inputs
        ctx.save_for_backward(key)
        ctx.save_for_forward(key)

    @staticmethod
    def backward(ctx: Any, latent: Tensor, shift: Tensor) -> tuple[Any, ...]:
        (key,) = ctx.saved_tensors
        return None, None, _run(_Rows, ctx.kernel, key, latent, shift)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        (key,) = ctx.saved_tensors
        return _run(_Adjoint, ctx.kernel, key, tangents[2])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], kernel: Kernel, *tensors: Tensor) -> Any:
        return _run(_Adjoint, kernel, *_batched(info.batch_size, in_dims[1:], tensors)), (0, 0)


def _members(key: Tensor, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Take an ensemble of any number of leading dimensions, none too, apart into members."""
    if key.dim() == 0:
        return [(key, *tensors)]
    flat = (tensor.flatten(0, key.dim() - 1) for tensor in (key, *tensors))
    return list(zip(*flat, strict=True))


def _batched(size: int, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> Any:
    """Give every tensor the ensemble dimension, as its first."""
    for tensor, dim in zip(tensors, in_dims, strict=True):
        yield tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
