"""A restored training goes on as if nothing had happened: in the same layout bit for bit, in another
layout with the same weights, optimizer and counters."""

import functools
import itertools
import json
import os
import pathlib
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import (
    LAYOUTS,
    arrays_of,
    batches,
    of_layout,
    pipeline,
    source,
    trained,
)

import jpipe
from jpipe import schedules
from jpipe.optim import correct_discrepancy, corrected_params
from jpipe.states import portable

KEY = jax.random.key(3)


def assert_equal(got, want):
    for path, a in arrays_of(want).items():
        np.testing.assert_array_equal(arrays_of(got)[path], a, err_msg=path)


PIPEMARE = {
    "optimizer": optax.chain(optax.sgd(1e-2, momentum=0.9), correct_discrepancy(0.5)),
    "backward_params": corrected_params,
}
SAME = {
    "gpipe": (schedules.gpipe(2, 4), {}),
    "1f1b, loss scale": (
        schedules.one_f_one_b(4, 4),
        {"loss_scale": jpipe.LossScale(initial=4.0, growth_interval=2)},
    ),
    "interleaved": (schedules.interleaved(4, 4), {"optimizer": optax.sgd(0.1)}),
    "zero bubble": (schedules.zero_bubble_h1(2, 4), {}),
    "pipedream": (schedules.pipedream(4, 2), {}),
    "2bw": (schedules.pipedream_2bw(2, 4), {}),
    "pipemare": (schedules.pipemare(4, 2), PIPEMARE),
}


@pytest.mark.sampled(len(SAME))
@pytest.mark.parametrize("name", SAME)
def test_the_same_layout_goes_on_bit_for_bit(name, tmp_path):
    """Dropout, batch norm, Adam, a moving loss scale, and microbatches in flight."""
    schedule, options = SAME[name]
    make = functools.partial(pipeline, schedule, **options)
    pipe, data = make(), batches(5)
    state, _ = trained(pipe, pipe.init(KEY, data[0]), data[:3])
    with jpipe.Checkpoints(tmp_path / "made" / "here") as checkpoints:
        checkpoints.save(3, state, run={"position": 3})
        state, losses = trained(pipe, state, data[3:])  # donates what is being saved
        checkpoints.wait()
        again = make()
        restored = checkpoints.restore(again, data[0])
    assert (restored.step, restored.run) == (3, {"position": 3})
    other, got = trained(again, restored.state, data[3:])
    assert got == losses
    assert_equal(other, state)
    again.step(pipe.step(state, data[0])[0], data[1])  # equal pipelines share states


@pytest.mark.exhaustive
def test_after_a_flush_nothing_is_in_flight(tmp_path):
    pipe = pipeline(schedules.pipedream(4, 2))
    data = batches(4)
    state, _ = trained(pipe, pipe.init(KEY, data[0]), data[:2])
    state, _ = pipe.flush(state)
    checkpoints = jpipe.Checkpoints(tmp_path)
    checkpoints.save(2, state)
    checkpoints.wait()
    restored = checkpoints.restore(pipeline(schedules.pipedream(4, 2)), data[0]).state
    assert_equal(restored, state)
    other = pipeline(schedules.gpipe(2, 2))
    assert_portable_equal(checkpoints.restore(other, data[0]).state, state)


# -- Other layouts

PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function from a layout to checkpoints with a state in that layout."""

    @functools.cache
    def checkpoints_of(layout):
        checkpoints = jpipe.Checkpoints(tmp_path_factory.mktemp("checkpoints"))
        checkpoints.save(2, of_layout(layout).adopt(source()))
        checkpoints.wait()
        return checkpoints

    return checkpoints_of


def assert_portable_equal(got, want):
    got, want = map(portable.to_portable, (got, want))
    jax.tree.map(np.testing.assert_array_equal, got.leaves, want.leaves)
    np.testing.assert_array_equal(got.key_data, want.key_data)
    assert got.num_microbatches == want.num_microbatches


@pytest.mark.first_case
@pytest.mark.sampled(614)
@pytest.mark.parametrize("before,after", PAIRS, ids=str)
def test_every_layout_restores_into_every_other(before, after, saved):
    restored = saved(before).restore(of_layout(after), batches(1)[0])
    assert_portable_equal(restored.state, source())
    np.testing.assert_equal(saved(before).params(), of_layout(after).get_params(restored.state))


def test_another_layout_goes_on_as_its_adoption(saved):
    data = batches(3)
    pipe = of_layout(("one_f_one_b", 4, 1))
    restored = saved(("gpipe", 2, 1)).restore(pipe, data[0])
    state, losses = trained(pipe, restored.state, data)
    expected, wanted = trained(pipe, pipe.adopt(source()), data)
    assert losses == wanted
    assert_equal(state, expected)


@pytest.mark.exhaustive
def test_microbatches_in_flight_need_the_layout(tmp_path):
    pipe, data = pipeline(schedules.pipedream(4, 2)), batches(3)
    state, _ = trained(pipe, pipe.init(KEY, data[0]), data)
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
        params = pipe.get_params(state)
    other = pipeline(schedules.gpipe(2, 2))
    with pytest.raises(ValueError, match="(?s)in flight.*'gpipe' instead of.*flush"):
        checkpoints.restore(other, data[0])
    started = other.init(KEY, data[0], params=checkpoints.params())
    np.testing.assert_equal(other.get_params(started), params)


@pytest.mark.exhaustive
def test_a_measured_cut_is_taken_over(tmp_path):
    """Another process would measure another cut."""
    pipe = pipeline(schedules.gpipe(2, 4), boundaries=[3])
    data = batches(2)
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, pipe.init(KEY, data[0]))
    balanced = pipeline(schedules.gpipe(2, 4))
    checkpoints.restore(balanced, data[0])
    assert [record.layers for record in balanced.partition(data[0])] == [(0, 3), (3, 8)]
    given = pipeline(schedules.gpipe(2, 4), boundaries=[5])
    checkpoints.restore(given, data[0])
    assert [record.layers for record in given.partition(data[0])] == [(0, 5), (5, 8)]


# -- Steps


@pytest.fixture(scope="module")
def small():
    """A pipeline of one stage, a batch and a state."""
    pipe, batch = pipeline(schedules.gpipe(1, 2), num_layers=2), batches(1)[0]
    return pipe, batch, pipe.init(KEY, batch)


def test_the_newest_steps_are_kept(small, tmp_path):
    pipe, batch, state = small
    checkpoints = jpipe.Checkpoints(tmp_path, keep=2)
    assert checkpoints.steps() == []
    for step in (1, 5, 7, 7):
        checkpoints.save(step, state, run=step)
    checkpoints.wait()
    assert checkpoints.steps() == [5, 7]
    assert sorted(os.listdir(tmp_path)) == ["00000005", "00000007"]
    assert checkpoints.restore(pipe, batch).run == 7
    assert checkpoints.restore(pipe, batch, step=5).run == 5


def test_a_new_name_is_on_the_disk_before_an_old_step_is_deleted(small, tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def record(descriptor):
        if os.path.samestat(os.fstat(descriptor), os.stat(tmp_path)):
            synced.append(sorted(p.name for p in tmp_path.iterdir()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with jpipe.Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, small[2])
    assert synced == [["00000001"], ["00000001", "00000002"]]
    assert os.listdir(tmp_path) == ["00000002"]


def test_a_save_removes_what_was_cut_off(small, tmp_path):
    for name in ("00000003.saving", "00000001.deleting", "notes"):
        (tmp_path / name / "inside").mkdir(parents=True)
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == []
        checkpoints.save(4, small[2])
    assert sorted(os.listdir(tmp_path)) == ["00000004", "notes"]


# -- Damage


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


def cut_short(path, _):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path, _):
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.first_case
@pytest.mark.parametrize(
    "damage",
    [
        flip,
        cut_short,
        pytest.param(lengthen, marks=pytest.mark.exhaustive),
        pytest.param(lambda path, _: path.unlink(), marks=pytest.mark.exhaustive),
    ],
)
def test_damage_in_any_file_is_seen(damage, small, tmp_path):
    """In each file in turn. The step before is restored, with a word."""
    pipe, batch, state = small
    with jpipe.Checkpoints(tmp_path, keep=None) as checkpoints:
        checkpoints.save(1, state, run="older")
        checkpoints.save(2, state, run="newer")
    folder = tmp_path / "00000002"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) >= 5
    random = np.random.default_rng(0)
    for path in files:
        whole = path.read_bytes()
        if not whole and damage in (flip, cut_short):
            continue
        damage(path, int(random.integers(1 << 30)))
        checkpoints = jpipe.Checkpoints(tmp_path)
        with pytest.raises(jpipe.DamagedCheckpointError, match=path.name):
            checkpoints.restore(pipe, batch, step=2)
        with pytest.warns(UserWarning, match="step 2 cannot be restored.*before"):
            assert checkpoints.restore(pipe, batch).run == "older"
        assert checkpoints.steps() == [1]
        path.write_bytes(whole)
    assert jpipe.Checkpoints(tmp_path).restore(pipe, batch).run == "newer"


def test_a_damaged_step_is_replaced(small, tmp_path):
    pipe, batch, state = small
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(3, state)
    manifest = tmp_path / "00000003" / "manifest.json"
    manifest.write_text("{}")
    checkpoints = jpipe.Checkpoints(tmp_path)
    with pytest.warns(UserWarning, match="manifest.json"):
        checkpoints.restore(pipe, batch)
    checkpoints.save(2, state)
    checkpoints.close()
    assert checkpoints.steps() == [1, 2] and not manifest.exists()


def test_a_newer_format_is_refused(small, tmp_path):
    pipe, batch, state = small
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jpipe.checkpoints._manifest.FORMAT", 2)
        with jpipe.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(2, state)
    with pytest.raises(ValueError, match="newer format.*install"):
        jpipe.Checkpoints(tmp_path).restore(pipe, batch)


def test_a_step_is_found_under_its_number_alone(small, tmp_path):
    """Under another one a run would go on at the wrong place in its data."""
    pipe, batch, state = small
    checkpoints = jpipe.Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, state)
    checkpoints.wait()
    (tmp_path / "00000002").rename(tmp_path / "00000007")
    assert checkpoints.steps() == [1]
    with pytest.warns(UserWarning, match="has step 2 by its manifest.*`00000002`"):
        assert checkpoints.restore(pipe, batch).step == 1
    for read in (
        checkpoints.params,
        lambda step: checkpoints.restore(pipe, batch, step),
    ):
        with pytest.raises(jpipe.DamagedCheckpointError, match="was renamed or copied"):
            read(7)


# -- Wrong use


OTHERS = [
    (dict(num_layers=3), "`params` must be a list with one entry per layer"),
    (dict(optimizer=optax.sgd(0.1)), "another optimizer"),
    (dict(optimizer=optax.sgd(0.1, momentum=0.9)), "another optimizer"),
    (dict(optimizer=optax.adabelief(1e-2)), "another optimizer: .* scale_by_belief,"),
]


@pytest.mark.parametrize("options,message", OTHERS)
def test_another_model_is_refused(options, message, small, tmp_path):
    _, batch, state = small
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    other = pipeline(schedules.gpipe(1, 2), **({"num_layers": 2} | options))
    with pytest.raises(ValueError, match=f"00000001` does not fit: .*{message}"):
        checkpoints.restore(other, batch)


@pytest.mark.first_case
@pytest.mark.parametrize("num_stages", [1, 2])  # the layout that was saved; another
def test_a_state_of_the_same_names_is_not_taken_for_another(num_stages, small, tmp_path, monkeypatch):
    _, batch, state = small
    schedule = schedules.gpipe(num_stages, 2)
    adamw = pipeline(schedule, num_layers=2, optimizer=optax.adamw(1e-3, b1=0.8))
    nadam = pipeline(schedule, num_layers=2, optimizer=optax.nadam(1e-2))
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        layout_of = jpipe.checkpoints._layout.layout_of_state
        checkpoints.wait()
        checkpoints.restore(adamw, batch)
        message = "scale_by_adam.nesterov=True, and the state is of scale_by_adam.nest"
        with pytest.raises(ValueError, match=f"another optimizer: .*{message}"):
            checkpoints.restore(nadam, batch)
        with pytest.raises(ValueError, match=f"another optimizer: .*{message}"):
            nadam.adopt(state)

        def of_older_version(state):
            layout = layout_of(state)
            del layout["optimizer"]
            return layout

        monkeypatch.setattr("jpipe.checkpoints._layout.layout_of_state", of_older_version)
        checkpoints.save(2, state)
        checkpoints.wait()
        checkpoints.restore(adamw, batch, 2)


def test_wrong_arguments(small, tmp_path):
    pipe, batch, state = small
    for keep in (0, -1, 2.5, "3"):
        with pytest.raises(ValueError, match="`keep` must be a number of steps"):
            jpipe.Checkpoints(tmp_path, keep=keep)
    for address in ("gs://bucket/run", "s3://bucket", "file:///tmp/a", "https://a/b", pathlib.Path("gs://bucket/run")):
        with pytest.raises(ValueError, match="`directory` must be in a file system"):
            jpipe.Checkpoints(address)
    checkpoints = jpipe.Checkpoints(tmp_path)
    for step in (-1, 1.0, True, "1"):
        with pytest.raises(ValueError, match="`step` must be an integer"):
            checkpoints.save(step, state)
    with pytest.raises(ValueError, match="`run` must be values that JSON has"):
        checkpoints.save(1, state, run={"batch": jnp.ones(2)})
    with pytest.raises(ValueError, match="state"):
        checkpoints.save(1, {"params": 1})
    with pytest.raises(ValueError, match="`pipe` must be a `jpipe.Pipeline`, got dict"):
        checkpoints.restore(batch, pipe)
    with pytest.raises(FileNotFoundError, match="no step that can be restored"):
        checkpoints.restore(pipe, batch)
    checkpoints.save(4, state)
    checkpoints.wait()
    with pytest.raises(FileNotFoundError, match="has no step 3. It has steps 4"):
        checkpoints.restore(pipe, batch, step=3)
    with pytest.raises(ValueError, match="not be before.*got 3 after 4"):
        checkpoints.save(3, state)


def test_what_cannot_be_written_is_said_by_the_next_call(small, tmp_path):
    """The steps that were saved stay, and a later save works again."""
    pipe, batch, state = small
    checkpoints = jpipe.Checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.wait()
    with pytest.MonkeyPatch.context() as patch:

        def full(*_):
            raise OSError(28, "No space left on device")

        patch.setattr("jpipe.checkpoints.Manifest.write", full)
        checkpoints.save(2, state)
        with pytest.raises(OSError, match="cannot save step 2.*No space left"):
            checkpoints.wait()
    assert os.listdir(tmp_path) == ["00000001"]
    checkpoints.save(3, state)
    checkpoints.close()
    assert checkpoints.steps() == [1, 3]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        jpipe.Checkpoints(tmp_path / "file").save(1, state)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_costs_the_step_alone(small, small_disk, capfd, caplog):
    """And says so in one line, without the tracebacks of Orbax's threads."""
    pipe, batch, state = small
    checkpoints = jpipe.Checkpoints(small_disk)
    checkpoints.save(1, state)
    checkpoints.wait()
    ballast = small_disk / "ballast"
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
    ballast.write_bytes(bytes(free - 4096))
    with pytest.raises(OSError, match="cannot save step 2 to .*: [^:]*No space left"):
        checkpoints.save(2, state)
        checkpoints.wait()
    assert "Traceback" not in capfd.readouterr().err and not caplog.records
    assert sorted(os.listdir(small_disk)) == ["00000001", "ballast"]
    assert checkpoints.restore(pipe, batch).step == 1
    ballast.unlink()
    checkpoints.save(3, state)
    checkpoints.close()
    assert checkpoints.steps() == [1, 3]


def test_a_folder_that_cannot_be_written_or_is_removed(small, small_disk):
    _, _, state = small
    checkpoints = jpipe.Checkpoints(small_disk / "inside")
    checkpoints.save(1, state)
    checkpoints.wait()
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True)
    with pytest.raises(OSError, match="Read-only"):
        checkpoints.save(2, state)
        checkpoints.wait()
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    shutil.rmtree(small_disk / "inside")
    assert checkpoints.steps() == []
    checkpoints.save(3, state)  # makes the folder again
    checkpoints.close()
    assert checkpoints.steps() == [3]


def test_the_manifest_can_be_read_by_people(small, tmp_path):
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small[2], run={"epoch": 2})
    outer = json.loads((tmp_path / "00000001" / "manifest.json").read_text())
    content = json.loads(outer["content"])
    assert content["run"] == {"epoch": 2} and content["layout"]["schedule"] == "gpipe"
    assert content["versions"]["jax"] == jax.__version__
