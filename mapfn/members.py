"""Members side by side: trees with a leading member dimension, and how a state holds them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mapfn import trees
from mapfn.errors import message
from mapfn.types import Buffers, TrainState

# In an ensemble's state, the prefix of names whose tensors all members share.
_SHARED = "<shared>"


def stack(members: Sequence[Any]) -> Any:
    """Stack trees of tensors along a new first dimension; the results are autograd leaves.

    Args:
        members: at least one tree, all of one structure; latents, buffers, state, or a tuple.

    Returns:
        The same tree with ``[K, ...]`` tensors, detached, for ``torch.vmap`` and any optimizer.

    Raises:
        TypeError: no sequence of trees.
        ValueError: no members, or members that differ in structure or shapes.

    >>> stack([{"w": torch.zeros(2)}, {"w": torch.ones(2)}])["w"]
    tensor([[0., 0.],
            [1., 1.]])
    """
    _check_members(members)
    return trees.map_tensors(lambda *parts: torch.stack(parts).detach(), *members)


def _check_members(members: Any) -> None:
    fix = "pass a list of trees, [init(spec, seed)[0] for seed in range(8)] for example"
    if not isinstance(members, Sequence) or isinstance(members, str):
        got = type(members).__name__
        raise TypeError(message("stack", expected="a list of trees", got=got, fix=fix))
    if not members:
        raise ValueError(message("stack", expected="at least one member", got="none", fix=fix))
    shapes = [trees.shapes(member) for member in members]
    for index, other in enumerate(shapes):
        if other != shapes[0]:
            got = f"{other} as member {index}"
            expected = f"members like the first, {shapes[0]}"
            raise ValueError(message("stack", expected=expected, got=got, fix=fix))


def unstack(stacked: Any) -> list[Any]:
    """Take a stacked tree apart into its members, each an independent tree of leaves.

    Args:
        stacked: a tree of ``[K, ...]`` tensors.

    Returns:
        K trees; an empty tree has no members.

    Raises:
        ValueError: tensors that differ in their first dimension, or have none.

    >>> unstack({"w": torch.tensor([1.0, 2.0])})
    [{'w': tensor(1.)}, {'w': tensor(2.)}]
    """
    sizes = {len(tensor) if tensor.dim() else -1 for tensor in trees.tensors(stacked)}
    if len(sizes) > 1 or -1 in sizes:
        fix = "pass a tree that stack or vmap made"
        got = ", ".join("none" if size < 0 else str(size) for size in sorted(sizes))
        raise ValueError(message("unstack", expected="one first dimension", got=got, fix=fix))
    count = sizes.pop() if sizes else 0
    return [_member(stacked, index) for index in range(count)]


def _member(stacked: Any, index: int) -> Any:
    return trees.map_tensors(lambda tensor: tensor[index].detach().clone(), stacked)


def stack_states(states: Sequence[TrainState]) -> TrainState:
    """Stack states; what all members hold as one tensor in memory, a base for one, stays single.

    Its name in ``buffers`` or ``moments`` gets the prefix ``<shared>``.
    """
    stacked: TrainState = stack([state._replace(buffers={}, moments={}) for state in states])
    buffers = stack_buffers([state.buffers for state in states])
    return stacked._replace(
        buffers=buffers, moments=_stack_named([state.moments for state in states])
    )


def stack_buffers(members: Sequence[Buffers]) -> Buffers:
    """Stack the buffers of members, as :func:`stack_states` does."""
    groups = {name: [buffers[name] for buffers in members] for name in members[0]}
    return {name: _stack_named(own) for name, own in groups.items()}


def _stack_named(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stack dicts entry by entry; an entry that is one object in all of them stays single."""
    stacked = {}
    for name, first in members[0].items():
        shared = all(_is_one(member[name], first) for member in members)
        stacked[_SHARED + name if shared else name] = (
            first if shared else stack([member[name] for member in members])
        )
    return stacked


def _is_one(left: Any, right: Any) -> bool:
    """Say whether two entries are one in memory, as a base that is held by reference is."""
    if not isinstance(left, Tensor):
        return left is right
    same: bool = left.data_ptr() == right.data_ptr()
    return same and left.shape == right.shape


def _dims(named: Mapping[str, Any]) -> dict[str, int | None]:
    return {name: None if name.startswith(_SHARED) else 0 for name in named}


def member_dims(state: TrainState) -> Any:
    """Say which tensors have a member dimension, in the form that ``torch.vmap`` takes."""
    buffers = {name: _dims(own) for name, own in state.buffers.items()}
    found: dict[str, Any] = {"buffers": buffers, "moments": _dims(state.moments)}
    return TrainState._make(found.get(name, 0) for name in TrainState._fields)


def whole(state: TrainState) -> TrainState:
    """Give what is shared its own name again."""
    buffers = {group: _unprefixed(own) for group, own in state.buffers.items()}
    return state._replace(buffers=buffers, moments=_unprefixed(state.moments))


def _unprefixed(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(_SHARED): value for name, value in named.items()}


def stacked(*parts: Tensor) -> Tensor:
    """Stack along a new first dimension, gradients and all."""
    return torch.stack(parts)


def at(tree: Any, index: int) -> Any:
    """Take one member out of a stacked tree; what is no tensor is every member's."""
    return trees.map_tensors(lambda leaf: leaf[index] if isinstance(leaf, Tensor) else leaf, tree)


def take(state: TrainState, index: int) -> TrainState:
    """Take one member out of a state, what is shared by reference."""
    plain = at(state._replace(buffers={}, moments={}), index)
    buffers = {group: _taken_named(own, index) for group, own in state.buffers.items()}
    member: TrainState = plain._replace(buffers=buffers, moments=_taken_named(state.moments, index))
    return member


def _taken_named(named: Mapping[str, Any], index: int) -> dict[str, Any]:
    return {
        name: value if name.startswith(_SHARED) else at(value, index)
        for name, value in named.items()
    }
