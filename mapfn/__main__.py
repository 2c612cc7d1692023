"""``python -m mapfn``: the console command."""

from mapfn.cli import main

if __name__ == "__main__":
    main()
