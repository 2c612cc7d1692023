"""The console command: real runs, JSON, exit codes, and errors on one line."""

import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from mapfn.__main__ import main

NETS = """
import torch
from torch import nn

def build(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 3))
def batch(): return (torch.ones(2, 16),)
def broken(): raise OSError("no\\nweights here")
def empty(): return nn.ReLU()
number = 3

class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)
    def forward(self, x): return self.used(x)
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    environment = os.environ | {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}

    def run(*arguments):
        command = [sys.executable, "-m", "mapfn", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )

    return run


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_here(tmp_path, monkeypatch, capsys):
    """Run the command without a process of its own, which takes seconds to import torch."""
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "nets", raising=False)

    def run_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["mapfn", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        sys.modules.pop("nets", None)
        return Ended(ended.value.code, *capsys.readouterr())

    return run_here


def last_json(done):
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_demo_reaches_its_bar(run):
    done = run("demo", "--json")
    assert done.returncode == 0, done.stderr
    mapped, direct = last_json(done)["rows"]
    assert set(mapped) == {"name", "weights", "trained", "accuracy", "seconds"}
    assert mapped["weights"] == direct["weights"] == direct["trained"] == 38_282
    assert mapped["trained"] <= 512
    assert 0.96 <= mapped["accuracy"] <= 1
    assert direct["accuracy"] - mapped["accuracy"] <= 0.05
    assert "test accuracy" in done.stderr  # the table for people, beside the object for scripts


def test_demo_prints_a_table(run):
    done = run("demo", "--epochs", "1", "--latent-dim", "40")
    assert done.returncode == 0, done.stderr
    assert "mapped, 40 latents" in done.stdout
    assert "direct" in done.stdout


def test_summary(run):
    done = run("summary", "nets:build", "--latent-dim", "30", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split()[:3] == ["group", "leaves", "weights"]
    data = last_json(done)
    assert [group["name"] for group in data["groups"]] == ["1", "3"]
    # The second layer has 15 numbers, fewer than were asked for.
    assert [group["latents"] for group in data["groups"]] == [30, 15]
    assert data["total"]["generated"] == 83


def test_check_passes_and_fails_by_exit_code(run, run_here):
    good = run("check", "nets:build", "--inputs", "nets:batch", "--json")
    assert good.returncode == 0, good.stdout + good.stderr
    assert last_json(good)["ok"] is True
    bad = run_here("check", "nets:Unused", "--input-shape", "2,4")
    assert bad.returncode == 1
    assert "unused" in bad.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["summary", "nets"], "expected module:callable, got 'nets'"),
        (["summary", "nowhere:build"], "No module named 'nowhere'"),
        (["summary", "nets:nothing"], "has no attribute 'nothing'"),
        (["summary", "nets:number"], "is int: expected something to call"),
        (["summary", "nets:broken"], "nets:broken() raised OSError: no weights here"),
        (["summary", "nets:empty"], "at least one parameter"),
        (["summary", "nets:build", "--strategy", "each"], "'slvt', 'layerwise' or a strategy"),
        (["summary", "nets:build", "--latent-dim", "0"], "expected an int >= 1, got 0"),
        (["check", "nets:build", "--input-shape", "2,x"], "expected sizes as in 2,1,28,28"),
        (["check", "nets:build", "--input-shape", "2,7"], "refused inputs of shape (2, 7): mat1"),
        (["check", "nets:build"], "refused inputs of shape nothing"),
    ],
)
def test_errors_take_one_line(run_here, arguments, words):
    done = run_here(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("mapfn: ")
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr


def test_an_error_ends_the_process_with_one_line_and_exit_code_1(run):
    done = run("summary", "nets:broken")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "mapfn: nets:broken() raised OSError: no weights here\n"


@pytest.mark.parametrize("arguments", [["nothing"], ["demo", "--epochs", "x"], ["summary"]])
def test_wrong_usage_has_exit_code_2(run_here, arguments):
    assert run_here(*arguments).returncode == 2


def test_help_and_version(run_here):
    assert "Example: mapfn demo --latent-dim 256" in run_here("demo", "--help").stdout
    for command in ("demo", "summary", "check"):
        assert command in run_here("--help").stdout
    assert run_here("--version").stdout == "mapfn 0.1.0\n"


@pytest.mark.parametrize(
    ("hidden", "words"), [("typer", 'install "mapfn[demo]"'), ("sklearn", "needs scikit-learn")]
)
def test_missing_extras_are_named(tmp_path, hidden, words):
    program = (
        f"import sys; sys.modules[{hidden!r}] = None; sys.argv = ['mapfn', 'demo']\n"
        "from mapfn.__main__ import main; main()"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
