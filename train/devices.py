"""Devices for a run, and stand-ins for them on a machine that has only a CPU."""

import os

import jax

# A stuck collective is worth a warning, and in the end the process; but one stage may
# have much to do while another waits, so far later than XLA's 20 and 40 seconds.
_TIMEOUT_SECONDS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 60,
    "xla_cpu_collective_call_terminate_timeout_seconds": 600,
}


def prepare_cpu(num_devices: int) -> None:
    """Splits the CPU into `num_devices`, unless a number has been chosen already.

    It may have been by `xla_force_host_platform_device_count` in XLA_FLAGS, by
    JAX_NUM_CPU_DEVICES or by `jax.config`.

    Call it before anything runs on JAX. Other kinds of devices are not touched.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    in_flags = "xla_force_host_platform_device_count" in flags
    if not in_flags and jax.config.jax_num_cpu_devices < 0:
        jax.config.update("jax_num_cpu_devices", num_devices)
    for flag, seconds in _TIMEOUT_SECONDS.items():
        if flag not in flags:
            flags += f" --{flag}={seconds}"
    os.environ["XLA_FLAGS"] = flags.strip()


def check_devices(num_devices: int, num_replicas: int = 1) -> None:
    """Raises `ValueError` if JAX has fewer than a pipeline needs; says what to do.

    Args:
      num_devices: of the schedule.
      num_replicas: of the pipeline.
    """
    devices = jax.devices()
    if len(devices) >= num_devices * num_replicas:
        return
    kind = devices[0].platform
    remedy = "Set JAX_PLATFORMS=cpu to run on CPU devices instead"
    if kind == "cpu":
        remedy = "Take the number of devices out of XLA_FLAGS and JAX_NUM_CPU_DEVICES"
    needed, fewer = f"{num_devices} devices", "stages"
    option = f"--config.pipeline.num_stages={len(devices)}"
    if num_replicas > 1:
        needed += f" for each of {num_replicas} replicas"
        fewer, most = "replicas", max(len(devices) // num_devices, 1)
        option = f"--config.pipeline.data={most}"
    raise ValueError(
        f"the schedule needs {needed}, got {len(devices)} ({kind}). "
        f"{remedy}, or use fewer {fewer}: {option}."
    )
