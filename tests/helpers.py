"""What test modules share: comparisons, refusals, profiles by hand, and the files of training runs."""

import contextlib
import dataclasses
import functools
import importlib
import json
import pathlib
import resource
import struct
import sys
from collections.abc import Iterator

import jax
import numpy as np
import optax
import pytest
from families import FAMILIES, cross_entropy

import jpipe
from jpipe.lowering.target import TARGETS
from jpipe.plan import PROGRAMS, Profile, Seconds


def benchmark(name: str):
    """A module of `benchmarks`, whose modules import each other by their names."""
    folder = str(pathlib.Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def use_target(monkeypatch, platform: str) -> None:
    """Pipelines that are made from now on take the facts of a platform, on CPU devices."""
    monkeypatch.setitem(TARGETS, "cpu", _TARGETS[platform])


_TARGETS = dict(TARGETS)


def with_nan_buffers(state, all_but: str | None = None):
    """The state with NaN in everything in flight and in every idle and unused slot."""

    def nan(a):
        if a.dtype.kind != "f":
            return a
        return jax.device_put(np.full(a.shape, np.nan, a.dtype), a.sharding)

    buffers = {name: values if name == all_but else jax.tree.map(nan, values) for name, values in state.buffers.items()}
    return dataclasses.replace(state, buffers=buffers)


def assert_close(got, want, dtype):
    """float64: rtol 1e-9; float32: 1e-5; both of the leaf's largest magnitude."""
    tolerance = 1e-9 if dtype == "float64" else 1e-5
    paths = jax.tree.leaves_with_path(want)
    for (path, b), a in zip(paths, jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(
            a,
            b,
            rtol=0,
            atol=tolerance * max(np.abs(b).max(), 1e-30),
            err_msg=jax.tree_util.keystr(path),
        )


@contextlib.contextmanager
def refused(message):
    """A ValueError with this in its message, and nothing compiled before it."""
    compiled = []

    def listen(event, duration, **_):
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with pytest.raises(ValueError, match=message):
            yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


def table_bytes(pipe: jpipe.Pipeline, batch: dict) -> int:
    """Bytes of the argument of a compiled step that holds the table, on each device."""
    return 4 * pipe._program(batch).engine.local_rows.size


@functools.cache
def profile_of(family: str, microbatch_size: int = 2) -> Profile:
    """Of a family trained with Adam; nothing is measured."""
    pipe = jpipe.Pipeline(
        FAMILIES[family].layers,
        loss=cross_entropy,
        optimizer=optax.adam(0.1),
        schedule=jpipe.schedules.gpipe(1, 1),
    )
    return pipe.profile(FAMILIES[family].batches(1, microbatch_size)[0], programs=())


def timed(profile: Profile, **seconds: float) -> Profile:
    """The profile with these seconds for every layer, by program; 0 for one that is not named, and for the loss."""

    def of(layer, share=1.0):
        times = {p: Seconds(share * seconds.get(p, 0.0)) for p in PROGRAMS}
        return dataclasses.replace(layer, **times)

    layers = tuple(map(of, profile.layers))
    return dataclasses.replace(profile, layers=layers, loss=of(profile.loss, 0.0))


def log_of(run_dir: pathlib.Path) -> list[dict]:
    """The records of the JSON file."""
    return [json.loads(line) for line in (run_dir / "log.jsonl").open()]


def events_of(run_dir: pathlib.Path) -> list[tuple[int, dict[str, float]]]:
    """The event file for TensorBoard: (step, {tag: value}), in order."""
    from tensorboardX.proto.event_pb2 import (
        Event,  # few tests need it, and it loads slowly
    )

    (path,) = run_dir.glob("events.out.tfevents.*")
    content, events = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])  # then a checksum of 4 bytes
        events.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]  # and another one
    assert events.pop(0).file_version == "brain.Event:2"
    return [(e.step, {v.tag: v.simple_value for v in e.summary.value}) for e in events]


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond this, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_pairs(path: pathlib.Path, count: int) -> pathlib.Path:
    """Writes short sentence pairs, the number of each pair in both sentences."""
    lines = [f"number {i}\tZahl {i}!" for i in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
