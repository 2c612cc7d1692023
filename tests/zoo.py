"""Targets of every kind that the compile contract is kept for, all tiny."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm


class Row(NamedTuple):
    """One kind of target."""

    name: str
    build: Callable[[], Any]
    """Returns what a spec is made from: a module, or a tree of tensors."""
    inputs: Callable[[int], Tensor]
    """Makes one batch."""
    function: Callable[..., tuple[Any, Any]] | None = None
    """Runs the tree; None for a module."""
    refuses: tuple[str, ...] = ()
    """Transforms that torch itself does not have for it."""

    def built(self) -> tuple[Any, Any]:
        """Return what a spec is made from and what is run, the same values every time."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            tree = self.build()
        return tree, self.function or tree


def loss(outputs: Tensor) -> Tensor:
    """Weigh each output differently: a plain sum has no gradient behind a norm layer."""
    weights = torch.linspace(-1, 1, outputs[0].numel()).view(outputs[0].shape)
    return (outputs * weights).sum() + outputs.square().mean()


def numbers(*shape: int) -> Callable[[int], Tensor]:
    """Make batches of fixed floating numbers of one shape."""

    def batch(size: int) -> Tensor:
        return torch.linspace(-9, 9, size * math.prod(shape)).sin().view(size, *shape)

    return batch


def tokens(batch: int) -> Tensor:
    return (torch.arange(batch * 3) * 2 % 5).view(batch, 3)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def convolutional(dropout: float = 0.0) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten()]
    layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(8, 2))


def with_dropout() -> nn.Module:
    return convolutional(0.5)


class Residual(nn.Module):
    """Two blocks around skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x).relu()
        return x + self.second(x).relu()


class Recurrent(nn.Module):
    """An LSTM over a short sequence, and a head on its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    """One attention block; the head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.qkv = nn.Linear(4, 12)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        x = self.embed(index)
        heads = self.qkv(self.norm(x)).view(*index.shape, 3, 2, 2).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + attended.transpose(1, 2).flatten(2))


def weight_normed() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


class Layer(NamedTuple):
    """A part of the tree target."""

    weight: Tensor
    bias: Tensor


def nested() -> Any:
    layers = [Layer(torch.randn(i, o), torch.zeros(o)) for i, o in ((3, 4), (4, 2))]
    return {"layers": layers, "gain": torch.ones(())}


def run_nested(params: Any, state: Any, x: Tensor) -> tuple[Tensor, Any]:
    first, second = params["layers"]
    hidden = torch.tanh(x @ first.weight + first.bias)
    return (hidden @ second.weight + second.bias) * params["gain"], state


ZOO = {
    row.name: row
    for row in (
        Row("mlp", perceptron, numbers(3)),
        Row("cnn", convolutional, numbers(1, 3, 3)),
        Row("dropout", with_dropout, numbers(1, 3, 3)),
        Row("residual", Residual, numbers(3)),
        Row("lstm", Recurrent, numbers(3, 2), refuses=("vmap", "vmap_grad_and_value")),
        Row("transformer", Transformer, tokens),
        Row("weight_norm", weight_normed, numbers(3)),
        Row("tree", nested, numbers(3), function=run_nested),
    )
}
