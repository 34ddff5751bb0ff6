"""Pipeline-parallel training for JAX and Flax."""

from jpipe import optim, plan, schedules
from jpipe.layers import Function, InitApply, Linen, skip
from jpipe.loss_scale import LossScale
from jpipe.mesh import make_mesh
from jpipe.pipeline import Memory, Pipeline, StageRecord
from jpipe.schedule import IDLE, Schedule
from jpipe.state import PipelineState

__version__ = "0.1.0"

__all__ = [
    "Function",
    "IDLE",
    "InitApply",
    "Linen",
    "LossScale",
    "Memory",
    "Pipeline",
    "PipelineState",
    "Schedule",
    "StageRecord",
    "make_mesh",
    "optim",
    "plan",
    "schedules",
    "skip",
]
