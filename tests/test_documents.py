"""Every code block of the README and the docs: Python runs, commands exist."""

import functools
import importlib.util
import os
import re
import shlex
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("README.md"), *sorted(ROOT.glob("docs/**/*.md"))]

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]+)?")
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
ASSIGNMENT = re.compile(r"\w+=.*")
BUILTINS = {"cd", "export", "source"}


class Block(NamedTuple):
    language: str
    line: int
    """The document's line of the block's first line."""
    text: str
    runs: bool


def blocks(document: str) -> Iterator[Block]:
    """Yield the fenced blocks of a document, indented ones without their indent.

    >>> [block.text for block in blocks("```python\\nx = 1\\n```")]
    ['x = 1\\n']
    """
    lines = document.splitlines()
    numbers = iter(range(len(lines)))
    for start in numbers:
        fence = FENCE.match(lines[start])
        if fence is None:
            continue
        indent = len(fence["indent"])
        stop = next((n for n in numbers if lines[n].strip() == "```"), None)
        assert stop is not None, f"the block at line {start + 1} has no end"
        text = "".join(f"{line[indent:]}\n" for line in lines[start + 1 : stop])
        runs = start == 0 or not NOT_RUN.fullmatch(lines[start - 1].strip())
        yield Block(fence["language"] or "", start + 2, text, runs)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every simple command, without the assignments before it.

    >>> list(commands("A=1 pip install '.[x]' && mapfn demo  # trains\\n"))
    [['pip', 'install', '.[x]'], ['mapfn', 'demo']]
    """
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set("&|;"):
                if command:
                    yield command
                command = []
            elif command or not ASSIGNMENT.fullmatch(word):
                command.append(word)


def check_command(command: list[str]) -> None:
    """Fail unless the program exists; a `mapfn` command must also have these options."""
    program, *rest = command
    is_python = program in {"python", "python3"}
    if program == "mapfn" or (is_python and rest[:2] == ["-m", "mapfn"]):
        check_mapfn(rest[2:] if is_python else rest)
    elif is_python and rest[:1] == ["-m"]:
        assert importlib.util.find_spec(rest[1]), f"no module {rest[1]}"
    else:
        scripts = str(Path(sys.executable).parent)
        path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
        assert (
            program in BUILTINS or (ROOT / program).is_file() or shutil.which(program, path=path)
        ), f"no command {program}"
        if is_python or program == "torchrun":
            scripts_named = [word for word in rest if word.endswith(".py")]
            assert all((ROOT / script).is_file() for script in scripts_named), f"no {scripts_named}"


def check_mapfn(arguments: list[str]) -> None:
    """Let the parser of the console command read the arguments, and go no further."""
    from typer.testing import CliRunner

    from mapfn.cli import app

    outcome = CliRunner().invoke(app, [*arguments, "--help"])
    assert outcome.exit_code == 0, f"mapfn {shlex.join(arguments)}: {outcome.output}"


each_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=[path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@each_document
def test_python_blocks_run(
    path: Path, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The graphs are the same, without half a minute of C++ compiler in the default run.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    # A real module, so that what a block defines can be pickled.
    module = types.ModuleType(f"document_{path.stem}")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.compiler.reset()
    for block in blocks(path.read_text(encoding="utf-8")):
        assert block.language not in {"py", "pycon", "python3"}, f"line {block.line}: say python"
        if block.language == "python":
            # Padded, so that a traceback shows the line of the document.
            code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
            if block.runs:
                exec(code, module.__dict__)


@each_document
def test_bash_blocks_name_commands(path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8")):
        assert block.language not in {"sh", "shell", "console"}, f"line {block.line}: say bash"
        if block.language == "bash" and block.runs:
            for command in commands(block.text):
                check_command(command)


def test_a_block_is_found_with_its_line_and_mark() -> None:
    document = (
        "a\n<!-- not run: needs a GPU -->\n  ```python title='x'\n  if y:\n    z\n  ```\n```\n```"
    )
    assert list(blocks(document)) == [
        Block("python", 4, "if y:\n  z\n", False),
        Block("", 8, "", True),
    ]


def test_an_unknown_command_is_seen() -> None:
    with pytest.raises(AssertionError, match="no command mapfunction"):
        check_command(["mapfunction", "demo"])
    with pytest.raises(AssertionError, match="no module mapfunction"):
        check_command(["python", "-m", "mapfunction"])


def test_an_unknown_option_is_seen() -> None:
    with pytest.raises(AssertionError, match="No such option"):
        check_command(["mapfn", "demo", "--no-such-option"])
