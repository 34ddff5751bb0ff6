"""Pipeline-parallel training for JAX and Flax.

Every public name is imported when it is first used, so `import jpipe.schedule` and `jpipe.draw` load no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jpipe._util.suggest import missing_attribute

__version__ = "0.1.0"

_MODULES = (
    "compress",
    "distributed",
    "draw",
    "memory",
    "optim",
    "plan",
    "reference",
    "schedules",
    "simulate",
    "solvers",
    "trace",
    "vocabulary",
)
_MODULE_OF = {
    "AXIS_RULES": "jpipe.layers.axis_rules",
    "Bottleneck": "jpipe.layers.boundary_layers",
    "attention": "jpipe._attention",
    "Checkpoints": "jpipe.checkpoints",
    "DamagedCheckpointError": "jpipe.checkpoints",
    "Function": "jpipe.layers.layer",
    "IDLE": "jpipe.schedule",
    "InitApply": "jpipe.layers.layer",
    "Linen": "jpipe.layers.layer",
    "LocalSteps": "jpipe.options.local_steps",
    "LossScale": "jpipe.options.loss_scale",
    "Memory": "jpipe.costs",
    "NNX": "jpipe.layers.layer",
    "Pipeline": "jpipe.pipeline",
    "PipelineState": "jpipe.engine.state",
    "NameMap": "jpipe.checkpoints",
    "NameRule": "jpipe.checkpoints",
    "Schedule": "jpipe.schedule",
    "MessageRecord": "jpipe.engine.traffic",
    "Offload": "jpipe.stages.offload",
    "ShardRecord": "jpipe.costs",
    "SparseAverage": "jpipe.options.local_steps",
    "StageRecord": "jpipe.costs",
    "add_lora": "jpipe.layers.lora",
    "merge_lora": "jpipe.layers.lora",
    "carry": "jpipe._slices",
    "first_position": "jpipe._slices",
    "sequence_length": "jpipe._slices",
    "whole_sequence": "jpipe._slices",
    "WholeBatchLoss": "jpipe.layers.loss",
    "load_params": "jpipe.checkpoints",
    "make_mesh": "jpipe.mesh",
    "minibatch_mean": "jpipe.layers.batch_norm",
    "report": "jpipe.layers.report",
    "report_weights": "jpipe.layers.report",
    "save_params": "jpipe.checkpoints",
    "skip": "jpipe.layers.layer",
    "with_boundary_layers": "jpipe.layers.boundary_layers",
    "with_lora": "jpipe.layers.lora",
    "stage_end": "jpipe.segments.forced",
}

__all__ = sorted([*_MODULES, *_MODULE_OF])  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from jpipe import distributed as distributed
    from jpipe import draw as draw
    from jpipe import memory as memory
    from jpipe import optim as optim
    from jpipe import plan as plan
    from jpipe import reference as reference
    from jpipe import schedules as schedules
    from jpipe import simulate as simulate
    from jpipe import solvers as solvers
    from jpipe import trace as trace
    from jpipe import vocabulary as vocabulary
    from jpipe._attention import attention as attention
    from jpipe._slices import carry as carry
    from jpipe._slices import first_position as first_position
    from jpipe._slices import sequence_length as sequence_length
    from jpipe._slices import whole_sequence as whole_sequence
    from jpipe.checkpoints import Checkpoints as Checkpoints
    from jpipe.checkpoints import DamagedCheckpointError as DamagedCheckpointError
    from jpipe.checkpoints import NameMap as NameMap
    from jpipe.checkpoints import NameRule as NameRule
    from jpipe.checkpoints import load_params as load_params
    from jpipe.checkpoints import save_params as save_params
    from jpipe.costs import Memory as Memory
    from jpipe.costs import ShardRecord as ShardRecord
    from jpipe.costs import StageRecord as StageRecord
    from jpipe.engine.state import PipelineState as PipelineState
    from jpipe.engine.traffic import MessageRecord as MessageRecord
    from jpipe.layers.axis_rules import AXIS_RULES as AXIS_RULES
    from jpipe.layers.batch_norm import minibatch_mean as minibatch_mean
    from jpipe.layers.boundary_layers import Bottleneck as Bottleneck
    from jpipe.layers.boundary_layers import with_boundary_layers as with_boundary_layers
    from jpipe.layers.layer import NNX as NNX
    from jpipe.layers.layer import Function as Function
    from jpipe.layers.layer import InitApply as InitApply
    from jpipe.layers.layer import Linen as Linen
    from jpipe.layers.layer import skip as skip
    from jpipe.layers.lora import add_lora as add_lora
    from jpipe.layers.lora import merge_lora as merge_lora
    from jpipe.layers.lora import with_lora as with_lora
    from jpipe.layers.loss import WholeBatchLoss as WholeBatchLoss
    from jpipe.layers.report import report as report
    from jpipe.layers.report import report_weights as report_weights
    from jpipe.mesh import make_mesh as make_mesh
    from jpipe.options.local_steps import LocalSteps as LocalSteps
    from jpipe.options.local_steps import SparseAverage as SparseAverage
    from jpipe.options.loss_scale import LossScale as LossScale
    from jpipe.pipeline import Pipeline as Pipeline
    from jpipe.schedule import IDLE as IDLE
    from jpipe.schedule import Schedule as Schedule
    from jpipe.segments.forced import stage_end as stage_end
    from jpipe.stages.offload import Offload as Offload


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"jpipe.{name}")
    else:
        raise missing_attribute("module 'jpipe'", name, __all__)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
