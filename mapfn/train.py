"""Training: the door to steps, loops, evaluation and the learning-rate range test."""

from mapfn.batches import batches
from mapfn.callbacks import early_stopping, keep_best, progress_bar
from mapfn.evaluation import evaluate
from mapfn.find_lr import RateCurve, find_lr
from mapfn.loops import Event, Fit, fit, fit_epoch
from mapfn.steps import Training, make_step
from mapfn.unpacking import inputs_and_targets

__all__ = [
    "Event",
    "Fit",
    "RateCurve",
    "Training",
    "batches",
    "early_stopping",
    "evaluate",
    "find_lr",
    "fit",
    "fit_epoch",
    "inputs_and_targets",
    "keep_best",
    "make_step",
    "progress_bar",
]
