"""The compile contract through Inductor: one row of each kind."""

import pytest
from contract import Cell, named

# Other kernels sum in another order.
TOLERANCE = (1e-4, 1e-5)

# torch runs some operations in a loop over the members, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

FAST = [Cell("apply", "hashed", "slvt", "mlp", "grad")]
SLOW = [
    Cell("apply", "hadamard", "layerwise", "mlp", "forward"),
    Cell("apply", "hashed", "slvt", "residual", "grad_and_value"),
    Cell("apply", "hadamard", "slvt", "cnn", "vmap_grad_and_value"),
    Cell("apply", "orthogonal", "grouped", "residual", "backward"),
    Cell("apply", "hashed", "layerwise", "transformer", "grad"),
    Cell("apply", "hadamard", "slvt", "transformer", "vmap"),
    Cell("apply", "mlp", "slvt", "weight_norm", "vmap_grad_and_value"),
    Cell("apply", "residual_mlp", "grouped", "tree", "grad_and_value"),
    Cell("apply", "identity", "layerwise", "lstm", "forward"),
    Cell("call", "orthogonal", "slvt", "cnn", "vmap"),
    Cell("call", "identity", "grouped", "dropout", "grad"),
    Cell("generate", "hadamard", "grouped", "weight_norm", "backward"),
    Cell("generate", "mlp", "layerwise", "tree", "vmap"),
]


@pytest.mark.parametrize("cell", FAST, ids=named)
def test_inductor(cell: Cell) -> None:
    cell.check(backend="inductor", tolerance=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("cell", SLOW, ids=named)
def test_inductor_more(cell: Cell) -> None:
    cell.check(backend="inductor", tolerance=TOLERANCE)
