"""The doctor: proves on one small batch that a target is run purely, rightly and trainably.

Everything happens on copies: the caller's target, inputs and random generators keep their bits.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mapfn import layers, proofs, validation
from mapfn.errors import message
from mapfn.generation import generate, init
from mapfn.layers import Row
from mapfn.layout import unwrap
from mapfn.parts import fresh, parts
from mapfn.proofs import Exam, Finding
from mapfn.spec import Spec
from mapfn.support import Verdict
from mapfn.target import init_state
from mapfn.types import Buffers, Latents


@dataclass(frozen=True)
class Report:
    """What the doctor found; ``print`` it for a table."""

    findings: tuple[Finding, ...]
    rows: tuple[Row, ...]
    """Which transforms each layer takes, the whole target last; no part of ``ok``."""

    @property
    def ok(self) -> bool:
        """Say whether nothing was found wrong."""
        return all(finding.ok is not False for finding in self.findings)

    def __str__(self) -> str:
        """Lay out the findings, the layers, and the reasons with their ways round."""
        words = {True: "ok", False: "WRONG", None: "not checked"}
        proved = [(words[each.ok], each.name, each.detail) for each in self.findings]
        columns = list(self.rows[0].verdicts)
        table = [("layer", "type", *columns)]
        table += [(r.path, r.type, *map(_cell, r.verdicts.values())) for r in self.rows]
        blocks = [_aligned(proved), _aligned(table), list(_notes(self.rows))]
        return "\n\n".join("\n".join(block) for block in blocks if block)


def _cell(verdict: Verdict) -> str:
    if verdict.ok:
        return "slow" if verdict.reason else "ok"
    return "no"


def _notes(rows: Iterable[Row]) -> Iterator[str]:
    """Give each reason once, with every layer that has it."""
    paths: dict[tuple[str, Verdict], list[str]] = {}
    for row in rows:
        for column, verdict in row.verdicts.items():
            if verdict.reason:
                name = row.path if row.tried == row.path else f"{row.path} (as {row.tried})"
                paths.setdefault((column, verdict), []).append(name)
    for (column, verdict), names in paths.items():
        way = f": {verdict.way_round}" if verdict.way_round else ""
        yield f"{column}, {', '.join(names)}: {verdict.reason.removesuffix('.')}{way}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def check(spec: Spec, target: Any, /, *args: Any, **kwargs: Any) -> Report:
    """Prove on one small batch that a target is mapped purely, rightly and trainably.

    - purity: nothing of the target, the inputs, the trees and the random generators changes;
    - parity: the target's own weights through :func:`~mapfn.apply` give its own outputs and
      state, and gradients are those of a plain module with the same weights;
    - gradient reach: every latent vector gets a finite gradient that is not zero, and every
      trained leaf takes part;
    - layer by layer: which of grad, vmap and fullgraph hold, the reason where one does not, and
      the way round.

    Only copies are run. ``torch.compile``'s caches are emptied, so check before training.

    Args:
        spec: the target's spec; the starting point is ``init(spec, seed=0)``.
        target: the module, on ``meta`` too, or a function
            ``f(params, state, *args) -> (outputs, state)``, whose state is empty.
        *args: the target's own arguments: a batch of two, say.
        **kwargs: the target's own keyword arguments, all of them.

    Returns:
        The findings and the rows, as data; ``print(report)`` for a table.

    Raises:
        ValueError: a target that is not the spec's, or latents that are not finite.
        RuntimeError: a target that checkpoints activations inside, as :func:`~mapfn.apply`.
        Exception: the target's own, where it does not take the inputs.

    >>> from mapfn import make_spec
    >>> layer = nn.Linear(3, 2)
    >>> report = check(make_spec(layer, latent_dim=4), layer, torch.ones(2, 3))
    >>> report.ok
    True
    >>> [column for column, verdict in report.rows[0].verdicts.items() if verdict.ok]
    ['grad', 'vmap', 'fullgraph']
    """
    module = target if isinstance(target, nn.Module) else None
    if module is not None:
        validation.check_target(spec, module, "check(target)")
    latents, buffers = init(spec, 0, module, _device(target, (args, kwargs)))
    return check_at(spec, target, latents, buffers, *args, **kwargs)


def _device(*things: Any) -> torch.device | None:
    found = (part.device for _, part in parts(things) if isinstance(part, Tensor))
    return next((device for device in found if device.type != "meta"), None)


def check_at(
    spec: Spec, target: Any, latents: Latents, buffers: Buffers, /, *args: Any, **kwargs: Any
) -> Report:
    """Do what :func:`check` does, at latents of your own: trained ones, for example.

    Raises:
        ValueError: latents that are NaN or infinite, or not the spec's.
    """
    exam = prepare(spec, target, latents, buffers, args, kwargs)
    case = layers.whole(spec, exam.target, latents, buffers, exam.inputs)
    return Report(proofs.prove(exam), layers.rows(spec, case, exam.params))


def prepare(
    spec: Spec, target: Any, latents: Latents, buffers: Buffers, args: Any, kwargs: Any
) -> Exam:
    """Refuse bad latents and gather what the proofs need; ``kwargs`` as a dict.

    Raises:
        ValueError: as :func:`check_at`.
    """
    validation.check_latents(spec, latents)
    check_finite(latents)
    target = unwrap(target) if isinstance(target, nn.Module) else target
    params, inputs = generate(spec, latents, buffers), fresh((args, kwargs))
    return Exam(spec, target, latents, buffers, params, init_state(target), inputs)


def check_finite(latents: Latents) -> None:
    """Refuse latents with NaN or infinity.

    Raises:
        ValueError: so they are.

    >>> check_finite({"all": torch.zeros(2)})
    """
    for group, latent in latents.items():
        if bad := int((~latent.detach().isfinite()).sum()):
            got = f"{bad} of {latent.numel()} NaN or infinite"
            fix = "start again from init or the last checkpoint, with a lower learning rate"
            raise ValueError(
                message(f"latents[{group!r}]", expected="finite numbers", got=got, fix=fix)
            )
