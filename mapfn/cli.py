"""The console command: ``mapfn demo``, ``summary``, ``check``, ``inspect``, ``export``."""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mapfn import checkpoint, container, doctor, files, generation, report, serialization
from mapfn import demo as digits_demo
from mapfn.spec import Spec, make_spec
from mapfn.target import bake

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Train a network through a few hundred numbers (mapping networks, arXiv 2602.19134).",
)

TargetArgument = Annotated[
    str, typer.Argument(help="`module:callable`; called without arguments it gives the target.")
]
DimOption = Annotated[int, typer.Option(help="Trained numbers of each group.")]
StrategyOption = Annotated[str, typer.Option(help="`slvt` or `layerwise`.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object as last line.")]


class Failure(Exception):
    """Something that the user can mend, told in one line."""


@app.command()
def demo(
    latent_dim: Annotated[int, typer.Option(help="Trained numbers in all.", min=1)] = 512,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.", min=1)] = 40,
    seed: Annotated[int, typer.Option(help="Of the map, the latents and the batches.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a small CNN on handwritten digits through 512 numbers, then directly.

    Example: `mapfn demo --latent-dim 256`
    """
    digits = _digits()
    # The network is too small for two threads to help, and each would wait for a busy core.
    torch.set_num_threads(1)
    console = Console(stderr=as_json)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("mapped", total=2 * epochs)
        training = digits_demo.Training(digits, epochs, seed, lambda: progress.advance(task))
        rows = [digits_demo.train_mapped(training, latent_dim)]
        progress.update(task, description="direct")
        rows.append(digits_demo.train_direct(training))
    console.print(_demo_table(rows, len(digits.test_labels)))
    if as_json:
        _print_json({"rows": [row._asdict() for row in rows]})


def _digits() -> digits_demo.Digits:
    try:
        return digits_demo.load_digits()
    except ImportError as error:
        raise Failure(
            f'the demo needs scikit-learn: pip install "mapfn[demo]" ({error})'
        ) from error


def _demo_table(rows: list[digits_demo.Row], num_test: int) -> Table:
    caption = f"One network, trained two ways; accuracy on {num_test} digits that neither has seen."
    table = Table(title="Handwritten digits, 8 x 8", caption=caption)
    for name in ("network", "weights", "trained numbers", "test accuracy", "seconds"):
        table.add_column(name, justify="left" if name == "network" else "right")
    for row in rows:
        cells = f"{row.weights:,}", f"{row.trained:,}", f"{row.accuracy:.1%}", f"{row.seconds:.1f}"
        table.add_row(row.name, *cells)
    return table


@app.command()
def summary(
    target: TargetArgument,
    latent_dim: DimOption = 256,
    strategy: StrategyOption = "layerwise",
    as_json: JsonOption = False,
) -> None:
    """Print which groups a target has, and how many numbers each trains.

    Example: `mapfn summary torchvision.models:resnet18 --strategy slvt --latent-dim 2048`
    """
    spec = make_spec(_load(target), strategy=strategy, latent_dim=latent_dim)
    print(report.summary(spec))
    if as_json:
        groups = [
            {"name": g.name, "leaves": [leaf.name for leaf in g.leaves], "latents": g.latent_dim}
            | {"weights": sum(leaf.numel for leaf in g.leaves), "mapper": repr(g.mapper)}
            for g in spec.groups
        ]
        _print_json({"groups": groups, "total": report.count(spec)._asdict()})


@app.command()
def check(
    target: TargetArgument,
    input_shape: Annotated[
        list[str] | None,
        typer.Option(help="Shape of one random input, `2,3,32,32`; once for each argument."),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(help="`module:callable` that gives the tuple of arguments instead."),
    ] = None,
    latent_dim: DimOption = 256,
    strategy: StrategyOption = "layerwise",
    as_json: JsonOption = False,
) -> None:
    """Prove on a small batch that a target maps purely, rightly and trainably.

    Exit code 1 when something is wrong. Example: `mapfn check mynet:build --input-shape 2,1,28,28`
    """
    module = _load(target)
    batch = _load(inputs) if inputs else tuple(map(_random_input, input_shape or ()))
    batch = batch if isinstance(batch, tuple) else (batch,)
    spec = make_spec(module, strategy=strategy, latent_dim=latent_dim)
    found = _checked(spec, module, batch)
    print(found)
    if as_json:
        _print_json(_report_data(found))
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A checkpoint.")], as_json: JsonOption = False
) -> None:
    """Print what a checkpoint holds; the target is not needed.

    Example: `mapfn inspect run/last.safetensors`
    """
    tensors, data = container.read(file)
    if data is None:
        raise Failure(f"{file}: no metadata of mapfn; another tool has saved it again")
    held = {name: f"{str(t.dtype)[6:]} {list(t.shape)}" for name, t in tensors.items()}
    known = {name: data[name] for name in ("version", "torch", "seed", "metadata")}
    known["bytes"] = file.stat().st_size
    for name, value in known.items():
        print(f"{name:9} {value}")
    try:
        print(report.summary(serialization.spec_from_json(json.dumps(data["spec"]))))
    except ValueError as error:  # a mapper of somebody's own: the rest can still be shown
        print(f"spec      {error}")
    for name, what in held.items():
        print(f"{name}  {what}")
    if as_json:
        _print_json(known | {"tensors": held, "probe": data["probe"]})


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="A checkpoint.")],
    target: TargetArgument,
    out: Annotated[Path, typer.Argument(help="The state_dict to write, a safetensors file.")],
) -> None:
    """Write the generated weights as a plain state_dict, to deploy without mapfn.

    Example: `mapfn export run/last.safetensors mynet:build weights.safetensors`
    """
    module = _load(target)
    loaded = checkpoint.load_checkpoint(file, module)
    params = generation.generate(loaded.spec, loaded.latents, loaded.buffers)
    plain = bake(module, params, loaded.state).state_dict()
    whole = {name: tensor.contiguous().clone() for name, tensor in plain.items()}
    files.write_atomically(out, safetensors.torch.save(whole))
    print(f"{out}: {len(whole)} tensors, {sum(t.numel() for t in whole.values()):,} numbers")


def _checked(spec: Spec, module: Any, batch: tuple[Any, ...]) -> doctor.Report:
    try:
        return doctor.check(spec, module, *batch)
    except ValueError:  # the library's own words
        raise
    except Exception as error:  # whatever the target's own forward raises
        given = ", ".join(str(tuple(x.shape)) for x in batch if isinstance(x, torch.Tensor))
        raise Failure(
            f"the target refused inputs of shape {given or 'nothing'}: {error}. To mend it: pass"
            " --input-shape once for each argument of its forward, or --inputs"
        ) from error


def _report_data(found: doctor.Report) -> dict[str, Any]:
    rows = [
        {"path": row.path, "type": row.type}
        | {column: verdict._asdict() for column, verdict in row.verdicts.items()}
        for row in found.rows
    ]
    return {"ok": found.ok, "findings": [f._asdict() for f in found.findings], "rows": rows}


def _random_input(shape: str) -> torch.Tensor:
    try:
        sizes = [int(size) for size in shape.split(",")]
        return torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    except (ValueError, RuntimeError) as error:
        raise Failure(f"--input-shape: expected sizes as in 2,1,28,28, got {shape!r}") from error


def _load(name: str) -> Any:
    """Import ``module:callable`` and call it; the current folder can be imported from."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise Failure(f"expected module:callable, got {name!r}, for example mynet:build")
    try:
        found = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise Failure(f"cannot import {name!r}: {error}") from error
    if not callable(found):
        raise Failure(f"{name!r} is {type(found).__name__}: expected something to call")
    return _called(name, found)


def _called(name: str, function: Any) -> Any:
    try:
        return function()
    except Exception as error:  # whatever the user's own code raises
        raise Failure(f"{name}() raised {type(error).__name__}: {error}") from error


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mapfn {version('mapfn')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and go.")
    ] = False,
) -> None:
    pass


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn what the user can mend into one line on stderr and exit code 1."""
    try:
        yield
    except (Failure, ValueError, TypeError, RuntimeError, OSError) as error:
        text = " ".join(str(error).split())
        print(f"mapfn: {text}", file=sys.stderr)
        raise SystemExit(1) from None


def main() -> None:
    """Run the command; the entry point of the package."""
    sys.path.insert(0, os.getcwd())
    with _one_line_errors():
        app()
