"""The demo: handwritten digits through a few hundred trained numbers, beside direct training.

Real training on scikit-learn's embedded digits (1,797 images of 8 x 8), a fixed stratified split,
the accuracy of the last epoch on the held-out part.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mapfn.generation import generate, init
from mapfn.report import count
from mapfn.spec import make_spec
from mapfn.target import apply

_BATCH = 64
_MAPPED_RATE, _DIRECT_RATE = 0.1, 0.003
_SMOOTHING = 0.1


class Digits(NamedTuple):
    """Images ``float32 [n, 1, 8, 8]`` in 0 to 1 and labels ``int64 [n]``, in two parts."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


class Row(NamedTuple):
    """One line of the demo's table."""

    name: str
    weights: int
    trained: int
    accuracy: float
    """Share of the test images that are classified rightly, 0 to 1."""
    seconds: float


class Training(NamedTuple):
    """What both ways of training share."""

    digits: Digits
    epochs: int
    seed: int
    advance: Callable[[], None]
    """Called after each epoch, to move a progress bar."""


def load_digits() -> Digits:
    """Load scikit-learn's digits and hold a quarter back for the test, equally of each digit."""
    from sklearn import datasets, model_selection

    images, labels = datasets.load_digits(return_X_y=True)
    parts = model_selection.train_test_split(
        images, labels, test_size=0.25, stratify=labels, random_state=0
    )
    train, test = (torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for x in parts[:2])
    return Digits(train, torch.tensor(parts[2]), test, torch.tensor(parts[3]))


def network() -> nn.Module:
    """Build the small CNN that both ways train: 38,282 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train_mapped(training: Training, latent_dim: int) -> Row:
    """Train the network through one latent vector; only the latents change."""
    with torch.device("meta"):
        target = network()
    spec = make_spec(target, strategy="slvt", latent_dim=latent_dim, scale="he")
    latents, buffers = init(spec, seed=training.seed)
    trained = [latent.requires_grad_() for latent in latents.values()]

    def forward(images: Tensor) -> Tensor:
        outputs, _ = apply(target, generate(spec, latents, buffers), {}, images)
        found: Tensor = outputs
        return found

    sizes = count(spec)
    name = f"mapped, {sizes.trainable} latents"
    measured = _train(training, forward, trained, _MAPPED_RATE)
    return Row(name, sizes.generated, sizes.trainable, *measured)


def train_direct(training: Training) -> Row:
    """Train every weight of the same network, from torch's own initialisation."""
    with torch.random.fork_rng([]):
        torch.manual_seed(training.seed)
        target = network()
    weights = list(target.parameters())
    size = sum(weight.numel() for weight in weights)
    return Row("direct", size, size, *_train(training, target, weights, _DIRECT_RATE))


def _train(
    training: Training, forward: Callable[[Tensor], Tensor], trained: Sequence[Tensor], rate: float
) -> tuple[float, float]:
    """Train with Adam and a one-cycle schedule; return (test accuracy, seconds)."""
    digits, start = training.digits, time.perf_counter()
    steps = training.epochs * len(digits.train_images.split(_BATCH))
    optimizer = torch.optim.Adam(trained, lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for images, labels in _batches(training):
        optimizer.zero_grad()
        outputs = forward(images)
        nn.functional.cross_entropy(outputs, labels, label_smoothing=_SMOOTHING).backward()
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        right = forward(digits.test_images).argmax(1) == digits.test_labels
    return float(right.double().mean()), seconds


def _batches(training: Training) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.Generator().manual_seed(training.seed)
    for _ in range(training.epochs):
        for index in torch.randperm(len(training.digits.train_images), generator=order).split(
            _BATCH
        ):
            yield training.digits.train_images[index], training.digits.train_labels[index]
        training.advance()
