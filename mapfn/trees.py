"""Trees of tensors: names instead of leaf positions, and structures that are plain data.

optree sorts dict keys and torch's pytree keeps their order, so nothing here trusts a position: a
leaf is its name, and a structure is nested tuples that can be compared, hashed and written down.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

from mapfn.errors import message

Structure: TypeAlias = tuple[Any, ...]
"""``("leaf", name)``, ``("none",)``, or ``(kind, keys, substructures)`` with kind ``dict``,
``ordered``, ``list``, ``tuple`` or a NamedTuple class."""

_KINDS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", list: "list", tuple: "tuple"}


def describe(tree: Any) -> tuple[Structure, dict[str, Tensor]]:
    """Take a tree apart into its structure and its tensors by dotted name.

    >>> structure, leaves = describe({"a": [torch.zeros(2)], "b": None})
    >>> list(leaves), structure
    (['a.0'], ('dict', ('a', 'b'), (('list', (0,), (('leaf', 'a.0'),)), ('none',))))
    """
    leaves: dict[str, Tensor] = {}
    structure = _describe(tree, (), leaves)
    return structure, leaves


def _describe(tree: Any, path: tuple[str, ...], leaves: dict[str, Tensor]) -> Structure:
    name = ".".join(path)
    if tree is None:
        return ("none",)
    if isinstance(tree, Tensor):
        if name in leaves:
            fix = "rename a key so that dotted names are unique"
            raise ValueError(
                message("target", expected="unique leaf names", got=repr(name), fix=fix)
            )
        leaves[name] = tree
        return ("leaf", name)
    keys, children = _children(tree, name)
    parts = (
        _describe(child, (*path, str(k)), leaves) for k, child in zip(keys, children, strict=True)
    )
    return (_KINDS.get(type(tree), type(tree)), keys, tuple(parts))


def _children(tree: Any, name: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    if type(tree) in (dict, OrderedDict):
        if all(type(k) in (str, int) for k in tree):
            return tuple(tree), tuple(tree.values())
        got, fix = f"keys {list(tree)!r} at {name!r}", "use string or integer keys"
        raise TypeError(message("target", expected="dict keys str or int", got=got, fix=fix))
    if isinstance(tree, tuple) and optree.is_namedtuple(tree):
        return tuple(optree.namedtuple_fields(type(tree))), tuple(tree)
    if type(tree) in (list, tuple):
        return tuple(range(len(tree))), tuple(tree)
    got = f"{type(tree).__name__} at {name or '(root)'!r}"
    expected = "an nn.Module or a tree of dict, list, tuple, NamedTuple and tensors"
    raise TypeError(message("target", expected=expected, got=got, fix="convert that part"))


def build(structure: Structure, leaves: Mapping[str, Tensor]) -> Any:
    """Put a tree together again; plain Python, so that it is traced away.

    >>> build(("list", (0,), (("leaf", "0"),)), {"0": torch.ones(1)})
    [tensor([1.])]
    """
    kind = structure[0]
    if kind == "leaf":
        return leaves[structure[1]]
    if kind == "none":
        return None
    parts = [build(part, leaves) for part in structure[2]]
    if kind == "list":
        return parts
    if kind == "tuple":
        return tuple(parts)
    if kind == "dict" or kind == "ordered":
        pairs = zip(structure[1], parts, strict=True)
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    return kind(*parts)


def map_tensors(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply a function to the tensors at the same place of trees of one structure.

    >>> map_tensors(lambda a, b: a + b, {"x": torch.ones(1)}, {"x": torch.ones(1)})
    {'x': tensor([2.])}
    """
    return optree.tree_map(function, *trees)


def shapes(tree: Any) -> Any:
    """Return the tree of its tensors' shapes, to compare and to print.

    >>> shapes({"a": torch.ones(2, 3)})
    {'a': (2, 3)}
    """
    return map_tensors(lambda leaf: tuple(getattr(leaf, "shape", ())), tree)


def tensors(tree: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of any tree, other leaves left out.

    >>> len(list(tensors({"a": torch.ones(1), "b": [2, torch.zeros(1)]})))
    2
    """
    leaves: list[Any] = []
    # Dynamo cannot trace optree.tree_leaves over an empty dict (optree 0.20), but it can tree_map.
    optree.tree_map(leaves.append, tree)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            yield leaf


def outputs(tree: Any) -> Iterator[Tensor]:
    """Iterate over the floating-point tensors of what a target returns, in its own order.

    Tuples, lists and mappings are entered, a HuggingFace ``ModelOutput`` too; anything else, a
    cache of keys and values for one, is left out.

    >>> [len(part) for part in outputs({"a": torch.ones(1), "b": (torch.ones(2), None)})]
    [1, 2]
    """
    if isinstance(tree, Tensor):
        if tree.is_floating_point():
            yield tree
    elif isinstance(tree, Mapping):
        for child in tree.values():
            yield from outputs(child)
    elif isinstance(tree, list | tuple):
        for child in tree:
            yield from outputs(child)


def plain(tree: Any) -> Any:
    """Turn what a target returns into dicts, lists and tuples of its floating-point tensors.

    >>> from collections import OrderedDict
    >>> plain(OrderedDict(a=(torch.ones(1), None)))
    {'a': (tensor([1.]),)}
    """
    if isinstance(tree, Mapping):
        return {name: plain(child) for name, child in tree.items() if _holds(child)}
    if isinstance(tree, list | tuple):
        kept = [plain(child) for child in tree if _holds(child)]
        return kept if isinstance(tree, list) else tuple(kept)
    return tree


def _holds(tree: Any) -> bool:
    return next(outputs(tree), None) is not None
