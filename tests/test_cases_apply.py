"""Cases from users of neighbouring tools: names, batches and methods of one call."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mapfn


class Normed(nn.Sequential):
    """A net with params and state."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))


def made(target: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Generate params for a target, and copy its state."""
    spec = mapfn.make_spec(target, latent_dim=5)
    return mapfn.generate(spec, *mapfn.init(spec, seed=1)), mapfn.init_state(target)


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {new if name == old else name: tensor for name, tensor in tensors.items()}


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


WRONG = {
    "missing": (lambda t, name: without(t, name), "missing '{name}'"),
    "extra": (lambda t, name: t | {"more": t[name]}, "extra 'more'"),
    "misspelt": (lambda t, name: renamed(t, name, name + "s"), "missing '{name}'; extra '{name}s'"),
    "empty": (lambda t, name: {}, "missing"),
}


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize(("where", "name"), [("params", "0.weight"), ("state", "1.running_var")])
@pytest.mark.parametrize("transform", ["eager", "grad", "vmap", "call"])
def test_wrong_names_are_refused(how: str, where: str, name: str, transform: str) -> None:
    """C1: a missing, extra or misspelt name never means the module's own weight."""
    spoil, text = WRONG[how]
    target, inputs = Normed().eval(), torch.randn(4, 3)
    given = dict(zip(("params", "state"), made(target), strict=True))
    given[where] = spoil(given[where], name)

    def loss(params: dict[str, Tensor], state: dict[str, Tensor], inputs: Tensor) -> Tensor:
        run = mapfn.call if transform == "call" else mapfn.apply
        return run(target, params, state, inputs)[0].sum()

    run: Callable[..., Any] = loss
    if transform == "grad":
        run = torch.func.grad(loss)
    elif transform == "vmap":
        run, inputs = torch.vmap(loss, in_dims=(None, None, 0)), inputs[:, None]
    with pytest.raises(ValueError, match=rf"{where}.*{text.format(name=name)}"):
        run(given["params"], given["state"], inputs)


@pytest.mark.parametrize("shape", [(1, 3), (4, 1), (3,), (4, 3, 1)])
def test_shapes_that_would_broadcast_are_refused(shape: tuple[int, ...]) -> None:
    """C1: a wrong shape is as wrong as a wrong name, even where torch would broadcast it."""
    target = Normed().eval()
    params, state = made(target)
    with pytest.raises(ValueError, match=r"params\['0.weight'\]: expected shape \(4, 3\)"):
        mapfn.apply(target, params | {"0.weight": torch.ones(shape)}, state, torch.ones(1, 3))


class KeywordsOnly(nn.Module):
    """Takes its batch as a dictionary, names that look like our own among them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, *, params: Tensor, state: Tensor, method: Tensor, training: Tensor) -> Tensor:
        return self.fc(params * state + method) * training


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)


def mapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Map over the first dimension of the batch, and sum what comes out."""
    batched = torch.vmap(function, in_dims=(None, 0))
    return lambda params, batch: batched(params, batch).sum()


@pytest.mark.parametrize("wrap", [None, torch.func.grad, mapped, compiled])
def test_batch_of_keywords_alone(wrap: Callable[..., Any] | None) -> None:
    """C2: a batch that is a dict of tensors needs no stand-in, under any transform."""
    torch.compiler.reset()
    target = KeywordsOnly()
    params, _ = made(target)
    names = ("params", "state", "method", "training")
    batch = {name: torch.randn(4, 3 if name != "training" else 1) for name in names}

    def loss(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return mapfn.apply(target, params, {}, **batch)[0].sum()

    def expected(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        hidden = (batch["params"] * batch["state"] + batch["method"]) @ params["fc.weight"].T
        return ((hidden + params["fc.bias"]) * batch["training"]).sum()

    right = torch.func.grad(expected) if wrap is torch.func.grad else expected
    got = (wrap or (lambda function: function))(loss)(params, batch)
    torch.testing.assert_close(got, right(params, batch))


class Writer(nn.Module):
    """Several methods that share weights, keyword names of ours, and a loop over itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Dropout(0.5))
        self.head = nn.Linear(3, 3, bias=False)
        self.head.eval()

    def encode(self, x: Tensor, *, method: float = 1.0, training: float = 1.0) -> Tensor:
        return self.encoder(x) * method * training

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))

    def write(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = self(x)
        return x

    def fail(self, x: Tensor) -> Tensor:
        raise KeyError("no word")


EYE = {"encoder.0.weight": 2 * torch.eye(3), "head.weight": 3 * torch.eye(3)}


@pytest.mark.parametrize("wrap", [lambda target: target, torch.compile, nn.DataParallel])
@pytest.mark.parametrize(
    ("method", "args", "factor"),
    [
        *[("forward", (), 6), ("encode", (), 2), ("write", (0,), 1), ("write", (3,), 216)],
        *[("encoder", (), 2), ("head", (), 3), ("encoder.0", (), 2), ("encoder.forward", (), 2)],
    ],
)
def test_other_methods_use_the_given_weights(
    wrap: Callable[..., Any], method: str, args: tuple[int, ...], factor: float
) -> None:
    """C21: a method, a loop that calls the module itself, a submodule: all use the params."""
    target, x = wrap(Writer()), torch.tensor([[1.0, -2.0, 0.5]])
    outputs, state = mapfn.call(target, EYE, {}, x, *args, method=method, training=False)
    assert (outputs.tolist(), state) == ((factor * x).tolist(), {})


def test_keyword_names_of_the_target_are_its_own() -> None:
    """C21: our keywords never take the names that the target's method has itself."""
    kwargs = {"method": 5.0, "training": 7.0}
    outputs, _ = mapfn.call(
        Writer(), EYE, {}, torch.ones(1, 3), method="encode", training=False, kwargs=kwargs
    )
    assert outputs.tolist() == [[70.0, 70.0, 70.0]]


@pytest.mark.parametrize("method", ["encode", "fail"])
@pytest.mark.parametrize("training", [True, False, None])
def test_flags_and_weights_are_put_back(method: str, training: bool | None) -> None:
    """C21: every submodule's own mode, and its own weights, are back even after an error."""
    target = Writer()
    before = [(module, module.training) for module in target.modules()]
    weights = {name: (id(leaf), leaf.tolist()) for name, leaf in target.named_parameters()}
    attributes = set(vars(target))
    outcome = pytest.raises(KeyError, match="no word") if method == "fail" else nullcontext()
    with outcome:
        outputs, _ = mapfn.call(target, EYE, {}, torch.ones(9, 3), method=method, training=training)
        assert bool((outputs == 0).any()) == (training is not False)
    assert [(module, module.training) for module in target.modules()] == before
    after = {name: (id(leaf), leaf.tolist()) for name, leaf in target.named_parameters()}
    assert (after, set(vars(target))) == (weights, attributes)
