"""Mapping networks as pure functions: a network's weights from a few hundred trained numbers.

``spec -> init -> (latents, buffers)``, ``spec, latents, buffers -> params`` and
``target, params, state, inputs -> outputs, state`` (arXiv 2602.19134), on torch.func.
"""

from mapfn import distributed, ensemble, losses, nn, optim, train
from mapfn.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from mapfn.decoders import full
from mapfn.doctor import check
from mapfn.errors import CheckpointError
from mapfn.generation import base_params, generate, init
from mapfn.mappers.frozen import frozen
from mapfn.mappers.hadamard import hadamard
from mapfn.mappers.hashed import hashed
from mapfn.mappers.identity import identity
from mapfn.mappers.mlp import mlp
from mapfn.mappers.orthogonal import orthogonal
from mapfn.mappers.residual_mlp import residual_mlp
from mapfn.members import stack, unstack
from mapfn.modulation import additive, affine, modulate_low_rank
from mapfn.report import count, summary
from mapfn.serialization import spec_from_json, spec_to_json
from mapfn.spec import Spec, make_spec
from mapfn.strategies import budget, grouped, layerwise, slvt
from mapfn.target import apply, bake, call, init_state
from mapfn.version import __version__

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Spec",
    "__version__",
    "additive",
    "affine",
    "apply",
    "bake",
    "base_params",
    "budget",
    "call",
    "check",
    "count",
    "distributed",
    "ensemble",
    "frozen",
    "full",
    "generate",
    "grouped",
    "hadamard",
    "hashed",
    "identity",
    "init",
    "init_state",
    "layerwise",
    "load_checkpoint",
    "losses",
    "make_spec",
    "mlp",
    "modulate_low_rank",
    "nn",
    "optim",
    "orthogonal",
    "residual_mlp",
    "save_checkpoint",
    "slvt",
    "spec_from_json",
    "spec_to_json",
    "stack",
    "summary",
    "train",
    "unstack",
]
