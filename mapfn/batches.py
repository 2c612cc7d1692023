"""Batches of data that is in memory, in an order that follows from a seed and the epoch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mapfn import seeds, trees
from mapfn.errors import message


def batches(
    data: Any, batch_size: int, *, seed: int | Sequence[int] | None = 0, drop_last: bool = True
) -> Callable[[int], Iterator[Any]]:
    """Cut tensors into batches, in another order every epoch.

    The order is the same on every machine, and that of epoch 7 does not hang on whether epochs 0
    to 6 were run: a training that is resumed sees the batches it would have seen.

    Args:
        data: a tree of tensors ``[n, ...]``, ``(inputs, targets)`` for one.
        batch_size: samples a batch, at most n.
        seed: any int; None for the order of the data, in every epoch; or one a member of an
            ensemble, for batches ``[K, batch_size, ...]``, each member in an order of its own.
        drop_last: leave out the last batch where it is smaller; a compiled step would compile
            once more for it.

    Returns:
        A function from the epoch to an iterator over batches, trees like the data.

    Raises:
        TypeError: a seed of another kind.
        ValueError: tensors of different lengths, or a batch size that does not fit.

    >>> of_epoch = batches((torch.arange(6), torch.arange(6)), 2)
    >>> [inputs.tolist() for inputs, targets in of_epoch(0)]
    [[3, 1], [4, 5], [2, 0]]
    """
    sizes = sorted({len(tensor) for tensor in trees.tensors(data)})
    if len(sizes) != 1:
        fix, got = "pass tensors with one first dimension", f"lengths {sizes}"
        raise ValueError(message("batches(data)", expected="samples", got=got, fix=fix))
    (size,) = sizes
    if type(batch_size) is not int or not 1 <= batch_size <= size:
        expected, fix = f"an int from 1 to {size}", "pass a smaller batch"
        where = "batches(batch_size=)"
        raise ValueError(message(where, expected=expected, got=repr(batch_size), fix=fix))
    given: Any = seed
    if given is not None and not isinstance(given, int | Sequence):
        expected, got = "an int, None, or a list of ints", repr(seed)
        fix = "pass int(seed)"
        raise TypeError(message("batches(seed=)", expected=expected, got=got, fix=fix))
    most = size // batch_size * batch_size if drop_last else size

    def of_epoch(epoch: int) -> Iterator[Any]:
        for index in _order(size, seed, epoch)[..., :most].split(batch_size, dim=-1):
            yield trees.map_tensors(lambda tensor, index=index: tensor[index], data)

    return of_epoch


def _order(size: int, seed: int | Sequence[int] | None, epoch: int) -> Tensor:
    if seed is None:
        return torch.arange(size)
    if isinstance(seed, Sequence):
        return torch.stack([_order(size, own, epoch) for own in seed])
    key = seeds.key(seeds.derive(seed, "batches", str(epoch)))
    return torch.argsort(seeds.words(key, 0, size), stable=True)
