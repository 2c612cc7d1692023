"""Real processes under torchrun: equal to one process, and nothing but latents on the wire."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
from strategies_for_tests import assert_close, assert_same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mapfn
from mapfn import distributed, ensemble, optim, train

WORKER = Path(__file__).parent / "ranks.py"


def launch(folder, count, *cases):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={count}"]
    command += ["--standalone", str(WORKER), str(folder), *cases]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Run every case once, on two ranks; return what each rank left."""
    folder = tmp_path_factory.mktemp("ranks")
    launch(folder, 2)
    return lambda case: [torch.load(folder / f"{case}.{rank}.pt") for rank in range(2)]


def alone(dtype):
    """Train in one process on the whole batch."""
    target = ranks.network(dtype)
    spec = ranks.spec_of(target)
    init, step = train.make_step(spec, target, nn.functional.mse_loss, optim.sgd(0.5))
    state = init(1)
    state = state._replace(latents={name: z.to(dtype) for name, z in state.latents.items()})
    curve = []
    for _ in range(ranks.STEPS):
        state, info = step(state, ranks.data(dtype))
        curve.append(info.loss)
    return state.latents, curve


def check_equal_to_alone(every, dtype):
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    wanted = alone(dtype)
    for got in every:
        got = {name: z.detach() for name, z in got[0].items()}, got[1]
        assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    assert_same(every[0][0], every[1][0])


# One xdist worker runs the launch for all of them.
pytestmark = pytest.mark.xdist_group("distributed")


@pytest.mark.parametrize("way", ["adapter", "functional"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_ranks_are_one_process_on_the_whole_batch(results, way, dtype):
    name = f"{way}{torch.finfo(dtype).bits}"
    check_equal_to_alone(results(name), dtype)


@pytest.mark.slow
def test_four_ranks_are_one_process_on_the_whole_batch(tmp_path):
    names = [f"{way}{bits}" for way in ("adapter", "functional") for bits in (32, 64)]
    launch(tmp_path, 4, *names)
    for name in names:
        every = [torch.load(tmp_path / f"{name}.{rank}.pt") for rank in range(4)]
        check_equal_to_alone(every, torch.float32 if name.endswith("32") else torch.float64)


def test_the_latents_are_all_that_is_reduced(results):
    """D1: four bytes a latent, with and without a target that has state."""
    for counts in results("payload"):
        for bytes_sent, latents in counts.values():
            assert bytes_sent == 4 * latents


def gradient_alone(loss_of, target):
    latents, buffers = mapfn.init(ranks.spec_of(target), 1)

    def loss(latents):
        params = mapfn.generate(ranks.spec_of(target), latents, buffers)
        return loss_of(params)

    return torch.func.grad(loss)(latents)


def mse(target, x, y):
    return lambda params: nn.functional.mse_loss(mapfn.apply(target, params, {}, x)[0], y)


@pytest.mark.parametrize("case", ["accumulation", "compiled_adapter"])
def test_gradients_of_the_adapter_are_those_of_the_whole_batch(results, case):
    """T4: accumulated without a synchronisation, and compiled."""
    target = ranks.network()
    wanted = list(gradient_alone(mse(target, *ranks.data()), target).values())
    for got in results(case):
        assert_close(got, wanted)


def test_two_forward_passes_and_one_backward_pass_on_two_ranks(results):
    """T12: through BatchNorm, whose statistics are each rank's own."""
    target = ranks.normed()
    state = mapfn.init_state(target)

    def loss_of(x):
        def loss(params):
            first, second = (mapfn.apply(target, params, state, own)[0] for own in (x, -x))
            return first.square().mean() + second.square().mean()

        return loss

    parts = [gradient_alone(loss_of(ranks.data()[0][rank::2]), target) for rank in range(2)]
    wanted = [(a + b) / 2 for a, b in zip(*(part.values() for part in parts), strict=True)]
    for got in results("two_passes"):
        assert_close(got, wanted)


def test_statistics_are_the_same_on_all_ranks_once_averaged(results):
    """D3: so that evaluation is too."""
    first, second = results("statistics")
    assert_same(first[0], second[0])
    assert_same(first[2], second[2])
    assert first[1] == second[1]


def test_autograd_grad_is_not_averaged_by_ddp(results):
    """D2: DDP hears only of .backward(); pmean gives what it would have given."""
    (first, mean), (second, other) = results("not_averaged")
    assert not torch.equal(first[0], second[0])
    assert_same(mean, other)
    target = ranks.network()
    assert_close(mean, list(gradient_alone(mse(target, *ranks.data()), target).values()))


def test_ranks_with_uneven_batches_are_weighed_by_samples(results):
    """D7."""
    target = ranks.network()
    wanted = gradient_alone(mse(target, *ranks.data(count=10)), target)
    for got in results("uneven"):
        assert_close(got, wanted)


def test_the_mean_is_part_of_one_graph(results):
    for compiled, eager in results("graph"):
        assert_close(compiled, eager)


def test_a_rank_that_differs_is_refused_by_rank_and_group(results):
    for heard in results("refusals"):
        assert set(heard) == {"seed", "spec", "latents"}
        assert "rank 1: another map in '0', '2'" in heard["seed"]
        assert "rank 1: another spec in '2'" in heard["spec"]
        assert "rank 1: another latents in '2'" in heard["latents"]
        assert "one seed" in heard["seed"]


def test_a_distributed_sampler_is_told_the_epochs(results):
    first, second = results("sampler")
    assert_same(first, second)


def test_an_ensemble_trains_on_two_ranks(results):
    target = ranks.network()
    single = train.make_step(ranks.spec_of(target), target, nn.functional.mse_loss, optim.sgd(0.1))
    init, step, _ = ensemble.make_ensemble(single, method="loop")
    state = init(range(3))
    for _ in range(3):
        state, _ = step(state, ranks.data())
    for got in results("members"):
        assert_close(got, state.latents)


def test_without_a_group_a_mean_is_the_tree_itself():
    tree = {"z": torch.ones(2), "count": torch.tensor(3)}
    assert distributed.pmean(tree) is tree
    distributed.cleanup_ddp()
    distributed.cleanup_ddp()


def test_what_is_missing_is_said(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"setup_ddp: expected RANK.*torchrun.*MASTER_ADDR"):
        distributed.setup_ddp()
    target = nn.Linear(3, 2)
    mapped = mapfn.nn.Mapped(mapfn.make_spec(target, latent_dim=2), target)
    with pytest.raises(RuntimeError, match=r"wrap_ddp: expected a process group.*setup_ddp\(\)"):
        distributed.wrap_ddp(mapped)
    with pytest.raises(TypeError, match="expected a Mapped, got Linear"):
        distributed.wrap_ddp(target)


def test_one_process_is_a_group_too(tmp_path):
    """Arguments instead of an environment, and a file where there is no network."""
    process = distributed.setup_ddp(0, 1, "gloo", init_method=f"file://{tmp_path}/rendezvous")
    try:
        assert (process.rank, process.world_size, process.device.type) == (0, 1, "cpu")
        with pytest.raises(RuntimeError, match="expected no process group"):
            distributed.setup_ddp(0, 1)
        sharded = fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"leaf 'weight': expected a whole tensor.*DTensor"):
            mapfn.make_spec(sharded)
        assert_close(distributed.pmean([torch.ones(2)], weight=3), [torch.ones(2)])
        target = nn.Linear(3, 2)
        spec = mapfn.make_spec(target, mapper=mapfn.frozen())
        with pytest.raises(ValueError, match="wrap_ddp: expected latents, got none"):
            distributed.wrap_ddp(mapfn.nn.Mapped(spec, target))
    finally:
        distributed.cleanup_ddp()
