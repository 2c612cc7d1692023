"""The file of a checkpoint: named tensors and one JSON object, under a digest of both.

It is a safetensors file (https://github.com/huggingface/safetensors): a header of names, dtypes,
shapes and offsets, then the numbers. Nothing in it can run.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from mapfn import files, fingerprints
from mapfn.errors import CheckpointError, message

SCHEMA = 1
# The name of the one string of metadata that is ours.
_KEY = "mapfn"


def write(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], data: Mapping[str, Any]
) -> None:
    """Write tensors and data, whole or not at all.

    Args:
        path: the file.
        tensors: by name, on any device, views of one another too.
        data: JSON data.

    Raises:
        TypeError: data that are no JSON data.
        OSError: the file cannot be written; an old one is as it was.
    """
    # safetensors refuses views of one tensor, and what is not contiguous.
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    data = {"schema": SCHEMA, **data}
    data["digest"] = _digest(whole, data)
    header = {_KEY: _text(data)}
    files.write_atomically(path, safetensors.torch.save(whole, metadata=header))


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Read what :func:`write` wrote, if it is whole.

    Returns:
        The tensors, on the CPU, and the data; None where another tool has dropped them.

    Raises:
        CheckpointError: a file that is damaged, or of another schema.
        OSError: it cannot be read.
    """
    with Path(path).open("rb"):
        pass  # What cannot be read at all is no damaged file, and has an error of its own.
    try:
        with safetensors.safe_open(path, "pt") as file:
            names, header = list(file.keys()), file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in names}
        data = json.loads(header[_KEY]) if _KEY in header else None
    except Exception as error:  # Whatever a damaged file makes the reader raise.
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if data is not None:
        _check(path, tensors, data)
    return tensors, data


def _check(path: Any, tensors: dict[str, Tensor], data: Any) -> None:
    if not isinstance(data, dict) or "digest" not in data:
        raise _damaged(path, "metadata of another kind")
    if data.get("schema") != SCHEMA:
        fix = f"read it with mapfn {data.get('version')}, which wrote it"
        expected, got = f"schema {SCHEMA}", f"schema {data.get('schema')!r}"
        raise CheckpointError(message(str(path), expected=expected, got=got, fix=fix))
    if _digest(tensors, data) != data["digest"]:
        raise _damaged(path, "another digest than was written")


def _digest(tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> str:
    own = {name: value for name, value in data.items() if name != "digest"}
    return fingerprints.digest(tensors, _text(own).encode())


def _text(data: Mapping[str, Any]) -> str:
    try:
        return json.dumps(data, sort_keys=True)
    except TypeError as error:
        fix, where = "pass numbers, strings, lists and dicts", "save_checkpoint(metadata=)"
        raise TypeError(message(where, expected="JSON data", got=str(error), fix=fix)) from error


def _damaged(path: Any, got: str) -> CheckpointError:
    fix = "take another copy of the file"
    return CheckpointError(message(str(path), expected="a whole checkpoint", got=got, fix=fix))
