"""Functions of packages that stand above `Pipeline`, by name.

The planner, the memory timeline and the search of strategies import the core, so the core cannot import them.
`Pipeline` offers some
of their functions all the same: `Pipeline.profile`, `boundaries="time"`, a strategy in a file. They are named here
as text, as a package names its entry points, and loaded when they are called.
"""

import importlib
from collections.abc import Callable

ENTRY_POINTS = {
    "strategy of a file": "jpipe.soap.layers:StoredStrategy",
    "memory timeline": "jpipe.memory._pipeline:pipeline_timeline",
    "device memory": "jpipe.memory._devices:device_memory",
    "trace": "jpipe.trace._record:trace_pipeline",
    "profile": "jpipe.plan.pipelines:profile_pipeline",
    "boundaries by flops": "jpipe.costs:boundaries_by_flops",
    "boundaries by time": "jpipe.plan.pipelines:boundaries_by_time",
    "boundaries by memory": "jpipe.plan.pipelines:boundaries_by_memory",
    "boundaries by placement": "jpipe.plan.placement:boundaries_by_placement",
    "placement": "jpipe.plan.placement:placement_of",
}


def load(name: str) -> Callable:
    """The function that `ENTRY_POINTS` names."""
    module, _, function = ENTRY_POINTS[name].partition(":")
    return getattr(importlib.import_module(module), function)
