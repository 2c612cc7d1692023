"""mapfn inspect and mapfn export: what a file holds, and the way out of mapfn."""

import json
import sys

import pytest
import safetensors.torch
import torch

import mapfn
from mapfn.__main__ import main

TARGET = """
import torch

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index):
        return self.head(self.norm(self.embed(index)))
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Return a saved target, and what apply gives of it."""
    (tmp_path / "tied_net.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tied_net", raising=False)
    import tied_net

    target = tied_net.Tied().eval()
    spec = mapfn.make_spec(target, latent_dim=3)
    latents, buffers = mapfn.init(spec, seed=2)
    state = mapfn.init_state(target)
    path = tmp_path / "model.safetensors"
    mapfn.save_checkpoint(path, spec, latents, state=state, seed=2, metadata={"epoch": 4})
    params = mapfn.generate(spec, latents, buffers)
    return target, mapfn.apply(target, params, state, torch.arange(5))[0]


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["mapfn", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0, capsys.readouterr()


def test_inspect_prints_what_is_inside_without_the_target(made, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "tied_net")
    code, (out, _) = run(monkeypatch, capsys, "inspect", "model.safetensors", "--json")
    *lines, last = out.splitlines()
    data = json.loads(last)
    assert code == 0
    assert (data["seed"], data["metadata"]) == (2, {"epoch": 4})
    assert data["tensors"]["latents.embed"] == "float32 [3]"
    assert "embed.weight is also head.weight" in lines
    assert any(line.startswith("seed") and line.endswith(" 2") for line in lines)


def test_export_writes_a_state_dict_that_loads_without_mapfn(made, monkeypatch, capsys):
    target, wanted = made
    arguments = "model.safetensors", "tied_net:Tied", "plain.safetensors"
    code, (out, _) = run(monkeypatch, capsys, "export", *arguments)
    assert (code, out.strip()) == (0, "plain.safetensors: 7 tensors, 57 numbers")
    target.load_state_dict(safetensors.torch.load_file("plain.safetensors"))
    torch.testing.assert_close(target(torch.arange(5)), wanted)


@pytest.mark.parametrize("command", ["inspect", "export"])
@pytest.mark.parametrize("kind", ["missing", "damaged", "foreign"])
def test_errors_are_one_line(made, monkeypatch, capsys, tmp_path, command, kind):
    path = tmp_path / "model.safetensors"
    if kind == "foreign":
        safetensors.torch.save_file(safetensors.torch.load_file(path), path)
    elif kind == "damaged":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    more = ["tied_net:Tied", "plain.safetensors"] if command == "export" else []
    code, (_, err) = run(monkeypatch, capsys, command, "model.safetensors", *more)
    assert code == 1
    assert err.count("\n") == 1
    assert "model.safetensors" in err
    assert not (tmp_path / "plain.safetensors").exists()
