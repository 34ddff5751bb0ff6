"""Starts the scripts of this folder in several processes."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = pathlib.Path(__file__).parent
SECONDS = 30.0
"""From a fault to the end of every process."""


def launch_command(script, *arguments, num_processes=2, devices=4):
    """The command that runs a script of this folder in several processes, and options for it."""
    command = [
        *(sys.executable, "-m", "jpipe.launch", "-n", str(num_processes)),
        *("--devices", str(devices), str(FOLDER / script), *map(str, arguments)),
    ]
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return command, dict(env={**os.environ, "PYTHONPATH": path}, text=True)


def launch(*arguments, timeout=400, **options):
    """Runs a script of this folder in several processes, to the end."""
    command, options = launch_command(*arguments, **options)
    return subprocess.run(command, capture_output=True, timeout=timeout, **options)
