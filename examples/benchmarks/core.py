"""Speed and memory of the core: generation, a train step and the peer, side by side.

    python examples/benchmarks/core.py                        all rows, some minutes on two cores
    python examples/benchmarks/core.py --rows forward,step    some rows
    python examples/benchmarks/core.py --json rows.jsonl      also one JSON object a row
    python examples/benchmarks/core.py --device cuda          on a GPU
    python examples/benchmarks/core.py --quick                tiny sizes: does the script run?

Every ratio comes from this one run: its two sides alternate (A, B, A, B, ...), and it is the
median of the one over the median of the other. Bars are for two CPU cores. A row without a bar
is there to be compared with. Leave the machine alone meanwhile.

The rows `peer` and `orthogonal` need the PyPI package mapping-networks 0.4.0, 3 GB of memory and
a minute, for its fixed matrix takes 20 s to make. Its metadata asks for much that a train step
does not need, so install it without:

    pip install pydantic pyyaml
    pip install --no-deps --ignore-requires-python mapping-networks==0.4.0
"""

import argparse
import functools
import importlib
import importlib.util
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import Row, Rows, Settings, interleave, parser, peak_bytes, run
from torch import Tensor, nn

import mapfn

PEER_HINT = "pip install --no-deps --ignore-requires-python mapping-networks==0.4.0"

Shapes = dict[str, tuple[int, ...]]
Loss = Callable[[Tensor, Tensor], Tensor]
Wrap = Callable[[Settings, Loss], Loss]


def latent_dim(settings: Settings) -> int:
    return 64 if settings.quick else 2048


def narrower(settings: Settings) -> int:
    """Divide ResNet-50's channels by this."""
    return 8 if settings.quick else 1


class CNN2(nn.Sequential):
    """The paper's second network for 28 x 28 images: 108,618 weights."""

    def __init__(self) -> None:
        features = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)]
        features += [nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        super().__init__(*features, nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10))


def resnet50_shapes(divisor: int) -> Shapes:
    """List the shapes of ResNet-50's 161 tensors, 25,557,032 weights."""
    shapes: Shapes = {}

    def conv(name: str, outputs: int, inputs: int, size: int) -> None:
        shapes[f"{name}.conv"] = (outputs, inputs, size, size)
        shapes[f"{name}.norm.weight"] = shapes[f"{name}.norm.bias"] = (outputs,)

    width, inputs = 64 // divisor, 64 // divisor
    conv("stem", width, 3, 7)
    for stage, depth in enumerate((3, 4, 6, 3)):
        for block in range(depth):
            name = f"{stage}.{block}"
            conv(f"{name}.a", width, inputs, 1)
            conv(f"{name}.b", width, width, 3)
            conv(f"{name}.c", 4 * width, width, 1)
            if block == 0:
                conv(f"{name}.skip", 4 * width, inputs, 1)
            inputs = 4 * width
        width *= 2
    shapes["head.weight"], shapes["head.bias"] = (1000 // divisor, inputs), (1000 // divisor,)
    return shapes


@dataclass
class Generation:
    """What it takes to generate some leaves, forward and backward."""

    spec: Any
    latents: dict[str, Tensor]
    buffers: Any
    gradients: list[Tensor]

    def forward(self) -> object:
        return mapfn.generate(self.spec, self.latents, self.buffers)

    def both_ways(self) -> object:
        latents = {name: latent.detach().requires_grad_() for name, latent in self.latents.items()}
        params = mapfn.generate(self.spec, latents, self.buffers)
        outputs = [params[name] for name in sorted(params)]
        return torch.autograd.grad(outputs, list(latents.values()), self.gradients)


def weights(settings: Settings, shapes: Shapes, num_latents: int = 0) -> Generation:
    """Make everything that generating leaves of these shapes needs, from one latent."""
    target = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    num_latents = num_latents or latent_dim(settings)
    spec = mapfn.make_spec(target, strategy="slvt", latent_dim=num_latents)
    latents, buffers = mapfn.init(spec, seed=0, device=settings.device)
    gradients = [torch.randn(shapes[name], device=settings.device) for name in sorted(shapes)]
    return Generation(spec, latents, buffers, gradients)


def resnet50(settings: Settings) -> Generation:
    return weights(settings, resnet50_shapes(narrower(settings)))


def num_weights(settings: Settings) -> int:
    return sum(math.prod(shape) for shape in resnet50_shapes(narrower(settings)).values())


def over_randn(settings: Settings, one_leaf: bool, both: bool) -> Row:
    """Time generation beside filling as many numbers, as ResNet-50's leaves or as one leaf."""
    size = num_weights(settings)
    made = weights(settings, {"w": (size,)}) if one_leaf else resnet50(settings)
    randn = functools.partial(torch.randn, size, device=settings.device)
    ours, other = interleave(settings, made.both_ways if both else made.forward, randn)
    what = f"generate {size / 1e6:.1f} M, {'one leaf' if one_leaf else '161 leaves'}, "
    what += f"{'forward and backward' if both else 'forward'}, over torch.randn"
    return Row(what, 1.0 if both else 0.5, ours / other, ms={"ours": ours, "randn": other})


def copy(settings: Settings) -> Row:
    source = torch.randn(num_weights(settings), device=settings.device)
    ours, other = interleave(settings, resnet50(settings).forward, source.clone)
    ms = {"ours": ours, "copy": other}
    return Row("generate as above, 161 leaves, forward, over a copy", None, ours / other, ms=ms)


def large_latent(settings: Settings) -> Row:
    size, large, small = (2**17, 64, 16) if settings.quick else (2**23, 4096, 64)
    sides = [weights(settings, {"w": (size,)}, dim).forward for dim in (large, small)]
    ours, other = interleave(settings, *sides)
    what = f"generate {size / 1e6:.1f} M, forward, {large} latents over {small}"
    return Row(what, 2, ours / other, ms={str(large): ours, str(small): other})


class TrainStep:
    """One step of Adam on a batch of 64: loss, gradients, update."""

    def __init__(self, trained: Sequence[Tensor], loss: Loss, device: str) -> None:
        self.optimizer, self.loss = torch.optim.Adam(trained, lr=0.001), loss
        self.batch = torch.randn(64, 1, 28, 28, device=device)
        self.labels = torch.randint(10, (64,), device=device)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.loss(self.batch, self.labels))
        self.optimizer.step()


def compiled(settings: Settings, loss: Loss) -> Loss:
    """Compile loss and gradients; the optimizer stays eager, on both sides."""
    backend = "aot_eager" if settings.quick else "inductor"
    return torch.compile(loss, fullgraph=True, dynamic=False, backend=backend)


def unchanged(settings: Settings, loss: Loss) -> Loss:
    return loss


def direct_step(settings: Settings, wrap: Wrap = unchanged) -> TrainStep:
    target = CNN2().to(settings.device)

    def loss(batch: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(target(batch), labels)

    return TrainStep(list(target.parameters()), wrap(settings, loss), settings.device)


def our_step(settings: Settings, wrap: Wrap = unchanged, **options: Any) -> TrainStep:
    with torch.device("meta"):
        target = CNN2()
    spec = mapfn.make_spec(target, strategy="slvt", latent_dim=latent_dim(settings), **options)
    latents, buffers = mapfn.init(spec, seed=0, device=settings.device)
    latents = {name: latent.detach().requires_grad_() for name, latent in latents.items()}
    state = mapfn.init_state(target)

    def loss(batch: Tensor, labels: Tensor) -> Tensor:
        params = mapfn.generate(spec, latents, buffers)
        outputs, _ = mapfn.apply(target, params, state, batch)
        return nn.functional.cross_entropy(outputs, labels)

    return TrainStep(list(latents.values()), wrap(settings, loss), settings.device)


@functools.cache
def peer_step(settings: Settings) -> TrainStep:
    peer = importlib.import_module("mapping_networks")
    strategy = peer.SLVTStrategy(allow_large=True)
    model = peer.MappingModel(CNN2(), latent_dim=latent_dim(settings), strategy=strategy)
    model.to(settings.device)

    def loss(batch: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(batch).predictions, labels)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return TrainStep(trained, loss, settings.device)


def step(settings: Settings, wrap: Wrap = unchanged) -> Row:
    ours, other = interleave(settings, our_step(settings, wrap), direct_step(settings, wrap))
    how = "eager" if wrap is unchanged else "compiled"
    what = f"train step, CNN2, SLVT {latent_dim(settings)}, {how}, over direct training"
    return Row(what, 1.15, ours / other, ms={"ours": ours, "direct": other})


def over_ours(settings: Settings, what: str, bar: float, **options: Any) -> Row:
    if importlib.util.find_spec("mapping_networks") is None:
        return Row(what, bar, None, at_least=True, note=PEER_HINT)
    theirs, ours = interleave(settings, peer_step(settings), our_step(settings, **options))
    return Row(what, bar, theirs / ours, at_least=True, ms={"theirs": theirs, "ours": ours})


def peer(settings: Settings) -> Row:
    return over_ours(settings, "train step, mapping-networks 0.4.0 over ours", 80)


def orthogonal(settings: Settings) -> Row:
    what = "train step, mapping-networks 0.4.0 over our dense map"
    return over_ours(settings, what, 10, mapper=mapfn.orthogonal())


def stored(settings: Settings) -> Row:
    buffers = resnet50(settings).buffers
    tensors = [tensor for group in buffers.values() for tensor in group.values()]
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    what = f"stored fixed bytes a generated weight, 161 leaves ({total:,} in all)"
    return Row(what, 1, total / num_weights(settings), "bytes")


def memory(settings: Settings, both: bool) -> Row:
    """Measure in a process of its own: this script again, with a hidden option."""
    command = [sys.executable, __file__, "--device", settings.device, "--probe", f"{both:d}"]
    command += ["--quick"] * settings.quick
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    own = 4 * num_weights(settings)
    extra = (int(answer) - own) / own
    if both:
        return Row("extra peak memory, backward, beyond weights and gradients", None, extra)
    return Row("extra peak memory, forward, beyond the weights", 0.25, extra)


def probe(settings: Settings, both: bool) -> int:
    """Return the peak bytes of one generation; the gradients that enter exist before."""
    weights(settings, {"w": (2**16,)}).both_ways()  # what only the first call costs
    made = resnet50(settings)
    return peak_bytes(settings, made.both_ways if both else made.forward)


def init(settings: Settings) -> Row:
    spec = mapfn.make_spec(CNN2(), strategy="slvt", latent_dim=latent_dim(settings))
    (ours,) = interleave(settings, lambda: mapfn.init(spec, seed=0, device=settings.device))
    return Row(f"init of CNN2, SLVT {latent_dim(settings)}", 10, ours, "ms", ms={"ours": ours})


ROWS: Rows = {
    "forward": functools.partial(over_randn, one_leaf=False, both=False),
    "backward": functools.partial(over_randn, one_leaf=False, both=True),
    "leaf-forward": functools.partial(over_randn, one_leaf=True, both=False),
    "leaf-backward": functools.partial(over_randn, one_leaf=True, both=True),
    "step": step,
    "step-compiled": functools.partial(step, wrap=compiled),
    "peer": peer,
    "orthogonal": orthogonal,
    "stored": stored,
    "memory": functools.partial(memory, both=False),
    "memory-backward": functools.partial(memory, both=True),
    "large-latent": large_latent,
    "init": init,
    "copy": copy,
}


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--probe", type=int, help=argparse.SUPPRESS)
    chosen = options.parse_args(argv)
    settings = Settings(chosen.device, chosen.quick)
    if chosen.probe is None:
        run(ROWS, settings, options, chosen)
    else:
        print(probe(settings, bool(chosen.probe)))


if __name__ == "__main__":
    main()
