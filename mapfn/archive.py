"""Trees as plain data and named tensors, for files that hold no code."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mapfn.errors import listing, message


def pack(tree: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """Take a tree apart into JSON data; its tensors are added to ``tensors`` by name.

    A tensor that is already there, the very object, is named and not added.

    Args:
        tree: of dicts, lists, tuples, NamedTuples, tensors, numbers, strings and None.
        prefix: of the names.
        tensors: where they go.

    Raises:
        TypeError: anything else in the tree.

    >>> import torch
    >>> tensors = {}
    >>> data = pack({"a": [torch.ones(1), 2]}, "train", tensors)
    >>> list(tensors), unpack(data, tensors)
    (['train.a.0'], {'a': [tensor([1.]), 2]})
    """
    if isinstance(tree, Tensor):
        return {"tensor": _named(tree, prefix, tensors)}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"value": tree}
    if isinstance(tree, dict) and all(type(key) in (str, int) for key in tree):
        rows = [[key, pack(part, f"{prefix}.{key}", tensors)] for key, part in tree.items()]
        return {"dict": rows}
    if isinstance(tree, tuple) and hasattr(tree, "_asdict"):
        fields = tree._asdict().items()
        rows = [[name, pack(part, f"{prefix}.{name}", tensors)] for name, part in fields]
        return {"type": [type(tree).__name__, rows]}
    if type(tree) in (list, tuple):
        rows = [pack(part, f"{prefix}.{i}", tensors) for i, part in enumerate(tree)]
        return {type(tree).__name__: rows}
    got, fix = f"{type(tree).__name__} at {prefix!r}", "convert that part, or leave it out"
    expected = "dicts with names or ints, lists, tuples, tensors and numbers"
    raise TypeError(message("save_checkpoint", expected=expected, got=got, fix=fix))


def _named(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    for known, other in tensors.items():
        if other is tensor:
            return known
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    return name


def unpack(data: Any, tensors: Mapping[str, Tensor], types: Sequence[type] = ()) -> Any:
    """Put a tree together that :func:`pack` took apart.

    Args:
        data: what it returned.
        tensors: by name.
        types: the NamedTuples that may be in it; data can name no other.

    Raises:
        ValueError: a NamedTuple that was not passed.
    """
    ((kind, rows),) = data.items()
    if kind == "tensor":
        return tensors[rows]
    if kind == "value":
        return rows
    if kind == "dict":
        return {key: unpack(part, tensors, types) for key, part in rows}
    if kind in ("list", "tuple"):
        parts = [unpack(part, tensors, types) for part in rows]
        return parts if kind == "list" else tuple(parts)
    name, fields = rows
    return _type(name, types)(**{field: unpack(part, tensors, types) for field, part in fields})


def _type(name: str, types: Sequence[type]) -> type:
    known = {cls.__name__: cls for cls in types}
    if name in known:
        return known[name]
    fix = f"pass types=[{name}]"
    expected = f"one of the NamedTuples {listing(known)}"
    raise ValueError(message("load_checkpoint", expected=expected, got=repr(name), fix=fix))
