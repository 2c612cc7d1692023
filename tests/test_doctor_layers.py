"""The doctor's report: the transforms that each layer takes, with reasons and ways round."""

import copy

import pytest
import torch
from torch import Tensor, nn

from mapfn import apply, init_state, make_spec
from mapfn.doctor import Report, check
from mapfn.layers import Row
from mapfn.parts import differences, random_state, snapshot
from mapfn.proofs import Finding

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


def examined(target: nn.Module, *inputs, **options) -> Report:
    return check(make_spec(target, latent_dim=6, **options), target, *(inputs or (BATCH,)))


def finding(report: Report, name: str) -> Finding:
    return next(each for each in report.findings if each.name == name)


def row(report: Report, path: str) -> Row:
    return next(each for each in report.rows if each.path == path)


def wrong(report: Report) -> list[str]:
    return [each.name for each in report.findings if each.ok is False]


@pytest.mark.parametrize("strategy", ["layerwise", "slvt"])
def test_a_healthy_network_passes_and_keeps_its_bits(strategy):
    norm = nn.BatchNorm2d(4)
    target = nn.Sequential(
        nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(144, 3)
    )
    batch = torch.linspace(-1, 1, 128).view(2, 1, 8, 8)
    before = snapshot(target), batch.clone(), random_state()
    report = examined(target, batch, strategy=strategy)
    assert differences(before, (snapshot(target), batch, random_state())) == []
    assert report.ok, str(report)
    assert all(verdict.ok for each in report.rows for verdict in each.verdicts.values())
    assert [each.path for each in report.rows] == ["0", "1", "5", "(whole)"]
    assert finding(report, "parity: outputs").detail == "bit for bit"
    assert "dropout: 4" in finding(report, "purity: random generators").detail


def test_the_table_shows_findings_layers_and_reasons():
    lines = str(examined(nn.Sequential(nn.Linear(8, 4), nn.GRUCell(4, 4)))).splitlines()
    assert lines[0] == "ok  purity: target"
    assert lines[9].split() == ["layer", "type", "grad", "vmap", "fullgraph"]
    assert lines[10].split() == ["0", "Linear", "ok", "ok", "ok"]
    assert lines[11].split() == ["1", "GRUCell", "ok", "slow", "ok"]
    assert lines[14] == ("vmap, 1, (whole): loops inside, no batching rule for aten::gru_cell")


class Counting(Net):
    def forward(self, x):
        self.calls.add_(1)
        self.number += 1
        return self.fc(x)


def test_attributes_edited_in_place_are_named():
    target = Counting(calls=torch.zeros(()), number=0)
    report = examined(target)
    assert wrong(report)[0] == "purity: target"
    detail = finding(report, "purity: target").detail
    assert "'calls' changes: register it as a buffer" in detail
    assert "'number' changes" in detail
    assert (float(target.calls), target.number) == (0.0, 0)
    verdict = row(report, "(whole)").verdicts["grad"]
    assert (verdict.ok, verdict.way_round) == (False, "register that tensor as a buffer")


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 4, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def test_lstm_says_the_way_round_and_it_works():
    batch = BATCH.view(1, 2, 8)
    report = examined(Recurrent(), batch)
    assert report.ok, str(report)
    verdicts = row(report, "lstm").verdicts
    assert verdicts["grad"].ok
    assert "aten::lstm" in verdicts["vmap"].reason
    assert verdicts["vmap"].way_round.startswith("loop over the members")
    assert "torch._dynamo.config.allow_rnn = True" in verdicts["fullgraph"].way_round
    assert row(report, "(whole)").verdicts["fullgraph"].reason == "see lstm"
    assert all(verdict.ok for verdict in row(report, "head").verdicts.values())
    with torch._dynamo.config.patch(allow_rnn=True):
        allowed = examined(Recurrent(), batch)
    assert row(allowed, "(whole)").verdicts["fullgraph"].ok


def test_c19_batch_norm_without_momentum_is_right_in_eager_and_named_elsewhere():
    target = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None))
    reference = copy.deepcopy(target)
    params, state = dict(target.named_parameters()), init_state(target)
    for scale in (1.0, 3.0):
        outputs, state = apply(target, params, state, BATCH * scale)
        assert torch.equal(outputs, reference(BATCH * scale))
    assert not differences(state, dict(reference.named_buffers()))
    counter = state["1.num_batches_tracked"]
    assert (counter.dtype, int(counter)) == (torch.int64, 2)

    report = examined(target)
    assert report.ok, str(report)
    verdicts = row(report, "1").verdicts
    assert verdicts["grad"].ok
    for column in ("vmap", "fullgraph"):
        reason = "momentum=None reads num_batches_tracked as a Python number"
        assert verdicts[column] == (False, reason, "give the layer a number, momentum=0.1")
        assert row(report, "(whole)").verdicts[column].reason == "see 1"


def test_new_parametrizations_change_nothing():
    parametrizations = nn.utils.parametrizations
    target = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
    )
    report = examined(target)
    assert report.ok, str(report)
    assert [each.path for each in report.rows] == ["0", "1", "(whole)"]


class Branching(Net):
    def forward(self, x):
        y = self.fc(x)
        return y if y.sum() > 0 else -y


def test_a_branch_on_data_is_refused_with_a_reason():
    report = examined(Branching())
    assert report.ok, str(report)
    verdicts = row(report, "(whole)").verdicts
    assert verdicts["fullgraph"] == (
        False,
        "Data-dependent branching",
        "use torch.where or torch.cond",
    )
    assert "data-dependent control flow" in verdicts["vmap"].reason
    assert verdicts["vmap"].way_round.startswith("use torch.where")
    assert row(report, "fc").verdicts["fullgraph"].ok


def test_attention_reads_a_child_that_is_never_called():
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    report = examined(layer, BATCH.view(1, 2, 8))
    assert report.ok, str(report)
    assert row(report, "self_attn.out_proj").tried == "self_attn"
    assert row(report, "self_attn.out_proj").verdicts == row(report, "self_attn").verdicts


def test_a_function_has_one_row():
    def target(params, state, x, *, shift):
        return x @ params["w"] + shift, state

    spec = make_spec({"w": torch.zeros(8, 2)}, latent_dim=4)
    report = check(spec, target, BATCH, shift=1.0)
    assert report.ok, str(report)
    assert [(each.path, each.type) for each in report.rows] == [("(whole)", "function")]
    assert all(verdict.ok for verdict in report.rows[0].verdicts.values())


def test_a_layer_that_no_call_reaches_has_the_verdict_around_it():
    class Reading(Net):
        def forward(self, x):
            y = self.fc(x) @ self.inner.weight
            return y if y.sum() > 0 else -y

    report = examined(Reading(inner=nn.Linear(4, 4, bias=False)))
    assert report.ok, str(report)
    assert row(report, "inner").tried == "(root)"
    assert row(report, "inner").verdicts["fullgraph"].reason == "Data-dependent branching"
    assert row(report, "fc").verdicts["fullgraph"].ok
    assert "fullgraph, inner (as (root)), (whole): Data-dependent branching" in str(report)


class Sly(Net):
    def forward(self, x):
        return self.fc(x) * (2 if torch.compiler.is_compiling() else 1)


def test_other_values_than_eager_are_a_refusal():
    verdict = row(examined(Sly()), "(whole)").verdicts["fullgraph"]
    assert (verdict.ok, verdict.reason) == (
        False,
        "gives other values than eager code, at 0",
    )
