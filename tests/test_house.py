"""The house: rooms, floors, and what a module may do when it is imported."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mapfn"

# The table of floors in the design, with half floors where rooms of one floor build on each other.
# A room imports only from rooms with a lower number; a new file must be given its number here.
FLOORS = {
    "types": 1,
    "errors": 1,
    "trees": 2,
    "seeds": 2,
    "scales": 2,
    "tiling": 2,
    "blocks": 2.3,
    "transform": 2.5,
    "modulation": 2.7,
    "layout": 3,
    "decoders": 3,
    "mappers": 3,
    "plan": 3.5,
    "strategies": 4,
    "groups": 4.2,
    "spec": 4.5,
    "validation": 4.7,
    "raw": 4.7,
    "refusals": 4.7,
    "integrity": 4.6,
    "serialization": 4.7,
    "parts": 2,
    "support": 7.5,
    "layers": 7.6,
    "proofs": 7.6,
    "generation": 5,
    "lazy": 5,
    "target": 5,
    "summary": 5,
    "report": 5,
    "moments": 5.5,
    "terms": 5.7,
    "losses": 6,
    "schedules": 5,
    "rates": 5.2,
    "optim": 5.5,
    "members": 2.5,
    "ensemble": 6,
    "draws": 6.3,
    "unpacking": 3,
    "steps": 6.5,
    "batches": 3,
    "loops": 3,
    "callbacks": 3.5,
    "evaluation": 6.7,
    "find_lr": 5.8,
    "train": 7,
    "testing": 7,
    "version": 1,
    "files": 1,
    "archive": 2,
    "fingerprints": 5.5,
    "container": 5.6,
    "checkpoint": 8,
    "memory": 8,
    "doctor": 8,
    "nn": 8.7,
    "distributed": 9,
    "demo": 8.5,
    "cli": 9,
}
# The front door re-exports from every floor.
DOORS = {"__init__", "__main__", "train"}
MOST_LINES = 300
# Calls at import that only name or freeze something.
HARMLESS_CALLS = {"NamedTuple", "ParamSpec", "TypeVar", "frozenset", "object"}
# Options of a command are named where they are annotated.
HARMLESS_MODULES = ("typer.",)

MODULES = sorted(PACKAGE.rglob("*.py"))


def each_module(paths: list[Path] = MODULES) -> pytest.MarkDecorator:
    ids = [path.relative_to(PACKAGE).as_posix() for path in paths]
    return pytest.mark.parametrize("path", paths, ids=ids)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name of every import, local and type-checking ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def floor_faults(path: Path, tree: ast.Module) -> Iterator[str]:
    for line, name in imported(tree):
        top, *rest = name.split(".")
        if top == "":
            yield f"line {line}: write the import of {name} from mapfn on"
        elif top == "mapfn":
            room = rest[0] if rest else ""
            if room not in FLOORS:
                yield f"line {line}: {name} is no room; import from the file that defines it"
            elif FLOORS[room] >= FLOORS[room_of(path)]:
                yield f"line {line}: {name} is not on a floor above {room_of(path)}"


def import_faults(tree: ast.Module) -> Iterator[str]:
    """Say what a module does at import beyond definitions."""
    definitions = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, definitions) or is_guard(node):
            continue
        if not isinstance(node, ast.Assign | ast.AnnAssign) and not is_text(node):
            yield f"line {node.lineno}: {type(node).__name__} runs at import"
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and not is_harmless(ast.unparse(call.func)):
                yield f"line {call.lineno}: {ast.unparse(call)} runs at import"


def is_harmless(name: str) -> bool:
    return name in HARMLESS_CALLS or name.startswith(HARMLESS_MODULES)


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_guard(node: ast.stmt) -> bool:
    guards = {"TYPE_CHECKING", "__name__ == '__main__'"}
    return isinstance(node, ast.If) and ast.unparse(node.test) in guards


@each_module()
def test_room_has_a_floor(path: Path) -> None:
    room = room_of(path)
    assert room in FLOORS or room in DOORS, f"give {room!r} a floor in FLOORS"


@each_module([path for path in MODULES if room_of(path) not in DOORS])
def test_imports_only_from_floors_above(path: Path) -> None:
    assert room_of(path) in FLOORS, f"give {room_of(path)!r} a floor in FLOORS"
    assert list(floor_faults(path, parsed(path))) == []


@each_module([path for path in MODULES if room_of(path) != "trees"])
def test_only_trees_imports_optree(path: Path) -> None:
    assert [name for _, name in imported(parsed(path)) if name.split(".")[0] == "optree"] == []


@each_module()
def test_file_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@each_module([path for path in MODULES if path.name != "__main__.py"])
def test_import_has_no_side_effect(path: Path) -> None:
    assert list(import_faults(parsed(path))) == []


def test_import_needs_no_extra() -> None:
    code = (
        "import sys; before = set(sys.modules); import mapfn;"
        "print(*{'typer', 'rich', 'sklearn'} & (set(sys.modules) - before))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("trees", "from mapfn.spec import Spec"),
        ("trees", "from mapfn import spec"),
        ("trees", "def f():\n    import mapfn.spec"),
        ("spec", "from mapfn import make_spec"),
        ("spec", "import mapfn"),
        ("spec", "from .layout import Layout"),
        ("mappers/mlp", "from mapfn.mappers.hadamard import hadamard"),
        ("errors", "from mapfn.types import Latents"),
    ],
)
def test_a_wrong_import_is_seen(room: str, line: str) -> None:
    assert len(list(floor_faults(PACKAGE / f"{room}.py", ast.parse(line)))) == 1


@pytest.mark.parametrize(
    "line", ["torch.manual_seed(0)", "X = torch.zeros(2)", "for x in y: pass", "X = {'a': f()}"]
)
def test_a_side_effect_is_seen(line: str) -> None:
    assert list(import_faults(ast.parse(line)))
