"""Plans: which stretches of a group's flat numbers are made and decoded together.

A plan follows from the spec alone. Neighbours of one scale and base form a run, decoded by one
operation; small runs share a segment, made by one pass of the map; a large run is a segment by
itself, so that only a small part of the weights ever exists twice.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from mapfn.layout import Leaf

# Numbers in a segment of small runs: 4 MiB of float32 is the most that is held twice.
_SEGMENT = 2**20


@dataclass(frozen=True)
class Piece:
    """One leaf of a group, how many flat numbers make it, and what they mean."""

    leaf: Leaf
    count: int
    scale: float
    base: float | str


@dataclass(frozen=True)
class Run:
    """Neighbouring leaves with one scale and one base, at ``start .. stop`` of the group."""

    pieces: tuple[Piece, ...]
    start: int

    @property
    def stop(self) -> int:
        """One past the last flat number."""
        return self.start + sum(piece.count for piece in self.pieces)

    @property
    def name(self) -> str:
        """The name of its only leaf, where the base is a tensor."""
        return self.pieces[0].leaf.name

    @property
    def scale(self) -> float:
        """The spread of every leaf."""
        return self.pieces[0].scale

    @property
    def base(self) -> float | str:
        """The centre of every leaf; of a run of one leaf where it is a tensor."""
        return self.pieces[0].base

    def cut(self, decoded: Tensor) -> dict[str, Tensor]:
        """Cut decoded weights, flat, into the leaves, each in its shape and dtype."""
        leaves = [piece.leaf for piece in self.pieces]
        parts = cut(decoded, [leaf.numel for leaf in leaves])
        return {
            leaf.name: part.view(leaf.shape).to(leaf.torch_dtype)
            for leaf, part in zip(leaves, parts, strict=True)
        }


@dataclass(frozen=True)
class Segment:
    """Neighbouring runs made by one pass of the map."""

    runs: tuple[Run, ...]

    @property
    def start(self) -> int:
        """First flat number."""
        return self.runs[0].start

    @property
    def stop(self) -> int:
        """One past the last flat number."""
        return self.runs[-1].stop

    def cut(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Cut the segment's flat numbers into its runs."""
        return cut(numbers, [run.stop - run.start for run in self.runs])


def segments(pieces: Iterable[Piece], *, mergeable: bool) -> tuple[Segment, ...]:
    """Plan a group.

    Args:
        pieces: the leaves in layout order.
        mergeable: whether the decoder works number by number, so that leaves can share a call.

    >>> leaves = [Leaf("a", (2,), "float32"), Leaf("b", (3,), "float32")]
    >>> plan = segments([Piece(leaf, leaf.numel, 0.1, 0.0) for leaf in leaves], mergeable=True)
    >>> [(run.start, run.stop) for segment in plan for run in segment.runs]
    [(0, 5)]
    """
    batches: list[list[Run]] = []
    for run in _runs(pieces, mergeable):
        start = batches[-1][0].start if batches else 0
        if not batches or run.stop - start > _SEGMENT:
            batches.append([])
        batches[-1].append(run)
    return tuple(Segment(tuple(batch)) for batch in batches)


def _runs(pieces: Iterable[Piece], mergeable: bool) -> Iterator[Run]:
    def kind(indexed: tuple[int, Piece]) -> tuple[object, ...]:
        index, piece = indexed
        alone = not mergeable or isinstance(piece.base, str)
        return (piece.scale, piece.base, index if alone else -1)

    start = 0
    for _, members in groupby(enumerate(pieces), key=kind):
        run = Run(tuple(piece for _, piece in members), start)
        start = run.stop
        yield run


def cut(flat: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Cut a flat tensor into parts; a single part is the tensor itself.

    Not a view of all of it: the backward pass of a view copies the gradient.

    >>> [part.tolist() for part in cut(torch.arange(3), [1, 2])]
    [[0], [1, 2]]
    """
    return torch.split(flat, sizes) if len(sizes) > 1 else (flat,)
