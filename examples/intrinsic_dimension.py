"""How many numbers does a problem need? The intrinsic dimension of digits for one network.

The network starts at its usual random weights, and d latents move it away from there through a
fixed random map: theta = theta_0 + scale * W z, z = 0 at first (Li et al. 2018, arXiv 1804.08838).
Accuracy grows with d; the smallest d at which it reaches 90 % of direct training's is the problem's
intrinsic dimension, d_int90. Several seeds, each with a start and a map of its own, are trained at
once: an ensemble is the very same step for all of them.

    python examples/intrinsic_dimension.py                 a minute on two CPU cores: d_int90 = 128
    python examples/intrinsic_dimension.py --plot out.png  also the curve as a picture
    python examples/intrinsic_dimension.py --quick         a short training: does the script run?

Needs scikit-learn and matplotlib: pip install mapfn[demo,plot].
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import mapfn
from mapfn import ensemble, optim, train
from mapfn.demo import Digits, load_digits

SEEDS, BATCH = range(4), 64
# Both in units of a leaf's scale (0.07 here): each is the best of a threefold grid.
RATE, DIRECT_RATE = 0.2, 0.1
DIMENSIONS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracies(spec: mapfn.Spec, rate: float, digits: Digits, epochs: int) -> Tensor:
    """Train every seed of a spec; return their accuracies on the test part, ``[seeds]``."""
    target, data = network(), (digits.train_images, digits.train_labels)
    steps = epochs * (len(digits.train_labels) // BATCH)
    optimizer = optim.adam(optim.one_cycle(rate, steps))
    single = train.make_step(spec, target, cross_entropy, optimizer)
    init, step, _ = ensemble.make_ensemble(single)
    state, loader = init(SEEDS), train.batches(data, BATCH)
    state = train.fit(step, state, loader, epochs=epochs).state
    outputs = ensemble.predict(spec, target, state, digits.test_images).outputs
    return (outputs.argmax(-1) == digits.test_labels).float().mean(-1)


def curve(digits: Digits, dimensions: Sequence[int], epochs: int) -> tuple[Tensor, list[Tensor]]:
    """Return the accuracies of direct training, and those at each number of latents."""
    target = network()
    direct = mapfn.make_spec(target, mapper=mapfn.identity(), base="init")
    mapped = [
        mapfn.make_spec(target, strategy="slvt", latent_dim=dimension, base="init")
        for dimension in dimensions
    ]
    reached = accuracies(direct, DIRECT_RATE, digits, epochs)
    return reached, [accuracies(spec, RATE, digits, epochs) for spec in mapped]


def intrinsic_dimension(
    dimensions: Sequence[int], found: Sequence[Tensor], direct: Tensor
) -> int | None:
    """Return the smallest dimension that reaches 90 % of direct training, if one does.

    >>> import torch
    >>> intrinsic_dimension((1, 2), [torch.tensor(0.1), torch.tensor(0.9)], torch.tensor(1.0))
    2
    """
    bar = 0.9 * direct.mean()
    return next((d for d, each in zip(dimensions, found, strict=True) if each.mean() >= bar), None)


def plot(path: Path, dimensions: Sequence[int], found: Sequence[Tensor], direct: Tensor) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
    means, spreads = [float(f.mean()) for f in found], [float(f.std()) for f in found]
    axes.errorbar(dimensions, means, spreads, marker="o", capsize=3, label="through d latents")
    axes.axhline(float(direct.mean()), color="black", label="direct training")
    axes.axhline(0.9 * float(direct.mean()), color="black", linestyle=":", label="90 % of it")
    axes.set(xscale="log", xlabel="latents d", ylabel="test accuracy")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the curve")
    parser.add_argument("--quick", action="store_true", help="two dimensions, two epochs")
    options = parser.parse_args(argv)
    dimensions, epochs = ((2, 64), 2) if options.quick else (DIMENSIONS, 40)
    direct, found = curve(load_digits(), dimensions, epochs)
    rows = zip(("direct", *map(str, dimensions)), (direct, *found), strict=True)
    for name, each in rows:
        print(f"{name:>8} latents{each.mean():8.1%} +- {each.std():.1%} over {len(each)} seeds")
    print(f"d_int90 = {intrinsic_dimension(dimensions, found, direct)}")
    if options.plot:
        plot(options.plot, dimensions, found, direct)


if __name__ == "__main__":
    main()
