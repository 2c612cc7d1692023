"""``python -m mapfn`` and ``mapfn``: the console command, where its extra is installed."""

import importlib.util
import sys


def main() -> None:
    """Run the command, or say in one line what has to be installed for it."""
    missing = [name for name in ("typer", "rich") if not _installed(name)]
    if missing:
        print(f'mapfn: {" and ".join(missing)} missing: pip install "mapfn[demo]"', file=sys.stderr)
        raise SystemExit(1)
    from mapfn.cli import main as command

    command()


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # what a module that was blocked gives
        return False


if __name__ == "__main__":
    main()
