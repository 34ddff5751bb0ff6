"""The layout knows every array of a state: shapes, shardings, memory and bytes are those of real
states.
"""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from families import FAMILIES, cross_entropy, schedule_named
from skipping import DIM, LAYERS, loss_fn

import jpipe
from jpipe.engine.layout import REPLICATED, per_device_spec
from jpipe.optim import correct_discrepancy, corrected_params

GROUPS = (
    "parameters",
    "read_parameters",
    "optimizer_state",
    "mutable_state",
    "anchor",
    "outer_state",
    "loss_scale",
    "gradient_compression",
    "message_compression",
    "gradients",
    "buffers",
    "round",
    "started",
    "key",
)


def pipelines():
    family = FAMILIES["mlp"]
    batch = family.batches(1, 16)[0]
    options = dict(loss=cross_entropy, optimizer=optax.adam(0.1))
    yield (
        jpipe.Pipeline(
            family.layers,
            schedule=schedule_named("zero_bubble_v", 4, 4),
            mesh=jpipe.make_mesh(stage=2, data=2),
            loss_scale=8.0,
            **options,
        ),
        batch,
    )
    options["optimizer"] = optax.chain(optax.sgd(0.1), correct_discrepancy(decay=0.1))
    yield (
        jpipe.Pipeline(
            family.layers,
            schedule=schedule_named("pipemare/unit", 4, 2),
            backward_params=corrected_params,
            **options,
        ),
        batch,
    )
    rows = np.zeros((8, DIM), np.float32)
    yield (
        jpipe.Pipeline(
            LAYERS,
            loss=loss_fn,
            optimizer=optax.sgd(0.1),
            schedule=schedule_named("one_f_one_b/paired", 4, 4),
            overlap=True,
        ),
        {"inputs": rows, "targets": rows},
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", range(3), ids=["data axis", "asynchronous", "skips"])
def test_groups_are_the_arrays_of_a_state(case):
    pipe, batch = list(pipelines())[case]
    layout = pipe._program(batch).engine.layout
    assert tuple(layout.groups) == GROUPS
    state = pipe.init(jax.random.key(0), batch)
    fields = {f.name for f in dataclasses.fields(state)} - {"program"}
    assert fields == set(GROUPS)
    device = pipe.mesh.devices.flat[0]
    for name, whole in layout.global_shapes(GROUPS).items():
        values = getattr(state, name)
        assert jax.tree.structure(values) == jax.tree.structure(whole), name
        num_bytes = 0
        for a, want in zip(jax.tree.leaves(values), jax.tree.leaves(whole)):
            assert (a.shape, a.dtype) == (want.shape, want.dtype), name
            assert a.sharding.is_equivalent_to(want.sharding, a.ndim), name
            if name != "key":
                (shard,) = (s for s in a.addressable_shards if s.device == device)
                num_bytes += shard.data.nbytes
        if name != "key":
            assert layout[name].num_bytes("cpu") == num_bytes, name
    private = {n for n, g in layout.groups.items() if g.spec != REPLICATED}
    if pipe.num_replicas > 1:
        compression = {"gradient_compression", "message_compression"}
        assert private == {"gradients", "buffers"} | compression
        assert layout["buffers"].spec == per_device_spec(pipe.mesh)


def test_arrays_of_a_group_may_be_in_host_memory():
    pipe, batch = next(iter(pipelines()))
    layout = pipe._program(batch).engine.layout
    group = layout["optimizer_state"]
    name = max(group.shapes, key=lambda name: group.shapes[name].size)
    moved = dataclasses.replace(group, on_host=frozenset([name]))
    layout = dataclasses.replace(layout, groups={**layout.groups, group.name: moved})
    kinds = {key: a.sharding.memory_kind for key, a in layout.global_shapes([group.name])[group.name].items()}
    assert {key for key, kind in kinds.items() if kind == "pinned_host"} == {name}
    on_host = moved.num_bytes("cpu", "pinned_host")
    assert on_host == group.shapes[name].size * group.shapes[name].dtype.itemsize
    assert on_host + moved.num_bytes("cpu") == group.num_bytes("cpu")
