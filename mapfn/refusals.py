"""What a target may not do inside while its weights are lent.

Activation checkpointing: a checkpointed block runs its forward pass again in the backward pass,
when the module has its own weights back. The gradients would be those of other weights, without a
word. In a compiled graph the weights are the graph's, and checkpointing is right.

BatchNorm with ``momentum=None``, in a graph or under ``vmap``: it reads a tensor as a number.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from mapfn import trees
from mapfn.errors import message

_HOOKS = "saved tensor hooks inside it"
_REENTRANT = "CheckpointFunctionBackward"


def _refusal(got: str) -> str:
    fix = "checkpoint generate and apply together instead, or compile; for a HuggingFace"
    fix += " model call gradient_checkpointing_disable()"
    expected = "a target without activation checkpointing"
    return message("apply(target)", expected=expected, got=got, fix=fix)


@contextmanager
def refused_while_running() -> Iterator[None]:
    """Refuse saved tensor hooks, by which checkpointing works, while a target runs.

    Nothing is refused where nothing is differentiated. A caller's own hooks around the call stay.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        yield
        return
    hooked = _saving_hooks() is not None
    refuse = torch.autograd.graph.disable_saved_tensors_hooks
    with _OtherHooksRefused(_saving_hooks()) if hooked else refuse(_refusal(_HOOKS)):
        try:
            yield
        except RuntimeError as error:
            if "Tensor.requires_grad_()" not in str(error):
                raise
            raise RuntimeError(_refusal("requires_grad_() in a transform")) from error


def _saving_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class _OtherHooksRefused(TorchFunctionMode):
    """Look at every operation for other hooks than the caller's; torch refuses all or none."""

    def __init__(self, hooks: Any) -> None:
        super().__init__()
        self.hooks = hooks

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _saving_hooks() != self.hooks:
            raise RuntimeError(_refusal(_HOOKS))
        return func(*args, **(kwargs or {}))


def refuse_cumulative(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Name the BatchNorm that would count its batches in Python, where no number can be read.

    Raises:
        RuntimeError: in a graph or under ``vmap``, a layer with ``momentum=None`` in training mode.
    """
    if not (torch.compiler.is_compiling() or any(map(_is_batched, state.values()))):
        return
    for path, child in module.named_modules():
        if isinstance(child, _NormBase) and child.momentum is None and child.training:
            fix = "give the layer a number, momentum=0.1"
            where, got = f"apply(target), layer {path!r}", "momentum=None, a plain average"
            raise RuntimeError(message(where, expected="a momentum", got=got, fix=fix))


def _is_batched(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def refuse_reentrant(outputs: Any, lent: Mapping[str, Tensor], inputs: Any) -> None:
    """Look for the older, reentrant checkpointing, which uses no hooks, in the outputs' graph.

    Args:
        outputs: of the target.
        lent: params and state that it ran with; the graph is not followed beyond them.
        inputs: nor beyond these.

    Raises:
        RuntimeError: a checkpointed block.
    """
    if torch.compiler.is_compiling():
        return
    known = {id(tensor.grad_fn) for tensor in (*lent.values(), *trees.tensors(inputs))}
    if any(node.name() == _REENTRANT for node in _nodes(trees.outputs(outputs), known)):
        raise RuntimeError(_refusal("a reentrant one inside it"))


def _nodes(tensors: Iterable[Tensor], seen: set[int]) -> Iterator[Any]:
    """Yield the nodes of a graph, those seen already left out."""
    waiting = [tensor.grad_fn for tensor in tensors]
    kept = []  # An id stays that of one node only as long as the node lives.
    while waiting:
        node = waiting.pop()
        if node is not None and id(node) not in seen:
            seen.add(id(node))
            kept.append(node)
            yield node
            waiting.extend(following for following, _ in node.next_functions)
