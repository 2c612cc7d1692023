"""Checkpoints: small, whole, checked, and enough to go on bit for bit."""

import json
import random
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from strategies_for_tests import assert_same
from torch import nn

import mapfn
from mapfn import container, ensemble, optim, train
from mapfn.checkpoint import load_checkpoint, save_checkpoint
from mapfn.losses import mapping_loss, trained


class CNN2(nn.Sequential):
    """The paper's second network: 108,618 weights."""

    def __init__(self):
        conv = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU()
        head = nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)
        super().__init__(*conv, *head)


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def batch():
    x = torch.linspace(-1, 1, 48).view(8, 6)
    return x, x[:, :2].sin()


def saved(tmp_path, target=None, seed=3, **options):
    target = target or network()
    spec = mapfn.make_spec(target, latent_dim=4, **options.pop("spec", {}))
    latents, buffers = mapfn.init(spec, seed, target)
    path = tmp_path / "model.safetensors"
    state = mapfn.init_state(target)
    save_checkpoint(path, spec, latents, state=state, seed=seed, buffers=buffers, **options)
    return path, spec, latents, buffers, state


def test_what_was_saved_is_loaded(tmp_path):
    path, spec, latents, buffers, state = saved(tmp_path, metadata={"epoch": 7, "loss": 0.25})
    loaded = load_checkpoint(path)
    assert loaded.spec == spec
    assert_same((loaded.latents, loaded.buffers, loaded.state), (latents, buffers, state))
    assert loaded.seed == 3
    assert loaded.metadata == {"epoch": 7, "loss": 0.25}
    assert (loaded.train_state, loaded.random_state) == (None, {})


def test_the_papers_network_is_a_few_kilobytes(tmp_path):
    target = CNN2()
    spec = mapfn.make_spec(target, latent_dim=mapfn.budget(2688))
    latents, _ = mapfn.init(spec)
    path = tmp_path / "cnn2.safetensors"
    save_checkpoint(path, spec, latents, state=mapfn.init_state(target), seed=0)
    assert sum(len(z) for z in latents.values()) == 2688
    assert path.stat().st_size <= 16_000


MAPPERS = [mapfn.hadamard(), mapfn.hashed(), mapfn.orthogonal(), mapfn.mlp((5,))]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("mapper", MAPPERS, ids=repr)
def test_every_map_is_made_again_or_read(tmp_path, mapper, include):
    path, _, latents, buffers, _ = saved(tmp_path, spec={"mapper": mapper}, include_buffers=include)
    loaded = load_checkpoint(path)
    assert_same((loaded.latents, loaded.buffers), (latents, buffers))
    names, _ = container.read(path)
    assert any(name.startswith("buffers.") for name in names) is include


def test_no_latents_at_all_can_be_saved(tmp_path):
    """D11: a spec that trains nothing is a spec."""
    target = network()
    path, *_ = saved(tmp_path, target, spec={"mapper": mapfn.frozen()})
    assert load_checkpoint(path, target).latents == {}


def training(seed=0):
    target = network()
    spec = mapfn.make_spec(target, latent_dim=4)
    loss = mapping_loss(
        nn.functional.mse_loss, stability=trained(0.1), smoothness=0.1, alignment=0.1
    )
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adam(optim.one_cycle(0.05, 10)))
    return spec, train.make_step(spec, target, loss, optimizer)


def steps(step, state, count):
    for _ in range(count):
        state, _ = step(state, batch())
    return state


def test_a_resumed_training_is_the_one_that_never_stopped(tmp_path, monkeypatch):
    """D9: moments, step, dropout and state; and no pickle anywhere."""
    spec, (init, step) = training()
    torch.manual_seed(0)
    half = steps(step, init(0), 4)
    path = tmp_path / "half.safetensors"
    save_checkpoint(path, spec, half.latents, state=half.target_state, seed=0, train_state=half)
    wanted = steps(step, half, 4)
    torch.manual_seed(99)
    monkeypatch.setattr(torch, "load", None)
    monkeypatch.setattr("pickle.loads", None)
    loaded = load_checkpoint(path)
    torch.set_rng_state(loaded.random_state["cpu"])
    assert_same(loaded.train_state, half)
    assert_same(steps(step, loaded.train_state, 4), wanted)


def test_a_tree_of_ones_own_goes_on_too(tmp_path):
    target = network()
    spec = mapfn.make_spec(target, latent_dim=4)
    latents, _ = mapfn.init(spec)
    trained = [z.requires_grad_() for z in latents.values()]
    optimizer = torch.optim.Adam(trained, lr=0.1)
    sum(z.sum() for z in trained).backward()
    optimizer.step()
    own = {"optimizer": optimizer.state_dict(), "epoch": 3, "name": "x", "none": None}
    path = tmp_path / "own.safetensors"
    save_checkpoint(path, spec, latents, state={}, seed=0, train_state=own)
    loaded = load_checkpoint(path).train_state
    assert repr(loaded) == repr(own)
    torch.optim.Adam(trained, lr=0.1).load_state_dict(loaded["optimizer"])


@pytest.mark.parametrize("shared_map", [False, True])
@pytest.mark.parametrize("base", ["auto", "init"])
def test_an_ensemble_is_one_file(tmp_path, shared_map, base):
    target = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    spec = mapfn.make_spec(target, latent_dim=4, base=base)
    single = train.make_step(spec, target, nn.functional.mse_loss, optim.adam(0.05))
    init, step, members = ensemble.make_ensemble(single, shared_map=shared_map)
    state = steps(step, init([5, 6, 7]), 2)
    path = tmp_path / "members.safetensors"
    seed = 5 if shared_map else [5, 6, 7]
    save_checkpoint(
        path, spec, state.latents, state=state.target_state, seed=seed, train_state=state
    )
    loaded = load_checkpoint(path)
    assert_same(loaded.train_state, state)
    assert_same(steps(step, loaded.train_state, 2), steps(step, state, 2))
    member = members(loaded.train_state)[1]
    buffers = loaded.buffers if shared_map else mapfn.unstack(loaded.buffers)[1]
    assert_same(member.buffers, buffers)
    assert_same(member.latents, mapfn.unstack(loaded.latents)[1])


def test_a_base_is_fingerprinted_and_never_saved(tmp_path):
    """D12: the latents of one base mean nothing on another."""
    target = network()
    path, _, latents, _, _ = saved(tmp_path, target, spec={"base": "target"})
    assert_same(load_checkpoint(path, target).latents, latents)
    assert not any("base" in name for name in container.read(path)[0])
    with pytest.raises(ValueError, match=r"init\(target=\)"):
        load_checkpoint(path)
    with torch.no_grad():
        target[0].weight[0, 0] += 1e-3
    with pytest.raises(mapfn.CheckpointError, match="the base that the latents were trained on"):
        load_checkpoint(path, target)


def test_files_of_another_schema_say_which_version_wrote_them(tmp_path, monkeypatch):
    """D6."""
    monkeypatch.setattr(container, "SCHEMA", 9)
    path, *_ = saved(tmp_path)
    monkeypatch.undo()
    with pytest.raises(mapfn.CheckpointError, match=r"schema 1, got schema 9.*with mapfn 0\."):
        load_checkpoint(path)


def test_lost_metadata_have_a_way_round(tmp_path):
    """D11: another tool saved the file again."""
    path, spec, latents, buffers, state = saved(tmp_path)
    safetensors.torch.save_file(safetensors.torch.load_file(path), path)
    with pytest.raises(mapfn.CheckpointError, match=r"mapfn's metadata.*pass spec= and seed="):
        load_checkpoint(path)
    loaded = load_checkpoint(path, spec=spec, seed=3)
    assert_same((loaded.latents, loaded.buffers, loaded.state), (latents, buffers, state))


def test_weights_that_come_out_differently_are_named(tmp_path, monkeypatch):
    """D5: the probe is what proves that two machines make the same weights."""
    path, *_ = saved(tmp_path)
    tensors, data = container.read(path)
    data["probe"]["0"][1] *= 1.001
    container.write(path, tensors, {k: v for k, v in data.items() if k != "digest"})
    with pytest.raises(mapfn.CheckpointError, match=r"the weights that were saved.*'0'"):
        load_checkpoint(path)


BAD = {
    r"latents.*missing": lambda a: a | {"latents": {}},
    r"finite latents, got NaN": lambda a: a | {"latents": bad_latents(a["latents"])},
    r"buffers=\).*the buffers of seed 4, got others in '0', '1', '3'": lambda a: a | {"seed": 4},
    r"metadata=\).*JSON data, got .*set": lambda a: a | {"metadata": {"a": {1}}},
    r"dicts with names or ints.*got object at 'train.a'": lambda a: (
        a | {"train_state": {"a": object()}}
    ),
}


def bad_latents(latents):
    return {name: z.clone().fill_(torch.nan) for name, z in latents.items()}


@pytest.mark.parametrize("words", BAD)
def test_what_cannot_be_saved_leaves_the_old_file(tmp_path, words):
    path, spec, latents, buffers, state = saved(tmp_path)
    before = path.read_bytes()
    arguments = {"latents": latents, "state": state, "seed": 3, "buffers": buffers}
    with pytest.raises((ValueError, TypeError), match=words):
        save_checkpoint(path, spec, **BAD[words](arguments))
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_write_error_leaves_the_old_file(tmp_path, monkeypatch):
    """D10."""
    path, spec, latents, _, state = saved(tmp_path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(path, spec, latents, state=state, seed=3)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_missing_file_is_no_damaged_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none.safetensors")


def damage(data, chance):
    """Flip bits, cut, repeat, swap the header, or declare a huge size."""
    kind = chance.randrange(6)
    if kind == 0:
        at = chance.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]
    if kind == 1:
        return data[: chance.randrange(len(data))]
    if kind == 2:
        at = chance.randrange(len(data))
        return data[:at] + chance.randbytes(chance.randrange(1, 9)) + data[at:]
    if kind == 3:
        return chance.randrange(2**64).to_bytes(8, "little") + data[8:]
    if kind == 4:
        length = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + length].replace(b'"shape":[4]', b'"shape":[4000000000000]')
        return len(header).to_bytes(8, "little") + header + data[8 + length :]
    first, second = sorted(chance.randrange(len(data)) for _ in range(2))
    return data[:first] + data[second:] + data[first:second]


@pytest.mark.parametrize("part", range(4))
def test_no_damage_is_loaded(tmp_path, part):
    """2,000 random damages: the same values, or an error that says so."""
    path, _, latents, _, state = saved(tmp_path)
    whole, chance = path.read_bytes(), random.Random(part)
    refused = 0
    for _ in range(500):
        path.write_bytes(damage(whole, chance))
        try:
            loaded = load_checkpoint(path)
        except mapfn.CheckpointError:
            refused += 1
        else:
            assert_same((loaded.latents, loaded.state), (latents, state))
    assert refused > 450


KILLING = """
import itertools, os, random, signal, sys, time
import torch
import mapfn

torch.set_num_threads(1)
path, chance = sys.argv[1], random.Random(0)
spec = mapfn.make_spec(torch.nn.Linear(100, 50), latent_dim=2000)
latents, buffers = mapfn.init(spec)
first, seen = None, set()
for kill in range(200):
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        for value in itertools.count(1000 * kill):
            full = {name: torch.full_like(z, value) for name, z in latents.items()}
            mapfn.save_checkpoint(path, spec, full, state={}, seed=0)
            os.write(tell, b".")
    os.read(told, 1)
    time.sleep(chance.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(told), os.close(tell)
    values = set(mapfn.load_checkpoint(path).latents["(root)"].tolist())
    assert len(values) == 1, values
    seen |= values
    assert len(os.listdir(os.path.dirname(path))) <= 2, os.listdir(os.path.dirname(path))
print(len(seen))
"""


def test_a_kill_at_200_random_moments_leaves_a_whole_file(tmp_path):
    """D10: a complete old or new one each time, and no stray files grow."""
    folder = tmp_path / "killed"
    folder.mkdir()
    command = [sys.executable, "-c", KILLING, str(folder / "model.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 200


def test_metadata_are_one_string_that_any_tool_reads(tmp_path):
    path, *_ = saved(tmp_path)
    with safetensors.safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["mapfn"])["seed"] == 3
