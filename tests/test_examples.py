"""The examples run from end to end, in their short form."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.py")))
def test_example_runs(script, tmp_path):
    command = [sys.executable, str(FOLDER / script), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
