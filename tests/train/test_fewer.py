"""The layout of a run that goes on with fewer devices."""

import pathlib

import pytest

from jpipe import launch
from train import flags
from train.config import TrainConfig
from train.fewer import fitted, on_devices

QUICKSTART = str(pathlib.Path(__file__).parents[2] / "configs" / "quickstart.py")


def config(*words):
    words = ["batch_size=96", *words]
    return flags.parse(["--config", QUICKSTART, *(f"--config.{word}" for word in words)], TrainConfig, ())[1]


@pytest.mark.parametrize(
    "words, devices, want",
    [
        ((), 4, (4, 1)),
        ((), 3, (3, 1)),
        ((), 2, (2, 1)),
        (("mesh.data=2",), 6, (3, 2)),
        (("mesh.data=2",), 4, (4, 1)),
        (("pipeline.num_stages=2", "mesh.data=2"), 3, (1, 3)),
        (("pipeline.num_stages=2", "mesh.model=2"), 2, (1, 1)),
        (("pipeline.schedule=interleaved",), 1, (2, 1)),
    ],
)
def test_the_most_stages_that_use_all_devices(words, devices, want):
    fewer = on_devices(config(*words), devices)
    assert (fewer.pipeline.num_stages, fewer.mesh.data) == want
    assert fewer.pipeline.table().num_devices * fewer.mesh.data * fewer.mesh.model == devices


def test_options_of_replicas_go_with_them():
    words = ("pipeline.num_stages=2", "pipeline.boundaries=3", "mesh.data=2", "mesh.shard_optimizer=true")
    fewer = on_devices(config(*words), 2)
    assert (fewer.pipeline.num_stages, fewer.mesh.data, fewer.mesh.shard_optimizer) == (2, 1, False)
    assert fewer.pipeline.boundaries == (3,)
    assert on_devices(config(*words), 1).pipeline.boundaries is None


def test_no_layout():
    with pytest.raises(ValueError, match="7 devices are left, and no number of stages up to 4 .* 24 rows.*--layout"):
        on_devices(config(), 7)


def test_only_a_launcher_with_fewer_processes_changes_a_run(monkeypatch, capsys):
    whole = config()
    assert fitted(whole) is whole
    monkeypatch.setenv(launch.DEVICES_LEFT, "2")
    monkeypatch.setenv(launch.PROCESS_ID, "0")
    assert fitted(whole).pipeline.num_stages == 2
    assert capsys.readouterr().out == "train.py: 2 devices are left: stages 2, replicas 1\n"
