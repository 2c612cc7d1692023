"""The benchmark scripts run from end to end, at sizes that measure nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["core.py", "compile_cost.py", "training.py"])
def test_script_runs(script, tmp_path):
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, str(FOLDER / script), "--quick", "--json", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    assert measured
    assert all(row["what"] and row["quick"] for row in measured)
