"""Specs as JSON: plain data out, the same spec back in, no code run from a file."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from mapfn import integrity
from mapfn.decoders import full
from mapfn.errors import listing, message
from mapfn.groups import Group
from mapfn.layout import Layout, Leaf
from mapfn.mappers.frozen import frozen
from mapfn.mappers.hadamard import hadamard
from mapfn.mappers.hashed import hashed
from mapfn.mappers.identity import identity
from mapfn.mappers.mlp import mlp
from mapfn.mappers.orthogonal import orthogonal
from mapfn.mappers.residual_mlp import residual_mlp
from mapfn.modulation import additive, affine, modulate_low_rank
from mapfn.scales import Initial
from mapfn.spec import Spec

SCHEMA = 1

# What plain Python raises where a value is of another kind than it should be.
_BROKEN = (KeyError, IndexError, TypeError, AttributeError, RecursionError, OverflowError)
_PARTS = ("mapper", "modulation", "decoder")
_MAPPERS = (hadamard, orthogonal, hashed, mlp, residual_mlp, identity, frozen)
_OWN = (*_MAPPERS, additive, affine, modulate_low_rank, full)


def spec_to_json(spec: Spec) -> str:
    """Write a spec as one JSON object, on one line.

    A part that is not mapfn's own, your mapper say, is written as ``module:Class`` with its fields.

    Raises:
        TypeError: a part whose fields are not plain data.

    >>> import torch
    >>> from mapfn import make_spec
    >>> spec = make_spec(torch.nn.Linear(3, 2), latent_dim=4)
    >>> spec_from_json(spec_to_json(spec)) == spec
    True
    """
    data = {
        "schema": SCHEMA,
        "leaves": [dataclasses.asdict(leaf) for leaf in spec.layout.leaves],
        "structure": _structure_to_data(spec.layout.structure),
        "groups": [_group_to_data(group) for group in spec.groups],
    }
    return json.dumps(data, allow_nan=False)


def spec_from_json(text: str, mappers: Sequence[type] = ()) -> Spec:
    """Read a spec that :func:`spec_to_json` wrote.

    Args:
        text: the JSON object.
        mappers: classes that are not mapfn's own and that the file may use: mappers, modulations,
            decoders, NamedTuples of the target. A file can name no other.

    Raises:
        ValueError: no JSON, another schema, a class that was not passed, or data that do not fit
            together.
    """
    fix = "pass what spec_to_json returned"
    try:
        data = json.loads(text)
        schema = data["schema"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        got = f"{type(error).__name__}: {error}"
        raise ValueError(message("spec", expected="a spec's JSON", got=got, fix=fix)) from error
    if schema != SCHEMA:
        fix, got = "read it with the version of mapfn that wrote it", f"schema {schema!r}"
        raise ValueError(message("spec", expected=f"schema {SCHEMA}", got=got, fix=fix))
    classes = {_class_name(cls): cls for cls in (*_OWN, *mappers)}
    try:
        return integrity.check_spec(_spec(data, classes))
    except _BROKEN as error:
        got = f"{type(error).__name__}: {error}"
        raise ValueError(message("spec", expected="a whole spec", got=got, fix=fix)) from error


def _spec(data: dict[str, Any], classes: dict[str, type]) -> Spec:
    leaves = {row["name"]: _leaf(row) for row in data["leaves"]}
    structure = _structure_from_data(data["structure"], classes)
    groups = tuple(_group(row, leaves, classes) for row in data["groups"])
    return Spec(Layout(tuple(leaves.values()), structure), groups)


def _class_name(cls: type) -> str:
    return cls.__name__ if cls in _OWN else f"{cls.__module__}:{cls.__qualname__}"


def _class(name: str, classes: dict[str, type]) -> type:
    if name in classes:
        return classes[name]
    fix = f"pass mappers=[the class {name}], if you trust it"
    known = f"one of {listing(classes, limit=20)}"
    raise ValueError(message("spec_from_json", expected=known, got=repr(name), fix=fix))


def _leaf(row: dict[str, Any]) -> Leaf:
    tuples = {name: _tuple(row[name]) for name in ("shape", "aliases")}
    return Leaf(**(row | tuples | {"initial": Initial(*row["initial"])}))


def _group_to_data(group: Group) -> dict[str, Any]:
    row = {
        field.name: getattr(group, field.name) for field in dataclasses.fields(group) if field.init
    }
    row |= {name: _part_to_data(row[name]) for name in _PARTS}
    return row | {"leaves": [leaf.name for leaf in group.leaves]}


def _group(row: dict[str, Any], leaves: dict[str, Leaf], classes: dict[str, type]) -> Group:
    parts = {name: _part(row[name], classes) for name in _PARTS}
    tuples = {name: _tuple(row[name]) for name in ("scales", "bases")}
    own = tuple(leaves[name] for name in _tuple(row["leaves"]))
    return Group(**(row | parts | tuples | {"leaves": own}))


def _part_to_data(part: Any) -> dict[str, Any] | None:
    if part is None:
        return None
    if not dataclasses.is_dataclass(part):
        fix = "make it a frozen dataclass"
        got = type(part).__name__
        raise TypeError(message("spec_to_json", expected="a dataclass", got=got, fix=fix))
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {"type": _class_name(type(part)), **fields}


def _part(data: dict[str, Any] | None, classes: dict[str, type]) -> Any:
    if data is None:
        return None
    fields = {name: _hashable(value) for name, value in data.items() if name != "type"}
    return _class(data["type"], classes)(**fields)


def _tuple(value: Any) -> tuple[Any, ...]:
    """Turn a list into a tuple; a string, say, has elements too, but is none."""
    if isinstance(value, list):
        return tuple(value)
    raise TypeError(f"expected a list, got {value!r}")


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _structure_to_data(structure: Any) -> Any:
    """Write the nested tuples of :mod:`mapfn.trees`, classes by name."""
    if structure is None or structure[0] in ("leaf", "none"):
        return structure
    kind, keys, parts = structure
    name = kind if isinstance(kind, str) else {"namedtuple": _class_name(kind)}
    return [name, keys, [_structure_to_data(part) for part in parts]]


def _structure_from_data(data: Any, classes: dict[str, type]) -> Any:
    if data is None or data[0] in ("leaf", "none"):
        return None if data is None else tuple(data)
    kind, keys, parts = data
    kind = _class(kind["namedtuple"], classes) if isinstance(kind, dict) else kind
    return (kind, _tuple(keys), tuple(_structure_from_data(part, classes) for part in parts))
