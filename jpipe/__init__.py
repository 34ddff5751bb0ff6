"""Pipeline-parallel training for JAX and Flax."""

from jpipe import plan
from jpipe import schedules
from jpipe.pipeline import Memory
from jpipe.pipeline import Pipeline
from jpipe.pipeline import PipelineState
from jpipe.pipeline import StageRecord
from jpipe.pipeline import make_mesh
from jpipe.schedule import IDLE
from jpipe.schedule import Schedule
from jpipe.stages import Function

__version__ = "0.1.0"

__all__ = [
    "Function",
    "IDLE",
    "Memory",
    "Pipeline",
    "PipelineState",
    "Schedule",
    "StageRecord",
    "make_mesh",
    "plan",
    "schedules",
]
