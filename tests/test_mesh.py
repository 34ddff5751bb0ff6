"""Meshes whose stages form rings of neighbours."""

import itertools
import types

import jax
import numpy as np
import pytest

import jpipe
from jpipe.mesh import _across_slices, _rings, on_platform, stays_in_slices
from jpipe.schedules import (
    gpipe,
    interleaved,
    one_f_one_b,
    pipemare,
    zero_bubble_h1,
    zero_bubble_v,
)


def chips(*spans, start=(0, 0, 0)):
    """Stand-ins for the chips of a TPU slice, in the order of their coordinates."""
    corner = start[: len(spans)]
    at = itertools.product(*(range(c, c + n) for c, n in zip(corner, spans)))
    return [types.SimpleNamespace(coords=coords) for coords in at]


@pytest.mark.parametrize(
    ("spans", "size"),
    [((2, 4), 8), ((2, 4), 4), ((4, 8), 8), ((16, 16), 8), ((16, 16), 32), ((8, 2), 8)],
)
def test_each_row_is_a_ring(spans, size):
    devices = chips(*spans, 1, start=(3, 5, 0))
    rows = _rings(devices, len(devices) // size, size)
    at = np.array([[device.coords for device in row] for row in rows])
    step = np.abs(np.roll(at, -1, axis=1) - at).sum(axis=-1)
    np.testing.assert_array_equal(step, 1)
    assert {*map(id, rows.flat)} == {*map(id, devices)}


@pytest.mark.parametrize(
    ("devices", "size"),
    [
        (jax.devices()[:4], 4),  # of no shape
        (chips(4, 4), 2),  # neighbours anyway
        (chips(3, 3), 3),  # of odd length
        (chips(8, 1), 8),  # a line
        (chips(2, 2, 2), 8),  # not flat
        (chips(3, 4), 12),  # two rows of 6 do not fit
        (chips(2, 4)[:6] + chips(3, 4)[-2:], 8),  # not a whole grid
    ],
)
def test_no_rings(devices, size):
    assert _rings(devices, len(devices) // size, size) is None


def test_the_axes_of_a_mesh_are_in_order():
    mesh = jpipe.make_mesh(stage=2, model=2, context=2)
    assert dict(mesh.shape) == {"stage": 2, "context": 2, "model": 2}
    assert jpipe.make_mesh(stage=2, context=1).axis_names == ("stage",)
    with pytest.raises(ValueError, match="`context` must be a whole number of devices, at least 1, got 0"):
        jpipe.make_mesh(stage=2, context=0)


def test_a_ring_of_devices_without_a_shape_is_a_row():
    mesh = jpipe.make_mesh(stage=4, data=2, ring=True)
    assert mesh == jpipe.make_mesh(stage=4, data=2)


def in_slices(*sizes, platform="gpu", **names):
    """Stand-ins for the devices of slices or nodes; `names` are their attributes with the number of the slice."""
    devices = []
    for number, size in enumerate(sizes):
        for _ in range(size):
            attributes = {name: number if value is None else value for name, value in names.items()}
            attributes = {"process_index": len(devices)} | attributes
            device = types.SimpleNamespace(
                id=len(devices), platform=platform, device_kind="x", slice=number, **attributes
            )
            devices.append(device)
    return devices


NODES = {"process_index": None, "slice_index": 0}
TWO_SLICES = in_slices(4, 4, platform="cpu", slice_index=None)


@pytest.mark.parametrize(
    ("devices", "axes", "dcn", "want"),
    [
        (TWO_SLICES, {"stage": 8}, None, [0, 0, 0, 0, 1, 1, 1, 1]),
        (TWO_SLICES, {"stage": 2, "fsdp": 4}, None, [[0] * 4, [1] * 4]),
        (TWO_SLICES, {"data": 2, "stage": 4}, None, [[0, 0, 1, 1]] * 2),
        (TWO_SLICES, {"data": 2, "stage": 4}, {"data": 2}, [[0] * 4, [1] * 4]),
        (TWO_SLICES, {"stage": 1, "fsdp": 8}, {"fsdp": 2}, [[0, 0, 0, 0, 1, 1, 1, 1]]),
        (TWO_SLICES, {"data": 8, "stage": 1}, None, [[0]] * 4 + [[1]] * 4),
        (in_slices(4, 4, 4, platform="cpu", slice_index=None), {"data": 2, "stage": 3}, None, [[0] * 3, [1] * 3]),
        (in_slices(4, 2, 4, platform="cpu", slice_index=None), {"stage": 8}, None, [0, 0, 0, 0, 2, 2, 2, 2]),
        (
            in_slices(2, 2, 2, 2, **NODES),
            {"data": 2, "stage": 2, "model": 2},
            None,
            [[[0, 0], [1, 1]], [[2, 2], [3, 3]]],
        ),
        (in_slices(4, 4, **NODES), {"stage": 2, "fsdp": 4}, None, [[0] * 4, [1] * 4]),
        (in_slices(8, slice_index=0), {"stage": 2, "fsdp": 4}, {"stage": 2}, [[0] * 4] * 2),  # a process for each GPU
    ],
)
def test_slices(devices, axes, dcn, want):
    mesh = _across_slices(devices, axes, dcn)
    assert np.vectorize(lambda device: device.slice)(mesh).tolist() == want
    assert len({device.id for device in mesh.flat}) == mesh.size


@pytest.mark.parametrize(
    ("axes", "wanted"),
    [
        ([], True),
        (["model"], True),
        (["data"], True),
        (["stage"], False),
        (["data", "model"], True),
        (["stage", "model"], False),
    ],
)
def test_axes_inside_of_slices(axes, wanted):
    """Two nodes of four devices, with the stages across."""
    names = "data", "stage", "model"
    devices = _across_slices(in_slices(4, 4, **NODES), dict.fromkeys(names, 2), None)
    assert stays_in_slices(types.SimpleNamespace(devices=devices, axis_names=names), axes) == wanted


@pytest.mark.parametrize(
    ("devices", "axes", "dcn"),
    [
        (TWO_SLICES, {"stage": 4}, None),
        (in_slices(8, slice_index=0), {"stage": 8}, None),
        (in_slices(4, 4, platform="cpu", process_index=None), {"stage": 8}, None),
        (TWO_SLICES, {"stage": 4}, {"stage": 1}),
    ],
)
def test_one_slice(devices, axes, dcn):
    assert _across_slices(devices, axes, dcn) is None


@pytest.mark.parametrize(
    ("axes", "dcn", "message"),
    [
        ({"stage": 5}, None, "`stage=5` needs 5 devices, and the devices are in 2 slices of 4, 4 devices"),
        ({"stage": 1, "fsdp": 8}, None, "Between slices are stages, and replicas along `data`"),
        ({"stage": 4}, {"stag": 2}, "`dcn` has the axis 'stag'.*Did you mean 'stage'"),
        ({"stage": 3}, {"stage": 2}, "`dcn` cuts 'stage' into 2 parts, and `stage=3`"),
        ({"stage": 4}, {"data": 2}, "`dcn` cuts 'data' into 2 parts, and `data=1`"),
        ({"stage": 4}, {"stage": 4}, "`dcn` asks for 4 slices of 1 devices, and the devices are in 2 slices"),
        ({"stage": 4}, 2, "`dcn` must be a dict of axes and numbers of slices"),
        ({"stage": 4}, {"stage": "2"}, "`dcn` cuts 'stage' into '2' parts"),
    ],
)
def test_wrong_slices(axes, dcn, message):
    with pytest.raises(ValueError, match=message):
        _across_slices(TWO_SLICES, axes, dcn)


def test_parts_of_devices_that_name_no_slices():
    mesh = jpipe.make_mesh(stage=4, data=2, dcn={"stage": 2})
    assert np.vectorize(lambda device: device.id)(mesh.devices).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_which_schedules_go_round():
    assert interleaved(8, 8, num_chunks=2).ring
    assert not interleaved(4, 4, num_chunks=2).ring  # two devices are neighbours
    for straight in (gpipe, one_f_one_b, zero_bubble_h1, zero_bubble_v, pipemare):
        assert not straight(8, 8).ring


@pytest.mark.parametrize("default", ["cpu", "gpu"])
def test_layers_see_the_platform_of_the_mesh(default, monkeypatch):
    """On a machine with GPUs a mesh of CPU devices is on the CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: default)
    with on_platform("cpu"):
        device = jax.config.jax_default_device
        assert (device.platform if device else default) == "cpu"


def test_described_devices_leave_the_default_device():
    with on_platform("cuda"):
        assert jax.config.jax_default_device is None


def test_axes_of_the_mesh():
    """Those above 1, in the order in which devices send each other more."""
    sizes = {"data": 2, "stage": 1, "expert": 2, "model": 2}
    assert dict(jpipe.make_mesh(**sizes).shape) == sizes
    assert dict(jpipe.make_mesh(stage=2, fsdp=2, expert=1).shape) == {"stage": 2, "fsdp": 2}
    with pytest.raises(ValueError, match="`expert` must be a whole number of devices"):
        jpipe.make_mesh(stage=1, expert=0)
