"""The readers of profiles, with timelines written by hand in the shapes of each platform, and the places of instructions."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jpipe
from jpipe.trace import _record
from jpipe.trace._places import Key, places_of
from jpipe.trace._read import Run, runs_of


def xspace(planes):
    """A profile with `{plane: {line: [(name, start in ns, length in ns, statistics)]}}`.

    Text is given as a reference to the name of a statistic, as the profiler does with text that it repeats.
    """
    text = ""
    for plane, lines in planes.items():
        names, statistics, words = {}, {}, ""
        for number, (line, events) in enumerate(lines.items()):
            words += f'lines {{ id: {number} name: "{line}" timestamp_ns: 1000\n'
            for name, start, length, values in events:
                key = names.setdefault(name, len(names) + 1)
                words += f"events {{ metadata_id: {key} offset_ps: {start * 1000} duration_ps: {length * 1000}\n"
                for statistic, value in values.items():
                    number = statistics.setdefault(statistic, len(statistics) + 1)
                    if isinstance(value, str):
                        value = f"ref_value: {statistics.setdefault(value, len(statistics) + 1)}"
                    else:
                        value = f"int64_value: {value}"
                    words += f"stats {{ metadata_id: {number} {value} }}\n"
                words += "}\n"
            words += "}\n"
        for field, table in (("event_metadata", names), ("stat_metadata", statistics)):
            for name, key in table.items():
                words += f'{field} {{ key: {key} value {{ id: {key} name: "{name}" }} }}\n'
        text += f'planes {{ name: "{plane}"\n{words}}}\n'
    data = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    return jax.profiler.ProfileData.from_serialized_xspace(data)


def test_cpus():
    """Two devices on three threads; the second goes on in another thread while the first one of it waits."""

    def event(name, start, length, device, run_id=7, module="jit_step"):
        statistics = {"hlo_op": name, "hlo_module": module, "device_ordinal": device, "run_id": run_id}
        return name, start, length, statistics

    execute, wait = "ThunkExecutor::Execute", "ThunkExecutor::Execute (wait for completion)"
    profile = xspace(
        {
            "/host:CPU": {
                "python": [("PjitFunction(step)", 0, 900, {})],
                "thread 1": [
                    (execute, 100, 100, {}),
                    event("fusion.1", 110, 10, 0),
                    ("end: fusion.1", 119, 1, {}),
                    event("while.2", 130, 60, 0),
                    (execute, 140, 20, {}),
                    event("copy.3", 145, 5, 0),
                    (execute, 300, 50, {}),
                    event("fusion.1", 310, 30, 0, run_id=8),
                    event("other.1", 400, 5, 0, module="jit_other"),
                ],
                "thread 2": [
                    (wait, 150, 100, {"device_ordinal": 1, "run_id": 7}),
                    (execute, 90, 50, {}),
                    event("fusion.1", 95, 5, 1),
                ],
                "thread 3": [(execute, 160, 40, {}), event("copy.3", 165, 5, 1)],
            },
            "/host:metadata": {},
        }
    )
    runs = runs_of(profile, "cpu", "jit_step")
    at = 1000  # of the lines
    assert runs[0].instructions == [
        Run("fusion.1", at + 110, at + 120),
        Run("while.2", at + 130, at + 190),
        Run("copy.3", at + 145, at + 150),
        Run("fusion.1", at + 310, at + 340),
    ]
    assert runs[0].executions == [(at + 100, at + 200), (at + 300, at + 350)]
    assert runs[1].instructions == [Run("fusion.1", at + 95, at + 100), Run("copy.3", at + 165, at + 170)]
    assert runs[1].executions == [(at + 90, at + 250)]


def test_gpus():
    """Kernels on two streams, in other words than those of their instructions; lines derived from them do not count."""

    def kernel(name, start, length, instruction, module="jit_step"):
        return name, start, length, {"hlo_op": instruction, "hlo_module": module, "correlation_id": start}

    profile = xspace(
        {
            "/device:GPU:1": {
                "Stream #13(Compute)": [
                    kernel("loop_add_fusion", 20, 10, "fusion.1"),
                    kernel("sm90_gemm", 40, 10, "custom-call.2"),
                    kernel("loop_add_fusion", 60, 10, "fusion.1"),
                    kernel("sm90_gemm", 80, 10, "custom-call.2", "jit_other"),
                    ("MemcpyD2H", 90, 5, {"correlation_id": 90}),
                ],
                "Stream #22(MemcpyP2P)": [kernel("ncclDevKernel_SendRecv", 30, 25, "collective-permute-start")],
                "XLA Modules": [("jit_step(1234)", 10, 70, {}), ("jit_other(99)", 80, 10, {})],
                "XLA Ops": [("fusion.1", 20, 10, {"hlo_op": "fusion.1", "hlo_module": "jit_step"})],
            },
            "/device:GPU:0": {"Stream #13(Compute)": [kernel("loop_add_fusion", 21, 9, "fusion.1")]},
            "/host:CPU": {"thread": [("fusion.1", 0, 1, {"hlo_op": "fusion.1", "hlo_module": "jit_step"})]},
        }
    )
    for platform in ("gpu", "cuda", "rocm"):
        runs = runs_of(profile, platform, "jit_step")
        assert [(run.name, run.start - 1000) for run in runs[1].instructions] == [
            ("fusion.1", 20),
            ("collective-permute-start", 30),
            ("custom-call.2", 40),
            ("fusion.1", 60),
        ]
        assert runs[1].executions == [(1010, 1080)]
        assert runs[0].instructions == [Run("fusion.1", 1021, 1030)]
        assert runs[0].executions == []


def test_tpus():
    """Instructions by their text, loops around their bodies, another program before, and transfers on a line apart."""
    profile = xspace(
        {
            "/device:TPU:0": {
                "Steps": [("1", 0, 500, {})],
                "XLA Modules": [("jit_other(1)", 0, 50, {}), ("jit_step(77)", 100, 200, {"run_id": 3})],
                "XLA Ops": [
                    ("%fusion.9 = f32[8]{0} fusion(f32[8]{0} %p), kind=kLoop", 10, 10, {}),
                    ("%while.2 = (s32[], f32[8]{0}) while((s32[], f32[8]{0}) %tuple.1)", 110, 100, {}),
                    ("%fusion.1 = f32[8]{0:T(1024)} fusion(f32[8]{0} %p), kind=kLoop", 120, 10, {}),
                    ("copy.3", 150, 10, {}),
                ],
                "Async XLA Ops": [("%collective-permute-start.4 = (f32[8]) collective-permute-start(%p)", 130, 40, {})],
                "XLA TraceMe": [("%fusion.1 = f32[8] fusion(%p)", 120, 10, {})],
            },
            "/device:TPU:0 SparseCore 0": {"XLA Ops": [("%fusion.1 = f32[8] fusion(%p)", 120, 10, {})]},
        }
    )
    runs = runs_of(profile, "tpu", "jit_step")
    assert runs.keys() == {0}
    assert [(run.name, run.start - 1000, run.end - 1000) for run in runs[0].instructions] == [
        ("while.2", 110, 210),
        ("fusion.1", 120, 130),
        ("collective-permute-start.4", 130, 170),
        ("copy.3", 150, 160),
    ]
    assert runs[0].executions == [(1100, 1300)]


@pytest.fixture(scope="module")
def pipe():
    return jpipe.Pipeline(
        [functools.partial(nnx.Linear, 16, 16) for _ in range(4)],
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.sgd(1e-3),
        schedule=jpipe.schedules.one_f_one_b(2, 3),
    )


BATCH = {"inputs": jnp.ones((12, 16)), "targets": jnp.zeros((12, 16))}


def module_of(pipe):
    (module,) = pipe.compile(BATCH).runtime_executable().hlo_modules()
    return module


def test_without_events_of_loops_and_conditionals(pipe, monkeypatch):
    """As on GPUs: the instructions around a conditional tell in which tick its branch has run."""
    seen = []
    read = _record.runs_of

    def kept(*args):
        seen.append(read(*args))
        return seen[-1]

    monkeypatch.setattr(_record, "runs_of", kept)
    state = pipe.init(jax.random.key(0), BATCH)
    state, trace = pipe.trace(state, BATCH, num_steps=2)
    containers = ("while", "conditional", "call")
    kernels = {
        d: runs._replace(
            instructions=[r for r in runs.instructions if not r.name.startswith(containers)], executions=[]
        )
        for d, runs in seen[0].items()
    }
    assert all(len(kernels[d].instructions) < len(seen[0][d].instructions) for d in kernels)
    places = places_of(module_of(pipe).as_serialized_hlo_module_proto())
    like_gpu = _record.trace_of(pipe._program(BATCH), kernels, places, range(2), 0)

    def named(trace):
        names = ("device", "step", "tick", "operation", "stage", "microbatch")
        return sorted(
            tuple(getattr(c, n) for n in names) for c in trace.cells if c.operation in ("forward", "backward")
        )

    assert named(like_gpu) == named(trace)
    assert len(named(trace)) == 2 * 2 * 2 * 3


def test_every_instruction_of_an_operation_has_its_place(pipe):
    places = places_of(module_of(pipe).as_serialized_hlo_module_proto())
    num_ticks = pipe.schedule.num_ticks
    keys = {place.key for place in places.values() if place.runs}
    assert keys == {
        Key("forward", 0),
        Key("backward", 0),
        Key("update", 0),
        Key("message0", 0),
    }
    for name, place in places.items():
        assert place.loop in (None, range(num_ticks))
        assert places[place.statement].statement == place.statement
        if place.runs:
            assert place.statement != name  # it is in a branch
