"""Ensembles: many latents (and maps) as one tree with a leading member dimension, for vmap."""

from collections.abc import Sequence
from typing import Any

import torch

from mapfn import trees
from mapfn.errors import message


def stack(members: Sequence[Any]) -> Any:
    """Stack trees of tensors along a new first dimension; the results are autograd leaves.

    Args:
        members: at least one tree, all of one structure; latents, buffers, state, or a tuple.

    Returns:
        The same tree with ``[K, ...]`` tensors, detached, for ``torch.vmap`` and any optimizer.

    Raises:
        ValueError: no members.

    >>> stack([{"w": torch.zeros(2)}, {"w": torch.ones(2)}])["w"]
    tensor([[0., 0.],
            [1., 1.]])
    """
    if not members:
        fix = "pass a list of trees, [init(spec, seed)[0] for seed in range(8)] for example"
        raise ValueError(message("stack", expected="at least one member", got="none", fix=fix))
    return trees.map_tensors(lambda *parts: torch.stack(parts).detach(), *members)


def unstack(stacked: Any) -> list[Any]:
    """Take a stacked tree apart into its members, each an independent tree of leaves.

    Args:
        stacked: a tree of ``[K, ...]`` tensors.

    Returns:
        K trees; an empty tree has no members.

    Raises:
        ValueError: tensors that differ in their first dimension.

    >>> unstack({"w": torch.tensor([1.0, 2.0])})
    [{'w': tensor(1.)}, {'w': tensor(2.)}]
    """
    sizes = {len(tensor) for tensor in trees.tensors(stacked)}
    if len(sizes) > 1:
        fix = "pass a tree that stack or vmap made"
        got = f"{sorted(sizes)}"
        raise ValueError(message("unstack", expected="one first dimension", got=got, fix=fix))
    count = sizes.pop() if sizes else 0
    return [_member(stacked, index) for index in range(count)]


def _member(stacked: Any, index: int) -> Any:
    return trees.map_tensors(lambda tensor: tensor[index].detach().clone(), stacked)
