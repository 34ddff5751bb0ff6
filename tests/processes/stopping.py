"""Trains until SIGTERM, which all processes obey at the same step.

python -m jpipe.launch -n 2 --devices 4 tests/processes/stopping.py
"""

import os
import signal

from processes import faulty

import jpipe

asked = []


class Stopped(Exception):
    """The run ends."""


def before_step(step: int, *_) -> None:
    if step == 3:
        print(f"trains in {os.getpid()}", flush=True)
    if jpipe.distributed.stop_requested(step, requested=bool(asked)):
        print(f"stopped at {step}", flush=True)
        raise Stopped


if __name__ == "__main__":
    jpipe.distributed.initialize()
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        faulty.train(before_step, num_steps=10_000)
    except Stopped:
        jpipe.distributed.shutdown()
        os._exit(0)
