"""Linear maps made tile by tile in cache, with every transform of torch.func.

A kernel is a pair of plain functions, a linear map and its adjoint. Eager code runs it inside two
autograd Functions that are each other's derivative, so that only cache-sized scratch exists beside
the result. Traced code uses plain operations instead and never comes here: a Python loop over
tiles would unroll in a graph.
"""

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Bytes from which huge pages are asked for: some pages of 2 MiB.
_HUGE = 2**23


class Kernel(NamedTuple):
    """A linear map ``(latent [d], shift []) -> numbers [sum(sizes)]`` and its adjoint.

    ``rows(key, latent, shift, out)`` writes ``W latent + shift`` to ``out``, flat;
    ``adjoint(key, gradients)`` takes one gradient a part, flat, so that nobody has to copy them
    into one tensor, and returns ``(W^T gradient [d], gradient.sum() [])``.
    """

    rows: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    adjoint: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]]
    sizes: tuple[int, ...]
    """The parts into which the numbers are cut."""


def tiled(kernel: Kernel, key: Tensor, latent: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
    """Apply a kernel as one differentiable operation that saves nothing but the key."""
    parts: tuple[Tensor, ...] = _run(_Rows, kernel, key, latent, shift)
    return parts


def _run(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply a Function; the one place where torch's missing types are met."""
    return function.apply(*args)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(kernel: Kernel, key: Tensor, latent: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        out = _on_huge_pages(latent.new_empty(*key.shape, sum(kernel.sizes)))
        for member in _members(key, latent, shift, out):
            kernel.rows(*member)
        return torch.split(out, list(kernel.sizes), dim=-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.kernel, key, _, _ = inputs
        ctx.save_for_backward(key)
        ctx.save_for_forward(key)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (key,) = ctx.saved_tensors
        return None, None, *_run(_Adjoint, ctx.kernel, key, *gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        (key,) = ctx.saved_tensors
        return _run(_Rows, ctx.kernel, key, tangents[2], tangents[3])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], kernel: Kernel, *tensors: Tensor) -> Any:
        parts = _run(_Rows, kernel, *_batched(info.batch_size, in_dims[1:], tensors))
        return parts, (0,) * len(parts)


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(kernel: Kernel, key: Tensor, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [kernel.adjoint(own, parts) for own, *parts in _members(key, *gradients)]
        if key.dim() == 0:
            return pairs[0]
        latents, shifts = zip(*pairs, strict=True)
        return torch.stack(latents).view(*key.shape, -1), torch.stack(shifts).view(key.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.kernel, key, *_ = inputs
        ctx.save_for_backward(key)
        ctx.save_for_forward(key)

    @staticmethod
    def backward(ctx: Any, latent: Tensor, shift: Tensor) -> tuple[Any, ...]:
        (key,) = ctx.saved_tensors
        return None, None, *_run(_Rows, ctx.kernel, key, latent, shift)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        (key,) = ctx.saved_tensors
        return _run(_Adjoint, ctx.kernel, key, *tangents[2:])

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


def _on_huge_pages(blank: Tensor) -> Tensor:
    """Ask Linux to back a large tensor, not yet written, by huge pages.

    A third of the time of making 25.6 million weights goes into faulting in 4 KiB pages otherwise.
    It is advice: where the system does not take it, nothing changes.
    """
    size = blank.numel() * blank.element_size()
    if blank.device.type == "cpu" and size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        start = -(-blank.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (blank.data_ptr() + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return blank


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
