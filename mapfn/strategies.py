"""Strategies: which leaves share a latent vector, and how a budget of latents is split.

A strategy is data; :func:`assign` turns it into groups of leaf names. Patterns are shell globs
over every name of a leaf, its aliases included.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import Any, NamedTuple, TypeAlias

from mapfn.errors import listing, message
from mapfn.layout import Layout, Leaf

Overrides: TypeAlias = Mapping[str, Mapping[str, Any]]
"""``{group name or glob: {argument of make_spec: value}}``."""


@dataclass(frozen=True)
class slvt:
    """One latent vector for all leaves (single latent vector training, arXiv 2602.19134).

    >>> slvt()
    slvt()
    """


@dataclass(frozen=True, eq=False)
class layerwise:
    """One latent vector for the leaves of each module, named by the module's path.

    >>> layerwise({"fc*": {"latent_dim": 16}}).overrides["fc*"]
    {'latent_dim': 16}
    """

    overrides: Overrides | None = None
    """Arguments of ``make_spec`` that some groups have for themselves."""


@dataclass(frozen=True, eq=False)
class grouped:
    """Groups of your own: ``{group: [leaf names or globs]}``, or ``...`` for all other leaves.

    >>> grouped({"head": ["fc.*"], "body": ...}, {"head": {"latent_dim": 8}}).groups["head"]
    ['fc.*']
    """

    groups: Mapping[str, Sequence[str] | EllipsisType]
    """Every leaf belongs to exactly one of them."""
    overrides: Overrides | None = None
    """Arguments of ``make_spec`` that some groups have for themselves."""


@dataclass(frozen=True)
class budget:
    """A total of latents, split over the groups by the square root of their size.

    The parts add up to exactly ``min(total, numbers)``: largest remainders, and what a small
    group cannot hold goes to the others. Identity and frozen groups stand outside.

    >>> split(budget(10), {"small": 2, "large": 400})
    {'small': 1, 'large': 9}
    """

    total: int
    """Trained numbers in all, at least one a group."""


Strategy: TypeAlias = slvt | layerwise | grouped


class Assigned(NamedTuple):
    """One group of leaves, and the arguments that it alone has."""

    name: str
    leaves: tuple[Leaf, ...]
    overrides: Mapping[str, Any]


def named(strategy: str | Strategy) -> Strategy:
    """Turn ``"slvt"`` or ``"layerwise"`` into the strategy; pass a strategy through.

    >>> named("slvt")
    slvt()
    """
    if isinstance(strategy, slvt | layerwise | grouped):
        _check_strategy(strategy)
        return strategy
    known: dict[Any, Strategy] = {"slvt": slvt(), "layerwise": layerwise()}
    if isinstance(strategy, str) and strategy in known:
        return known[strategy]
    fix = "use one of those, or mapfn.grouped({...}) for your own groups"
    expected = "'slvt', 'layerwise' or a strategy"
    raise ValueError(
        message("make_spec(strategy=)", expected=expected, got=repr(strategy), fix=fix)
    )


def _check_strategy(strategy: Strategy) -> None:
    """Refuse arguments that are not the dicts that they should be."""
    if isinstance(strategy, slvt):
        return
    kind = type(strategy).__name__
    example = '{"body": ["*.weight"], "rest": ...}'
    if isinstance(strategy, grouped) and not _is_named(strategy.groups):
        raise TypeError(
            message(
                "grouped(groups=)",
                expected="{group name: patterns}",
                got=repr(strategy.groups),
                fix=f"pass {example}",
            )
        )
    own = strategy.overrides
    if own is not None and not (_is_named(own) and all(map(_is_named, own.values()))):
        fix, where = 'pass {"fc*": {"latent_dim": 16}}, say', f"{kind}(overrides=)"
        expected = "{group name or glob: {argument of make_spec: value}}"
        raise TypeError(message(where, expected=expected, got=repr(own), fix=fix))


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def assign(strategy: Strategy, layout: Layout) -> list[Assigned]:
    """Divide the leaves of a layout into groups.

    Raises:
        ValueError: a group or glob that names no leaf, a leaf in two groups or in none.
    """
    groups = _groups(strategy, layout)
    overrides = {} if isinstance(strategy, slvt) else dict(strategy.overrides or {})
    for pattern in overrides:
        if not any(_fits(name, pattern) for name in groups):
            fix = f"name one of the groups {listing(groups)}"
            where = f"strategy overrides {pattern!r}"
            raise ValueError(
                message(where, expected="a group's name or glob", got="no match", fix=fix)
            )
    return [
        Assigned(name, tuple(leaves), _merged(name, overrides)) for name, leaves in groups.items()
    ]


def _merged(group: str, overrides: Overrides) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for pattern, arguments in overrides.items():
        if _fits(group, pattern):
            merged |= arguments
    return merged


def _groups(strategy: Strategy, layout: Layout) -> dict[str, list[Leaf]]:
    if isinstance(strategy, slvt):
        return {"all": list(layout.leaves)}
    if isinstance(strategy, grouped):
        return _own_groups(strategy, layout)
    groups: dict[str, list[Leaf]] = {}
    for leaf in layout.leaves:
        groups.setdefault(leaf.owner, []).append(leaf)
    return groups


def _own_groups(strategy: grouped, layout: Layout) -> dict[str, list[Leaf]]:
    owner: dict[str, str] = {}
    for group, patterns in strategy.groups.items():
        if not isinstance(patterns, EllipsisType):
            for leaf in select(layout, patterns, where=f"group {group!r}"):
                _claim(owner, leaf, group)
    rest = [name for name, patterns in strategy.groups.items() if patterns is ...]
    loose = [leaf for leaf in layout.leaves if leaf.name not in owner]
    if len(rest) > 1 or (rest and not loose):
        fix = "let exactly one group be `...`, and leave leaves for it"
        got = f"{listing(rest)}"
        raise ValueError(message("grouped", expected="leaves for each `...`", got=got, fix=fix))
    if loose and not rest:
        fix = "add them to a group, or give one group `...`, all other leaves"
        got = f"{listing(leaf.name for leaf in loose)} in none"
        raise ValueError(message("grouped", expected="every leaf in a group", got=got, fix=fix))
    owner |= {leaf.name: rest[0] for leaf in loose}
    groups: dict[str, list[Leaf]] = {group: [] for group in strategy.groups}
    for leaf in layout.leaves:
        groups[owner[leaf.name]].append(leaf)
    return groups


def _claim(owner: dict[str, str], leaf: Leaf, group: str) -> None:
    if owner.setdefault(leaf.name, group) != group:
        fix = "name it in one of the two"
        got = f"{leaf.name!r} in {owner[leaf.name]!r} and {group!r}"
        raise ValueError(message("grouped", expected="every leaf in one group", got=got, fix=fix))


def select(layout: Layout, patterns: Sequence[str], where: str) -> list[Leaf]:
    """Return the leaves that any of the patterns matches, in layout order.

    Raises:
        ValueError: a pattern that matches no leaf.
    """
    if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
        got, fix = repr(patterns), 'write ["name"]'
        raise TypeError(message(where, expected="a list of leaf names or globs", got=got, fix=fix))
    for pattern in patterns:
        if not any(matches(leaf, pattern) for leaf in layout.leaves):
            fix = f"the leaves are {listing(leaf.name for leaf in layout.leaves)}"
            got = f"{pattern!r}, which matches none"
            raise ValueError(message(where, expected="names or globs of leaves", got=got, fix=fix))
    if not patterns:
        got, fix = "no pattern", "leave the group out, or name its leaves"
        raise ValueError(message(where, expected="at least one leaf", got=got, fix=fix))
    return [leaf for leaf in layout.leaves if any(matches(leaf, p) for p in patterns)]


def matches(leaf: Leaf, pattern: str) -> bool:
    """Say whether a glob matches any name of a leaf's tie group.

    >>> matches(Leaf("emb.weight", (2,), "float32", ("head.weight",)), "head.*")
    True
    """
    return any(_fits(name, pattern) for name in leaf.names)


def _fits(name: str, pattern: str) -> bool:
    """Match a glob, or the very name where the name itself has a glob's characters."""
    return name == pattern or fnmatchcase(name, pattern)


def split(total: budget, sizes: Mapping[str, int]) -> dict[str, int]:
    """Split a budget over groups of the given sizes (see :class:`budget`).

    Raises:
        ValueError: fewer latents than groups.
    """
    if total.total < len(sizes):
        expected = f"at least one latent for each of {len(sizes)} groups"
        fix = f"raise it to {len(sizes)} or more, or use fewer groups"
        got = str(total.total)
        raise ValueError(message("budget(total=)", expected=expected, got=got, fix=fix))
    left, free = min(total.total, sum(sizes.values())), dict(sizes)
    parts: dict[str, int] = {}
    while fixed := _out_of_range(left, free):
        parts |= fixed
        left -= sum(fixed.values())
        free = {name: size for name, size in free.items() if name not in fixed}
    parts |= _largest_remainder(left, free)
    return {name: parts[name] for name in sizes}


def _out_of_range(left: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Fix the groups whose share is more than they hold, or else those with less than one."""
    shares = _shares(left, sizes)
    full = {name: size for name, size in sizes.items() if shares[name] >= size}
    return full or {name: 1 for name, share in shares.items() if share < 1}


def _shares(left: int, sizes: Mapping[str, int]) -> dict[str, float]:
    weight = sum(math.sqrt(size) for size in sizes.values())
    return {name: left * math.sqrt(size) / weight for name, size in sizes.items()}


def _largest_remainder(left: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Divide ``left`` by the square roots of the sizes into whole parts with the same sum."""
    exact = _shares(left, sizes)
    parts = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(sizes, key=lambda name: parts[name] - exact[name])
    for name in by_remainder[: left - sum(parts.values())]:
        parts[name] += 1
    return parts
