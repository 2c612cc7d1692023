"""The doctor's proofs: each kind of unhealthiness of a target is caught and named."""

import math
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from mapfn import frozen, generate, grouped, init, make_spec
from mapfn.doctor import check, check_at, prepare
from mapfn.parts import same
from mapfn.proofs import Finding, prove

BATCH = torch.linspace(-1, 1, 16).view(2, 8)


class Net(nn.Module):
    """A linear layer, and what a test makes of it."""

    def __init__(self, **attributes):
        super().__init__()
        self.fc = nn.Linear(8, 4)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def proved(target: nn.Module, *inputs, **options) -> dict[str, Finding]:
    """Run the proofs alone, without the transforms."""
    spec = make_spec(target, latent_dim=6, **options)
    exam = prepare(spec, target, *init(spec, target=target), inputs or (BATCH,), {})
    return {found.name: found for found in prove(exam)}


def wrong(findings: dict[str, Finding]) -> list[str]:
    return [name for name, found in findings.items() if found.ok is False]


class Writing(Net):
    def forward(self, x):
        x.mul_(2)
        return self.fc(x)


def test_an_input_changed_in_place_is_named():
    batch = BATCH.clone()
    findings = proved(Writing(), batch)
    assert wrong(findings) == ["purity: inputs"]
    assert "'args.0' is changed in place: clone it" in findings["purity: inputs"].detail
    assert torch.equal(batch, BATCH)


class Keeping(Net):
    def __init__(self):
        super().__init__()
        self.kept = nn.Linear(4, 4, bias=False)
        self.weight = self.kept.weight.detach()

    def forward(self, x):
        return self.fc(x) @ self.weight


@pytest.mark.parametrize(
    ("strategy", "names"),
    [("layerwise", "group 'kept', leaf 'kept.weight'"), ("slvt", "leaf 'kept.weight'")],
)
def test_a_weight_kept_at_construction_has_parity_but_no_gradient(strategy, names):
    findings = proved(Keeping(), strategy=strategy)
    assert findings["parity: outputs"].ok
    assert wrong(findings) == ["gradient reach"]
    assert findings["gradient reach"].detail.startswith(f"{names}: never reach the outputs")


def test_an_unused_leaf_is_named_and_may_be_frozen():
    target = Net(spare=nn.Linear(2, 2))
    findings = proved(target)
    assert wrong(findings) == ["gradient reach"]
    names = "group 'spare', leaf 'spare.weight', leaf 'spare.bias'"
    assert findings["gradient reach"].detail.startswith(names)
    strategy = grouped({"spare": ["spare.*"], "rest": ...}, {"spare": {"mapper": frozen()}})
    assert wrong(proved(target, strategy=strategy)) == []


class Detached(Net):
    def forward(self, x):
        return self.fc(x).argmax(-1)


def test_an_integer_output_has_no_gradient():
    findings = proved(Detached())
    assert wrong(findings) == ["gradient reach"]
    assert "'fc' get no gradient" in findings["gradient reach"].detail


def test_an_embedding_that_edits_its_weight_is_named():
    findings = proved(nn.Embedding(8, 4, max_norm=0.01), torch.tensor([1, 2]))
    assert "purity: params, state, latents" in wrong(findings)
    detail = findings["purity: params, state, latents"].detail
    assert "'params.weight' changes (max_norm edits the weight in place)" in detail


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_latents_that_are_not_finite_are_refused(bad):
    target = Net()
    spec = make_spec(target, latent_dim=6)
    latents, buffers = init(spec)
    latents["fc"][2] = bad
    with pytest.raises(ValueError, match=r"latents\['fc'\]: expected finite.*1 of 6 NaN or inf"):
        check_at(spec, target, latents, buffers, BATCH)


def test_a_target_on_meta_has_no_parity_to_check():
    findings = proved(Net().to("meta"))
    outputs = findings["parity: outputs"]
    assert (outputs.ok, wrong(findings)) == (None, [])
    assert "on meta" in outputs.detail
    assert findings["parity: gradients"].ok


def test_wrong_inputs_raise_the_targets_own_error():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        proved(Net(), torch.ones(2, 3))


def test_another_target_is_refused():
    with pytest.raises(ValueError, match=r"check\(target\): expected"):
        check(make_spec(Net(), latent_dim=6), nn.Linear(8, 4), BATCH)


def test_trained_latents_of_zero_still_reach():
    spec = make_spec(Net(), latent_dim=6, base="init")
    latents, buffers = init(spec)
    assert not latents["fc"].any()
    exam = prepare(spec, Net(), latents, buffers, (BATCH,), {})
    assert wrong({found.name: found for found in prove(exam)}) == []
    assert generate(spec, latents, buffers)["fc.weight"].any()


def test_old_hooks_that_write_into_the_layer_are_named():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        target = nn.Sequential(
            nn.utils.weight_norm(nn.Linear(8, 4)), nn.utils.spectral_norm(nn.Linear(4, 4))
        )
    findings = proved(target)
    assert wrong(findings) == ["purity: target"]
    detail = findings["purity: target"].detail
    assert "'0.weight' changes" in detail
    assert "use torch.nn.utils.parametrizations.weight_norm" in detail
    assert "'1.weight' changes" in detail
    assert "use torch.nn.utils.parametrizations.spectral_norm" in detail


class Aliasing(Net):
    """Counts through a second reference to its buffer, which the state never sees."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.aliases = [self.seen]

    def forward(self, x):
        self.aliases[0].add_(1)
        return self.fc(x) * self.seen


def test_a_second_reference_to_a_buffer_breaks_parity():
    findings = proved(Aliasing())
    assert {"purity: target", "parity: outputs", "parity: state"} <= set(wrong(findings))
    assert findings["parity: state"].detail == "differs at 'seen'"


class Scaled(Net):
    def forward(self, x):
        zero = self.fc(x) * 0
        return zero.sqrt() if self.root else zero


@pytest.mark.parametrize(("root", "lack"), [(True, "NaN or infinite"), (False, "exactly zero")])
def test_a_gradient_that_trains_nothing_is_named(root, lack):
    findings = proved(Scaled(root=root))
    assert wrong(findings) == ["gradient reach"]
    assert findings["gradient reach"].detail.startswith("group 'fc'")
    assert lack in findings["gradient reach"].detail


@dataclass(frozen=True)
class drawing:
    """A map that draws random numbers when it generates."""

    def init(self, seed, latent_dim, num_numbers):
        return {}

    def generate(self, buffers, latent, shift, start, stop):
        return latent.sum() + shift + torch.rand(stop - start)


def test_a_map_that_draws_random_numbers_is_caught():
    findings = proved(Net(), mapper=drawing())
    assert "purity: random generators" in wrong(findings)
    assert findings["purity: random generators"].detail == "generate draws random numbers"


def test_values_are_compared_bit_for_bit_and_nan_is_itself():
    nan = torch.tensor([1.0, math.nan])
    assert same(nan, nan.clone())
    assert not same(nan, torch.tensor([1.0, 2.0]))
    assert not same(torch.ones(1), torch.ones(1) + 1e-6)
    assert same(torch.ones(1), torch.ones(1) + 1e-6, rtol=1e-5)
    assert not same(torch.ones(1), torch.ones(1, dtype=torch.float64))
    assert not same(torch.tensor([True]), torch.tensor([False]), rtol=1e-5)
    assert same(math.nan, math.nan)
    assert not same(1, True)
