"""The layout of a run that goes on with fewer devices, because those of some processes are gone."""

import contextlib
import dataclasses
import math
import os
import warnings
from typing import Any

from jpipe.launch import DEVICES_LEFT, PROCESS_ID
from train.config import TrainConfig


def fitted(config: TrainConfig) -> TrainConfig:
    """The configuration for the devices that the launcher says are left; the same if it says nothing.

    Raises:
      ValueError: if no numbers of stages and replicas use these devices.
    """
    left = os.environ.get(DEVICES_LEFT)
    if left is None:
        return config
    fewer = on_devices(config, int(left))
    if os.environ.get(PROCESS_ID) == "0":
        stages, replicas = fewer.pipeline.num_stages, fewer.mesh.data
        print(f"train.py: {left} devices are left: stages {stages}, replicas {replicas}", flush=True)
    return fewer


def on_devices(config: TrainConfig, num_devices: int) -> TrainConfig:
    """The configuration with numbers of stages and replicas that use so many devices.

    It has the most stages that do, up to those of the run, because fewer stages need more memory on each device.
    Every process has to have a part of the mesh, so no device is left over. Other axes of the mesh, the schedule and
    its microbatches stay.

    Args:
      config: the configuration of the whole run.
      num_devices: the number of devices.

    Raises:
      ValueError: if no numbers of stages and replicas use these devices.

    Example:
      >>> from models import MLP
      >>> from train.mnist import MNIST
      >>> config = on_devices(TrainConfig(model=MLP(), data=MNIST(), batch_size=48), num_devices=3)
      >>> config.pipeline.num_stages, config.mesh.data
      (3, 1)
    """
    shared = math.prod(size for axis, size in config.mesh.sizes.items() if axis != "data")
    rows = config.batch_size // config.pipeline.num_microbatches
    before = config.pipeline.num_stages
    for stages in range(before, 0, -1):
        cut: dict[str, Any] = {} if stages == before else {"boundaries": None, "num_stages": stages}
        # A schedule may have no table of so many stages, and a mesh no replicas for an option.
        with contextlib.suppress(ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of bubbles
            pipeline = dataclasses.replace(config.pipeline, **cut)
            table = pipeline.table()
            replicas, rest = divmod(num_devices, table.num_devices * shared)
            if rest or not replicas or rows % replicas:
                continue
            few: dict[str, Any] = (
                {} if replicas > 1 or table.has_copies else {"compress_gradients": None, "shard_optimizer": False}
            )
            mesh = dataclasses.replace(config.mesh, data=replicas, dcn={}, **few)
            return dataclasses.replace(config, pipeline=pipeline, mesh=mesh)
    raise ValueError(
        f"{num_devices} devices are left, and no number of stages up to {before} uses all of them, with replicas that "
        f"divide the {rows} rows of a microbatch. Name the arguments for this number of processes: `python -m "
        'jpipe.launch --layout "PROCESSES: --config.pipeline.num_stages=..."`.'
    )
