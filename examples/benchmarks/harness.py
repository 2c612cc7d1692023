"""What the benchmark scripts share: rows, timing in turns, memory, the table and its options."""

import argparse
import ctypes
import gc
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

TURN_SECONDS = 0.1  # short functions are called several times a turn

LOAD_BEFORE = round(os.getloadavg()[0], 1)  # near 0, or the numbers are another job's too

Call = Callable[[], object]


@dataclass(frozen=True)
class Settings:
    """How to run; every row takes it and picks its sizes by ``quick``."""

    device: str
    quick: bool


@dataclass
class Row:
    """One line of the table; ``measured`` and ``bar`` share a unit."""

    what: str
    bar: float | None
    measured: float | None
    unit: str = "x"
    at_least: bool = False
    ms: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.bar is None or self.measured is None:
            return None
        return self.measured >= self.bar if self.at_least else self.measured <= self.bar


Rows = dict[str, Callable[[Settings], Row]]


def interleave(settings: Settings, *functions: Call) -> list[float]:
    """Return the median milliseconds a call of each function, taking turns."""
    calls = [1 if settings.quick else _calls(function) for function in functions]
    pairs = list(zip(functions, calls, strict=True))
    turns = [[_seconds(*pair) for pair in pairs] for _ in range(2 if settings.quick else 15)]
    return [1e3 * statistics.median(column) for column in zip(*turns, strict=True)]


def _calls(function: Call) -> int:
    return max(1, round(TURN_SECONDS / _seconds(function, 3)))


def _seconds(function: Call, calls: int) -> float:
    function()  # untimed: what ran before has left its own data in the caches
    _synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    _synchronize()
    return (time.perf_counter() - start) / calls


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(settings: Settings, function: Call) -> int:
    """Return the peak memory above what is held now, results included.

    On a CPU it is the process's own peak, so call it in a process of its own: freed memory that
    the process still holds would hide what the function takes.
    """
    gc.collect()
    if settings.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = function()
        del kept
        return torch.cuda.max_memory_allocated() - before
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _peak_resident()
    kept = function()
    del kept
    return _peak_resident() - before


def _peak_resident() -> int:
    if sys.platform == "linux":  # a child's ru_maxrss starts at its parent's peak, VmHWM does not
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def parser(manual: str) -> argparse.ArgumentParser:
    """Build the options that every benchmark script has; ``manual`` is the script's docstring."""
    formatter = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=manual, formatter_class=formatter)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--quick", action="store_true", help="tiny sizes; bars say nothing then")
    options.add_argument("--json", type=Path, metavar="PATH", help="write one JSON object a row")
    options.add_argument("--rows", metavar="NAME,...", help="only these rows")
    return options


def main(rows: Rows, manual: str | None) -> None:
    """Read the command line of a script without options of its own, and run it."""
    options = parser(manual or "")
    chosen = options.parse_args()
    run(rows, Settings(chosen.device, chosen.quick), options, chosen)


def run(
    rows: Rows, settings: Settings, options: argparse.ArgumentParser, chosen: argparse.Namespace
) -> None:
    """Measure the chosen rows and print them; JSON lines are written as they come."""
    names = chosen.rows.split(",") if chosen.rows else list(rows)
    if unknown := [name for name in names if name not in rows]:
        options.error(f"no row {', '.join(unknown)}; there are: {', '.join(rows)}")
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = _table(settings)
    if chosen.json:
        chosen.json.write_text("")
    try:
        for name in names:
            with console.status(name):
                row = rows[name](settings)
            table.add_row(name, *_cells(row, settings))
            if chosen.json:
                with chosen.json.open("a") as file:
                    file.write(json.dumps({"name": name} | _record(row, settings)) + "\n")
    finally:  # what is measured is shown, whatever stops the rest
        console.print(table)


def _environment(settings: Settings) -> dict[str, object]:
    device = settings.device if settings.device == "cpu" else torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    facts = {"device": device, "threads": threads, "torch": torch.__version__}
    return facts | {"python": platform.python_version(), "load": LOAD_BEFORE}


def _record(row: Row, settings: Settings) -> dict[str, object]:
    met = None if settings.quick else row.met
    return asdict(row) | {"met": met, "quick": settings.quick} | _environment(settings)


def _table(settings: Settings) -> Table:
    facts = [f"{name} {value}" for name, value in _environment(settings).items()]
    sizes = ["tiny sizes, bars say nothing"] if settings.quick else []
    table = Table(box=box.SIMPLE_HEAD, title=", ".join([*facts, *sizes]))
    table.add_column("row")
    table.add_column("what", ratio=1)
    table.add_column("bar", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("ms", justify="right")
    table.add_column("met")
    return table


def _cells(row: Row, settings: Settings) -> list[str]:
    bar = "" if row.bar is None else f"{'>=' if row.at_least else '<='} {row.bar:g}"
    measured = "-" if row.measured is None else f"{row.measured:.3g} {row.unit}"
    ms = ", ".join(f"{name} {value:.3g}" for name, value in row.ms.items())
    met = "" if settings.quick else {None: "", True: "yes", False: "NO"}[row.met]
    what = f"{row.what}\n[dim]{row.note}[/dim]" if row.note else row.what
    return [what, bar, measured, ms, met]
