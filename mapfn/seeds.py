"""Portable random bits: the same on every device, version and machine.

Every fixed number is a function of ``(seed, name, index)`` in integer arithmetic: a 64-bit seed
is derived by BLAKE2b, and words by the SplitMix64 mixer (Steele, Lea and Flood 2014) of a counter.
Word ``i`` never depends on how many words are asked for, so a slice equals the whole.
"""

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

# SplitMix64's constants, as signed 64-bit integers: torch's int64 arithmetic wraps modulo 2**64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_GAMMA_INVERSE = 0xF1DE83E19937733D - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def derive(seed: int, *names: str) -> int:
    """Derive a 64-bit seed from a seed and a path of names, equal in every process.

    Each name is hashed with its length, so that ``("a.b",)`` and ``("a", "b")`` never collide.

    >>> derive(0, "conv1")
    -5874285166325208478
    """
    path = b"".join(f"{len(part)}:".encode() + part for part in map(_encoded, names))
    digest = hashlib.blake2b(f"{seed}/".encode() + path, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def key(seed: int) -> Tensor:
    """Hold a derived 64-bit seed as the tensor ``int64 []`` that :func:`words` counts from."""
    return torch.full((), seed, dtype=torch.int64)


def words(key: Tensor, start: int, count: int) -> Tensor:
    """Return the 64-bit words ``start .. start + count`` of a stream, as ``int64 [count]``.

    >>> bool((words(key(7), 3, 2) == words(key(7), 0, 5)[3:]).all())
    True
    """
    return words_at(key, [(start, count)])


def words_at(key: Tensor, spans: Iterable[tuple[int, int]]) -> Tensor:
    """Return the words of several spans ``(start, count)``, one after the other, in one go.

    >>> bool((words_at(key(7), [(3, 1), (0, 2)]) == words(key(7), 0, 4)[[3, 0, 1]]).all())
    True
    """
    indices = [
        torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=key.device)
        for start, count in spans
    ]
    index = torch.cat(indices) if len(indices) > 1 else indices[0]
    # key + index * gamma, but with the key inside: of a constant times an index Inductor makes a
    # loop counter in C++, whose signed overflow lets the loop run past its end (torch 2.13).
    return _mixed((key * _GAMMA_INVERSE + index) * _GAMMA)


def fold(key: Tensor, index: Tensor) -> Tensor:
    """Return a new key, ``int64 []``, from a key and an index: word ``index`` of its stream.

    The index is a tensor, ``int64 []``, so that a number that grows at every step recompiles
    nothing.

    >>> bool(fold(key(7), torch.tensor(3)) == words(key(7), 3, 1))
    True
    """
    return _mixed((key * _GAMMA_INVERSE + index + 1) * _GAMMA)


def _mixed(word: Tensor) -> Tensor:
    word = (word ^ _logical_right_shift(word, 30)) * _MIX_1
    word = (word ^ _logical_right_shift(word, 27)) * _MIX_2
    return word ^ _logical_right_shift(word, 31)


def _logical_right_shift(word: Tensor, bits: int) -> Tensor:
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def uniform(key: Tensor, count: int, start: int = 0) -> Tensor:
    """Draw ``float64 [count]`` uniform on [-1, 1): the top 53 bits of a word, exactly."""
    return (words(key, start, count) >> 11).to(torch.float64) * 2.0**-52


def normal(key: Tensor, count: int) -> Tensor:
    """Draw ``float64 [count]`` with mean 0 and variance 1, nearly normal and exactly portable.

    The sum of twelve 16-bit uniforms (Irwin-Hall; support ±6, excess kurtosis -0.1): integer
    sums and one rounding, where ``log`` and ``cos`` would differ between machines.
    """
    lanes = torch.arange(0, 64, 16, dtype=torch.int64, device=key.device)
    parts = (words(key, 0, 3 * count).view(count, 3, 1) >> lanes) & 0xFFFF
    total = parts.sum(dim=(1, 2))
    deviation = (2 * total - 12 * 0xFFFF).to(torch.float64)
    return deviation * (0.5 / math.sqrt(2.0**32 - 1))
