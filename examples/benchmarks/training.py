"""Speed of training: whole steps, ensembles and the mapping loss, side by side.

    python examples/benchmarks/training.py                    all rows, some minutes on two cores
    python examples/benchmarks/training.py --rows step-cnn,step-mlp
    python examples/benchmarks/training.py --json rows.jsonl  also one JSON object a row
    python examples/benchmarks/training.py --device cuda      on a GPU
    python examples/benchmarks/training.py --quick            tiny sizes: does the script run?

Every ratio comes from this one run: its sides take turns (A, B, A, B, ...), and it is the median
of the one over the median of the other. All sides of a row see the same batch of 64 and update by
Adam. Bars are for two CPU cores. A row without a bar is there to be compared with. Leave the
machine alone meanwhile.

`step-*`: the step of `make_step` in one graph, over the faster of two ways to train the same
target directly: `functional`, its weights in a dict, `functional_call` under `grad` and our Adam,
in one graph as well; and `module`, compiled forward and backward with torch's own fused Adam.
CNN2 has 108,618 weights, trained through 2,048 latents; the MLP 784-256-256-10, three layers,
has 269,322, through 256.

`members-*`: what a Python loop over K states takes, one compiled step each, over the one compiled
step of `make_ensemble`. The MLP 64-64-64-10 has 8,970 weights, trained through 256 latents. For
CNN2 the better of `vmap` and `loop` counts, for one chooses by measurement.

`full-loss`: a step with stability, smoothness and alignment over a step without.

`peer-full-loss` is the same step of the PyPI package mapping-networks 0.4.0, by its own trainer,
eager on both sides. It needs 10 GB of memory and some minutes; core.py says how to install it.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from core import CNN2, PEER_HINT, latent_dim
from harness import Row, Rows, Settings, interleave, main
from torch import Tensor, nn

import mapfn
from mapfn import ensemble, losses, optim, train
from mapfn.steps import Training

RATE = 0.001

Batch = tuple[Tensor, Tensor]
Model = Callable[[], nn.Module]
Steps = Mapping[str, "Measured"]
Function = TypeVar("Function", bound=Callable[..., Any])

cross_entropy = nn.functional.cross_entropy


def mlp(inputs: int, width: int) -> nn.Sequential:
    """Make three linear layers, two of them of this width and one for ten classes."""
    hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def batch_for(settings: Settings, target: nn.Module) -> Batch:
    first = next(target.parameters())
    shape = (1, 28, 28) if first.dim() == 4 else (first.shape[1],)
    inputs = torch.randn(64, *shape, device=settings.device)
    return inputs, torch.randint(10, (64,), device=settings.device)


def compiled(settings: Settings, function: Function) -> Function:
    backend = "aot_eager" if settings.quick else "inductor"
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)


class Measured(Protocol):
    """A training that takes a step at every call, and remembers the loss."""

    loss: Tensor

    def __call__(self) -> None: ...


class Pure:
    """``step(state, batch) -> (state, info)``, of ours or of a direct training in that form."""

    def __init__(self, step: Callable[..., Any], state: Any, batch: Batch) -> None:
        self.step, self.state, self.batch = step, state, batch

    def __call__(self) -> None:
        self.state, info = self.step(self.state, self.batch)
        self.loss = info.loss if hasattr(info, "loss") else info


class Loop:
    """Several states, one step each in turn."""

    def __init__(self, step: Callable[..., Any], states: Sequence[Any], batch: Batch) -> None:
        self.members = [Pure(step, state, batch) for state in states]

    def __call__(self) -> None:
        for member in self.members:
            member()
        self.loss = self.members[-1].loss


class Module:
    """Direct training of a module with torch's fused Adam."""

    def __init__(self, settings: Settings, target: nn.Module, batch: Batch) -> None:
        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy(target(inputs), labels)

        self.optimizer = torch.optim.Adam(target.parameters(), lr=RATE, fused=True)
        self.objective, self.batch = compiled(settings, loss), batch

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.loss = self.objective(*self.batch)
        torch.autograd.backward(self.loss)
        self.optimizer.step()


class Peer:
    """Epochs of one batch by the peer's own trainer."""

    def __init__(self, settings: Settings) -> None:
        peer = importlib.import_module("mapping_networks")
        strategy = peer.SLVTStrategy(allow_large=True)
        target = CNN2().to(settings.device)
        self.trainer = peer.MappingTrainer(
            peer.MappingModel(target, latent_dim=latent_dim(settings), strategy=strategy),
            [batch_for(settings, target)],
            loss_fn=peer.MappingLoss(task_loss=peer.ClassificationLoss()),
            config=peer.TrainerConfig(max_epochs=1, learning_rate=RATE, device=settings.device),
        )

    def __call__(self) -> None:
        self.loss = torch.tensor(self.trainer.fit()["train_loss"])


def functional(settings: Settings, target: nn.Module, batch: Batch) -> Pure:
    """Train directly with our Adam, the whole step in one graph."""
    optimizer = optim.adam(RATE)

    def objective(params: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(torch.func.functional_call(target, params, inputs), labels)

    def step(state: Any, batch: Batch) -> tuple[Any, Tensor]:
        params, own = state
        gradients, loss = torch.func.grad_and_value(objective)(params, *batch)
        updates, own = optimizer.update(gradients, own, params)
        return (optim.apply_updates(params, updates), own), loss

    params = {name: leaf.detach().clone() for name, leaf in target.named_parameters()}
    return Pure(compiled(settings, step), (params, optimizer.init(params)), batch)


def training(model: Model, num_latents: int, loss: Any = cross_entropy) -> Training:
    with torch.device("meta"):
        target = model()
    spec = mapfn.make_spec(target, strategy="slvt", latent_dim=num_latents)
    return train.make_step(spec, target, loss, optim.adam(RATE))


def medians(settings: Settings, steps: Steps) -> dict[str, float]:
    """Measure in turns; refuse a training that went astray."""
    found = dict(zip(steps, interleave(settings, *steps.values()), strict=True))
    for name, step in steps.items():
        if not step.loss.isfinite().all():
            raise RuntimeError(f"{name}: the loss is {step.loss}")
    return found


def over_direct(settings: Settings, what: str, model: Model, num_latents: int, bar: float) -> Row:
    torch.compiler.reset()
    own, targets = training(model, num_latents), [model().to(settings.device) for _ in range(2)]
    batch = batch_for(settings, targets[0])
    state = own.init(seed=0, device=settings.device)
    steps: Steps = {
        "ours": Pure(compiled(settings, own.step), state, batch),
        "functional": functional(settings, targets[0], batch),
        "module": Module(settings, targets[1], batch),
    }
    ms = medians(settings, steps)
    what = f"compiled step, {what}, SLVT {num_latents}, over direct training"
    return Row(what, bar, ms["ours"] / min(ms["functional"], ms["module"]), ms=ms)


def step_cnn(settings: Settings) -> Row:
    return over_direct(settings, "CNN2", CNN2, latent_dim(settings), 1.15)


def step_mlp(settings: Settings) -> Row:
    inputs, width, num_latents = (16, 16, 16) if settings.quick else (784, 256, 256)
    model = functools.partial(mlp, inputs, width)
    what = f"MLP {inputs}-{width}-{width}-10"
    return over_direct(settings, what, model, num_latents, 1.3)


def members(
    settings: Settings,
    what: str,
    model: Model,
    num_latents: int,
    count: int,
    methods: Sequence[ensemble.Method],
    bar: float,
) -> Row:
    torch.compiler.reset()
    single = training(model, num_latents)
    batch = batch_for(settings, model())
    start = functools.partial(single.init, device=settings.device)
    states = [start(seed) for seed in range(count)]
    steps: Steps = {"singly": Loop(compiled(settings, single.step), states, batch)}
    for method in methods:
        own = ensemble.make_ensemble(Training(start, single.step), method=method)
        steps[method] = Pure(compiled(settings, own.step), own.init(range(count)), batch)
    ms = medians(settings, steps)
    what = f"{count} members, {what}, SLVT {num_latents}, singly over together"
    return Row(what, bar, ms["singly"] / min(ms[name] for name in methods), at_least=True, ms=ms)


def members_mlp(settings: Settings, count: int, bar: float) -> Row:
    model, count = functools.partial(mlp, 64, 64), 2 if settings.quick else count
    num_latents = 16 if settings.quick else 256
    return members(settings, "MLP 64-64-64-10", model, num_latents, count, ("vmap",), bar)


def members_cnn(settings: Settings) -> Row:
    count = 2 if settings.quick else 8
    return members(settings, "CNN2", CNN2, latent_dim(settings), count, ("vmap", "loop"), 1)


def full_loss() -> losses.mapping_loss:
    """Weigh the terms as the peer does by default."""
    weights = {"stability": 0.1, "smoothness": 0.01, "alignment": 0.01, "noise": 0.01}
    return losses.mapping_loss(cross_entropy, **weights)


def step_with(settings: Settings, loss: Any, compile: bool) -> Pure:
    own = training(CNN2, latent_dim(settings), loss)
    step = compiled(settings, own.step) if compile else own.step
    state = own.init(seed=0, device=settings.device)
    return Pure(step, state, batch_for(settings, CNN2()))


def over_task(settings: Settings, compile: bool) -> Row:
    torch.compiler.reset()
    full, task = (step_with(settings, loss, compile) for loss in (full_loss(), cross_entropy))
    ms = medians(settings, {"full": full, "task": task})
    how = "compiled" if compile else "eager"
    what = f"full mapping loss over task loss, CNN2, SLVT {latent_dim(settings)}, {how}"
    return Row(what, 2.2 if compile else None, ms["full"] / ms["task"], ms=ms)


def peer(settings: Settings) -> Row:
    what = "full mapping loss step, mapping-networks 0.4.0 over ours, both eager"
    if importlib.util.find_spec("mapping_networks") is None:
        return Row(what, 80, None, at_least=True, note=PEER_HINT)
    steps: Steps = {"theirs": Peer(settings), "ours": step_with(settings, full_loss(), False)}
    ms = medians(settings, steps)
    return Row(what, 80, ms["theirs"] / ms["ours"], at_least=True, ms=ms)


ROWS: Rows = {
    "step-cnn": step_cnn,
    "step-mlp": step_mlp,
    "members-8": functools.partial(members_mlp, count=8, bar=3),
    "members-32": functools.partial(members_mlp, count=32, bar=8),
    "members-cnn": members_cnn,
    "full-loss": functools.partial(over_task, compile=True),
    "full-loss-eager": functools.partial(over_task, compile=False),
    "peer-full-loss": peer,
}


if __name__ == "__main__":
    main(ROWS, __doc__)
