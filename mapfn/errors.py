"""One form for every error text: where, expected, got, what to do."""

from collections.abc import Iterable
from typing import Any


def message(where: str, *, expected: str, got: str, fix: str) -> str:
    """Build the text of an error in the one form that the whole library uses.

    >>> print(message("make_spec(latent_dim=)", expected="an int >= 1", got="0", fix="pass 256"))
    make_spec(latent_dim=): expected an int >= 1, got 0. To mend it: pass 256.
    """
    return f"{where}: expected {expected}, got {got}. To mend it: {fix}."


def listing(names: Iterable[str], limit: int = 8) -> str:
    """Join names for an error text, and say how many were left off.

    >>> listing(["a", "b", "c"], limit=2)
    "'a', 'b' and 1 more"
    """
    every = [repr(name) for name in names]
    shown = ", ".join(every[:limit])
    return shown + (f" and {len(every) - limit} more" if len(every) > limit else "")


def differing(expected: Iterable[str], got: Iterable[str]) -> str:
    """Say which names are missing and which are extra; empty when the two sets agree.

    >>> differing(["a", "b"], ["b", "c"])
    "missing 'a'; extra 'c'"
    """
    wanted, had = list(expected), list(got)
    missing = [name for name in wanted if name not in set(had)]
    extra = [name for name in had if name not in set(wanted)]
    parts = [("missing", missing), ("extra", extra)]
    return "; ".join(f"{word} {listing(names)}" for word, names in parts if names)


class CheckpointError(ValueError):
    """A file that is damaged, of another version, or does not go with the target."""


class Interrupted(KeyboardInterrupt):
    """The user's interrupt; ``state`` is that after the last whole step.

    >>> Interrupted("after step 3", state=None).state is None
    True
    """

    def __init__(self, text: str, state: Any) -> None:
        """Keep the state beside the text."""
        super().__init__(text)
        self.state = state


class NonFiniteError(ArithmeticError):
    """A loss or a gradient that is NaN or infinite; ``state`` is the last good one.

    >>> NonFiniteError("loss is nan", state=None).state is None
    True
    """

    def __init__(self, text: str, state: Any) -> None:
        """Keep the state beside the text."""
        super().__init__(text)
        self.state = state
