"""The devices of a run, and the cache of programs that were compiled for them.

On a machine with only a CPU, the CPU is split into several devices.
"""

import contextlib
import importlib
import math
import os
import pathlib
import warnings
import zlib

import jax

# XLA warns about a collective operation that waits for 20 seconds and aborts after 40.
# On CPU one stage may compute for longer than that while another waits for its result.
_TIMEOUT_SECONDS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 60,
    "xla_cpu_collective_call_terminate_timeout_seconds": 600,
}


def prepare_cpu(num_devices: int) -> None:
    """Splits the CPU into `num_devices` devices, unless a number was already chosen.

    The user chooses a number by the option `jax_num_cpu_devices`, in `jax.config` or as
    JAX_NUM_CPU_DEVICES, or by `xla_force_host_platform_device_count` in XLA_FLAGS.

    Call this before JAX runs anything, else nothing is split. Other kinds of devices are not changed.

    Args:
      num_devices: the number of devices.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    in_flags = "xla_force_host_platform_device_count" in flags
    if not in_flags and jax.config.jax_num_cpu_devices < 0:
        # Once JAX has run something it keeps its devices; `check_devices` says if they are too few.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", num_devices)
    for flag, seconds in _TIMEOUT_SECONDS.items():
        if flag not in flags:
            flags += f" --{flag}={seconds}"
    os.environ["XLA_FLAGS"] = flags.strip()


def cache_compilations(folder: str | None) -> None:
    """Keeps compiled programs in a folder, from where later runs load them.

    A folder that the user has named to JAX, by the option `jax_compilation_cache_dir` or as
    JAX_COMPILATION_CACHE_DIR, is used instead. An entry that a killed run has left incomplete is
    replaced.

    Args:
      folder: the folder; "~" is the home directory. None: programs are compiled anew.
    """
    if folder is None:
        return
    if jax.config.jax_compilation_cache_dir is None:
        path = pathlib.Path(folder).expanduser().absolute()
        jax.config.update("jax_compilation_cache_dir", str(path))
        # A model has many small programs, such as those that initialise its layers.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    _replace_incomplete_entries()


def _replace_incomplete_entries() -> None:
    """Removes the incomplete entries of the cache as soon as JAX fails to read an entry.

    JAX warns of such an entry, compiles the program, and does not write over the entry: each later
    run would warn and compile again. It warns before it writes, so it then writes a complete entry.
    """
    show = warnings.showwarning

    def remove_and_show(message, category, filename, lineno, file=None, line=None):
        if str(message).startswith("Error reading persistent compilation cache"):
            for entry in pathlib.Path(jax.config.jax_compilation_cache_dir).glob("*-cache"):
                # Another process may remove it at the same time.
                with contextlib.suppress(OSError):
                    if not _is_complete(entry.read_bytes()):
                        entry.unlink()
            message = f"{message}. The program is compiled again, and its entry is replaced."
        show(message, category, filename, lineno, file, line)

    warnings.showwarning = remove_and_show


def _is_complete(entry: bytes) -> bool:
    """Returns whether all of an entry of JAX's cache can be decompressed."""
    if not entry.startswith(b"\x28\xb5\x2f\xfd"):
        decompress = zlib.decompress
    else:
        # JAX compresses by Zstandard where it is installed.
        for name in ("compression.zstd", "zstandard"):
            with contextlib.suppress(ImportError):
                decompress = importlib.import_module(name).decompress
                break
        else:
            return True
    try:
        decompress(entry)
    except Exception:  # each library has an exception of its own
        return False
    return True


def check_devices(num_devices: int, data: int = 1, **shared: int) -> None:
    """Checks that JAX has as many devices as a run needs.

    Args:
      num_devices: devices of the schedule.
      data: replicas of the pipeline, the mesh axis "data".
      **shared: devices that share a stage, by the other axes of the mesh: "fsdp", "expert", "context" and "model".

    Raises:
      ValueError: if there are fewer devices, or none of the kind that JAX_PLATFORMS
        names. The message says what to do.
    """
    devices = _devices()
    parts = {name: n for name, n in shared.items() if n > 1}
    replica_devices = num_devices * math.prod(parts.values())
    if len(devices) >= replica_devices * data:
        return
    kind = devices[0].platform
    remedy = "Set JAX_PLATFORMS=cpu to run on CPU devices instead"
    if kind == "cpu":
        remedy = "Remove the number of devices from JAX_NUM_CPU_DEVICES and XLA_FLAGS"
    needed, fewer = f"{num_devices} devices", "stages"
    option = f"--config.pipeline.num_stages={len(devices)}"
    if parts:
        factors = " x ".join(f"{name}={n}" for name, n in parts.items())
        needed = f"{replica_devices} devices ({num_devices} x {factors})"
        fewer, option = "devices per stage", f"--config.mesh.{next(iter(parts))}=1"
    if data > 1:
        needed += f" for each of {data} replicas"
        fewer, most = "replicas", max(len(devices) // replica_devices, 1)
        option = f"--config.mesh.data={most}"
    raise ValueError(
        f"the schedule needs {needed}, got {len(devices)} ({kind}). {remedy}, or use fewer {fewer}: {option}."
    )


def _devices() -> list[jax.Device]:
    """The devices of JAX; a clear error if its backend cannot start."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX raises either
        platforms = os.environ.get("JAX_PLATFORMS") or jax.config.jax_platforms
        reason = f" ({' '.join(str(error).split())})" if str(error) else ""
        raise ValueError(
            f"JAX finds no devices of the kind that JAX_PLATFORMS={platforms} asks for"
            f"{reason}. Set JAX_PLATFORMS=cpu to run on CPU devices, or install the JAX "
            "package for your accelerator and its driver."
        ) from error
