"""Calibrated predictions from a full Laplace approximation, because there are few latents.

A network trained to zero loss on 300 digits is too sure of itself. All of it hangs on 256 latents,
so the Hessian of its negative log likelihood is one small matrix, and with a Gaussian prior its
inverse is the covariance of a Gaussian over networks (MacKay 1992; Daxberger et al. 2021, arXiv
2106.14806). Predictions are averaged over samples of it, one `vmap`. The precision of the prior is
chosen on a validation part, after training; the test part is looked at for the table alone.

    python examples/laplace.py              some seconds on two CPU cores
    python examples/laplace.py --seed 3     other training images, other latents, another map
    python examples/laplace.py --quick      a short training: does the script run?

Needs scikit-learn: pip install mapfn[demo].
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

import mapfn
from mapfn import optim, train
from mapfn.demo import load_digits

NUM_LATENTS, NUM_TRAIN, NUM_VALIDATION, BATCH, NUM_SAMPLES = 256, 300, 300, 50, 100
PRECISIONS = tuple(10 ** (exponent / 3) for exponent in range(-9, 7))

Part = tuple[Tensor, Tensor]  # images [n, 64], labels [n]
Logits = Callable[[Tensor, Tensor], Tensor]  # latent [d], images [n, 64] -> [n, 10]


class Scores(NamedTuple):
    accuracy: float
    nll: float
    ece: float


def split(seed: int) -> tuple[Part, Part, Part]:
    """Draw the training and the validation part; the test part is the same for every seed."""
    digits = load_digits()
    order = torch.randperm(len(digits.train_labels), generator=torch.Generator().manual_seed(seed))
    images, labels = digits.train_images.flatten(1)[order], digits.train_labels[order]
    held = slice(NUM_TRAIN, NUM_TRAIN + NUM_VALIDATION)
    test = digits.test_images.flatten(1), digits.test_labels
    return (images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[held], labels[held]), test


def train_point(part: Part, seed: int, epochs: int) -> tuple[Logits, Tensor]:
    """Train the latent; return the network as a function of it, and where it ended."""
    target = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    spec = mapfn.make_spec(target, strategy="slvt", latent_dim=NUM_LATENTS)
    optimizer = optim.adam(optim.one_cycle(0.3, epochs * (NUM_TRAIN // BATCH)))
    init, step = train.make_step(spec, target, cross_entropy, optimizer)
    state = train.fit(step, init(seed), train.batches(part, BATCH, seed=seed), epochs=epochs).state

    def logits(latent: Tensor, images: Tensor) -> Tensor:
        params = mapfn.generate(spec, {"all": latent}, state.buffers)
        return mapfn.apply(target, params, state.target_state, images)[0]

    return logits, state.latents["all"]


def curvatures(logits: Logits, latent: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """Return eigenvalues ``[d]`` and eigenvectors ``[d, d]`` of the likelihood's Hessian."""

    def negative_log_likelihood(latent: Tensor) -> Tensor:
        return cross_entropy(logits(latent, part[0]), part[1], reduction="sum")

    hessian = torch.func.hessian(negative_log_likelihood)(latent)
    values, directions = torch.linalg.eigh((hessian + hessian.T) / 2)
    # Training stops near a minimum, not in it, so some flat directions curve down a little. No
    # Gaussian does: there the data bound nothing, and the prior alone decides.
    return values.clamp(min=0), directions


def score(probabilities: Tensor, labels: Tensor, num_bins: int = 15) -> Scores:
    """Measure; the expected calibration error is that of Guo et al. (2017), arXiv 1706.04599."""
    confidence, predicted = probabilities.max(1)
    right = (predicted == labels).float()
    bins = (confidence * num_bins).long().clamp(max=num_bins - 1)
    gaps = torch.zeros(num_bins).index_add(0, bins, right - confidence)
    nll = nll_loss(probabilities.clamp(min=1e-12).log(), labels)
    return Scores(float(right.mean()), float(nll), float(gaps.abs().sum() / len(labels)))


def compare(seed: int, epochs: int) -> tuple[Scores, Scores, float]:
    """Return the test scores of the point and of Laplace, and the precision of the prior."""
    training, validation, (images, labels) = split(seed)
    logits, latent = train_point(training, seed, epochs)
    values, directions = curvatures(logits, latent, training)
    noise = torch.randn(NUM_SAMPLES, NUM_LATENTS, generator=torch.Generator().manual_seed(0))

    def predict(precision: float, images: Tensor) -> Tensor:
        latents = latent + noise / (values + precision).sqrt() @ directions.T
        return torch.vmap(logits, (0, None))(latents, images).softmax(-1).mean(0)

    precision = min(PRECISIONS, key=lambda p: score(predict(p, validation[0]), validation[1]).nll)
    point = logits(latent, images).softmax(-1)
    return score(point, labels), score(predict(precision, images), labels), precision


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="train a tenth as long")
    options = parser.parse_args(argv)
    point, sampled, precision = compare(options.seed, 30 if options.quick else 300)
    print(f"{'':22}{'accuracy':>10}{'nll':>8}{'ece':>8}")
    for name, found in (("point estimate", point), (f"Laplace, prior {precision:.2g}", sampled)):
        print(f"{name:22}{found.accuracy:10.1%}{found.nll:8.3f}{found.ece:8.3f}")


if __name__ == "__main__":
    main()
