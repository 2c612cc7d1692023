"""The examples run from end to end in their short form, and what they promise is so."""

import doctest
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from mapfn.demo import load_digits

FOLDER = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))


def load(script):
    spec = importlib.util.spec_from_file_location(Path(script).stem, FOLDER / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_example_runs(script, tmp_path):
    command = [sys.executable, str(FOLDER / script), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_example_doctests(script):
    assert doctest.testmod(load(script)).failed == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_laplace_is_better_calibrated_than_the_point(seed):
    point, sampled, _ = load("laplace.py").compare(seed, epochs=300)
    assert sampled.nll < 0.9 * point.nll
    assert sampled.ece < point.ece
    assert sampled.accuracy > point.accuracy - 0.02


@pytest.mark.slow
def test_evolution_trains_without_a_gradient():
    evolution, digits = load("evolution.py"), load_digits()
    logits, start = evolution.network(seed=0)
    end = evolution.evolve(logits, start, digits, generations=600, seed=0)
    assert evolution.accuracy(logits, end, digits.test_images, digits.test_labels) > 0.9


@pytest.mark.slow
def test_the_intrinsic_dimension_of_digits_lies_between_its_neighbours():
    example = load("intrinsic_dimension.py")
    dimensions = (48, 192)
    direct, found = example.curve(load_digits(), dimensions, epochs=40)
    assert direct.mean() > 0.96
    assert example.intrinsic_dimension(dimensions, found, direct) == 192
