"""Files that survive: a file is the old one or the new one, whenever the power goes."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file so that a kill at any moment leaves the old one or the whole new one.

    The data goes to a temporary file in the same folder, is forced to the disk and takes the
    file's place; what killed writers on this machine left behind is removed first.

    Args:
        path: the file; a link to one is followed.
        data: all of it.

    Raises:
        OSError: it cannot be written; the old file is as it was.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(f"{folder}/file", b"new")
    ...     Path(folder, "file").read_bytes(), [each.name for each in Path(folder).iterdir()]
    (b'new', ['file'])
    """
    target = Path(os.path.realpath(path))
    for stray in _strays(target):
        stray.unlink(missing_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _strays(target: Path) -> Iterator[Path]:
    """Yield temporary files of this file whose writers are gone."""
    for path in target.parent.glob(f".{_literal(target.name)}.*.tmp"):
        number = path.name.removesuffix(".tmp").rpartition(".")[2]
        if number.isdigit() and not _runs(int(number)):
            yield path


def _literal(name: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _runs(number: int) -> bool:
    """Say whether another process of this number may be writing; one of our own is not."""
    if number == os.getpid():
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _sync_folder(folder: Path) -> None:
    """Force the new name to the disk too, where a folder can be opened: not on Windows."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
