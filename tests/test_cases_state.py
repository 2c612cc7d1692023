"""Cases from users of neighbouring tools: what becomes of the target's buffers in a call."""

import copy

import pytest
import torch
from torch import Tensor, nn

import mapfn


def made(target: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Generate params for a target, and copy its state."""
    spec = mapfn.make_spec(target, latent_dim=5)
    return mapfn.generate(spec, *mapfn.init(spec, seed=1)), mapfn.init_state(target)


class Counting(nn.Module):
    """Changes its buffers in every style there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        for name in ("in_place", "reassigned", "augmented", "indexed", "untouched"):
            self.register_buffer(name, torch.tensor([1.0, 2.0]))
        self.register_buffer("silent", torch.tensor([1.0, 2.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.in_place.mul_(3)
        self.reassigned = self.reassigned * 3
        self.augmented *= 3
        self.indexed[0] = 3
        self.silent.add_(self.in_place)
        return x * self.weight + self.in_place + self.reassigned


class Holder(nn.Module):
    """The same module at two paths, so that its buffers change twice a call."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = Counting()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("build", [Counting, Holder])
def test_every_style_of_new_buffer_comes_out(build: type[nn.Module], times: int) -> None:
    """C12: in-place and reassigned buffers come out; the caller's dict and the target stay."""
    target, alone = build(), build()
    first = mapfn.init_state(target)
    own = copy.deepcopy(target.state_dict())
    params = {name: tensor.detach() for name, tensor in target.named_parameters()}
    state, x = first, torch.tensor([0.5, -1.0])
    for _ in range(times):
        given, bits = dict(state), {name: tensor.clone() for name, tensor in state.items()}
        outputs, new = mapfn.apply(target, params, state, x)
        assert all(state[name] is given[name] for name in given)
        torch.testing.assert_close(state, bits, rtol=0, atol=0)
        torch.testing.assert_close(outputs, alone(x), rtol=0, atol=0)
        state = new
    torch.testing.assert_close(state, dict(alone.named_buffers()), rtol=0, atol=0)
    torch.testing.assert_close(target.state_dict(), own, rtol=0, atol=0)
    inner = "a." if build is Holder else ""
    power = 3.0 ** (times * (2 if inner else 1))
    assert state[inner + "in_place"].tolist() == [power, 2 * power]


class Remembering(nn.Module):
    """Fills a buffer that is None until the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = self.fc(x)
        return self.cache * 2


def test_buffer_that_was_none_stays_none_in_the_target() -> None:
    """C12: a buffer that only the call fills does not stay behind in the target."""
    target = Remembering()
    params, state = made(target)
    mapfn.apply(target, params, state, torch.ones(1, 2))
    assert target.cache is None


class Registering(nn.Module):
    """Registers a buffer when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("late", x)
        return self.fc(self.late)


def test_buffer_that_only_the_call_registers_is_gone_after_it() -> None:
    """C12: the target has the same buffers before and after, so that a second call just runs."""
    target = Registering()
    params, state = made(target)
    for value in (1.0, 2.0):
        outputs, after = mapfn.apply(target, params, state, torch.full((1, 2), value))
        assert after == dict(target.named_buffers()) == {}
    bias = params["fc.bias"]
    torch.testing.assert_close(outputs - bias, 2 * params["fc.weight"].sum(1, keepdim=True))


@pytest.mark.parametrize("transform", ["vmap", "fullgraph"])
def test_cumulative_batch_norm_is_named_where_it_cannot_run(transform: str) -> None:
    """C19: the layer is named before anything runs, and eval mode needs no such thing."""
    target = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None))
    params, state = made(target)

    def run(state: dict[str, Tensor], x: Tensor) -> Tensor:
        return mapfn.apply(target, params, state, x)[0]

    def transformed() -> Tensor:
        x = torch.ones(5, 3)
        if transform == "vmap":
            return torch.vmap(run)(mapfn.stack([state]), x[None])[0]
        return torch.compile(run, fullgraph=True, backend="eager")(state, x)

    error = RuntimeError if transform == "vmap" else torch._dynamo.exc.Unsupported
    with pytest.raises(error, match=r"layer '1'.*momentum=None.*momentum=0\.1"):
        transformed()
    target.eval()
    torch.testing.assert_close(transformed(), run(state, torch.ones(5, 3)))


@pytest.mark.parametrize(
    ("momentum", "transform"), [(None, "eager"), (0.1, "eager"), (0.1, "vmap")]
)
def test_batch_norm_statistics(momentum: float | None, transform: str) -> None:
    """C19: cumulative and running averages are right in eager code; the count stays int64."""
    target = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum))
    alone, (params, state) = copy.deepcopy(target), made(target)
    alone.load_state_dict(params | state)

    def run(state: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return mapfn.apply(target, params, state, x)

    if transform == "vmap":
        state = mapfn.stack([state])
    torch.manual_seed(0)
    for _ in range(3):
        x = torch.randn(8, 3)
        outputs, state = torch.vmap(run)(state, x[None]) if transform == "vmap" else run(state, x)
        torch.testing.assert_close(outputs.view(8, 4), alone(x))
    member = mapfn.unstack(state)[0] if transform == "vmap" else state
    torch.testing.assert_close(member, dict(alone.named_buffers()))
    count = member["1.num_batches_tracked"]
    assert (count.dtype, int(count)) == (torch.int64, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("momentum", [None, 0.1])
def test_batch_count_stays_int64_everywhere(dtype: torch.dtype, momentum: float | None) -> None:
    """C19: no dtype of the net, no copy and no deployment turns the count into a float."""
    target = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum)).to(dtype)
    params, state = made(target)
    _, after = mapfn.apply(target, params, state, torch.randn(8, 3, dtype=dtype))
    baked = mapfn.bake(target, params, after)
    stacked = mapfn.stack([state, after])
    places = [state, after, dict(baked.named_buffers()), stacked, *mapfn.unstack(stacked)]
    counts = [place["1.num_batches_tracked"] for place in places]
    assert {count.dtype for count in counts} == {torch.int64}
    assert [count.tolist() for count in counts] == [0, 1, 1, [0, 1], 0, 1]
