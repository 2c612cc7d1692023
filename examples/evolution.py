"""Train without gradients: an evolution strategy on 256 latents instead of 2,410 weights.

Every generation draws pairs of latents around the mean, z + s e and z - s e, runs all networks in
one `vmap`ped forward pass, and moves the mean by the noise weighted with the ranks of the losses
(Salimans et al. 2017, arXiv 1703.03864). The noise of the estimate grows with the number of
trained numbers, so a few latents train where a few thousand weights barely move. No backward pass
is run: the target may hold anything, a simulator or a rounding.

    python examples/evolution.py             about 12 seconds on two CPU cores: 94 %
    python examples/evolution.py --seed 3    another map, other noise
    python examples/evolution.py --quick     a few generations: does the script run?

Needs scikit-learn: pip install mapfn[demo].
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import mapfn
from mapfn import optim
from mapfn.demo import Digits, load_digits

NUM_LATENTS, PAIRS, SPREAD, BATCH = 256, 128, 0.2, 256

Logits = Callable[[Tensor, Tensor], Tensor]  # latent [d], images [n, 64] -> [n, 10]


def network(seed: int) -> tuple[Logits, Tensor]:
    """Return a mapped network as a function of its latent, and where to start."""
    target = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    spec = mapfn.make_spec(target, strategy="slvt", latent_dim=NUM_LATENTS)
    latents, buffers = mapfn.init(spec, seed)

    def logits(latent: Tensor, images: Tensor) -> Tensor:
        params = mapfn.generate(spec, {"all": latent}, buffers)
        return mapfn.apply(target, params, {}, images)[0]

    return logits, latents["all"]


def estimated_gradient(losses: Tensor, noise: Tensor) -> Tensor:
    """Weigh the noise ``[pairs, d]`` by the ranks of the losses ``[2, pairs]``, not by size.

    >>> estimated_gradient(torch.tensor([[2.0], [1.0]]), torch.tensor([[1.0, -1.0]]))
    tensor([ 1., -1.])
    """
    ranks = losses.flatten().argsort().argsort().view_as(losses) / (losses.numel() - 1)
    return (ranks[0] - ranks[1]) @ noise / len(noise)


@torch.no_grad()
def evolve(logits: Logits, mean: Tensor, digits: Digits, generations: int, seed: int) -> Tensor:
    """Return the mean after some generations."""
    images, labels = digits.train_images.flatten(1), digits.train_labels
    generator = torch.Generator().manual_seed(seed)
    optimizer = optim.adam(optim.cosine(0.2, generations))
    state = optimizer.init(mean)

    def loss(latent: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits(latent, images), labels)

    population = torch.vmap(torch.vmap(loss, (0, None, None)), (0, None, None))
    for _ in range(generations):
        noise = torch.randn(PAIRS, len(mean), generator=generator)
        rows = torch.randint(len(labels), (BATCH,), generator=generator)
        latents = torch.stack([mean + SPREAD * noise, mean - SPREAD * noise])
        gradient = estimated_gradient(population(latents, images[rows], labels[rows]), noise)
        updates, state = optimizer.update(gradient, state, mean)
        mean = optim.apply_updates(mean, updates)
    return mean


def accuracy(logits: Logits, latent: Tensor, images: Tensor, labels: Tensor) -> float:
    return float((logits(latent, images.flatten(1)).argmax(1) == labels).float().mean())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the generations")
    options = parser.parse_args(argv)
    digits, (logits, start) = load_digits(), network(options.seed)
    end = evolve(logits, start, digits, 30 if options.quick else 600, options.seed)
    for name, latent in (("start", start), ("evolved", end)):
        found = accuracy(logits, latent, digits.test_images, digits.test_labels)
        print(f"{name:8}{found:8.1%} of the test digits, {len(latent)} trained numbers")


if __name__ == "__main__":
    main()
