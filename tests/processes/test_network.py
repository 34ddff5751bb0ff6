"""Processes on two machines, whose network is cut: network namespaces stand in for the machines."""

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest
from processes.launching import FOLDER, ROOT, SECONDS

from jpipe import launch


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


class Machine:
    """A network namespace with one address, under which its host name is known.

    Attributes:
      name: of the namespace.
      address: of the interface.
      interface: its name.
    """

    def __init__(self, number: int):
        self.name = f"jpipe-{os.getpid()}-{number}"
        self.address = f"10.99.0.{number + 1}"
        self.interface = f"jp{os.getpid()}-{number}"
        ip("netns", "add", self.name)
        # `ip netns exec` shows these files in /etc.
        self._files = pathlib.Path("/etc/netns", self.name)
        self._files.mkdir(parents=True)
        hosts = f"127.0.0.1 localhost\n{self.address} {socket.gethostname()}\n"
        (self._files / "hosts").write_text(hosts)

    def ip(self, *words):
        ip("-n", self.name, *words)

    def start(self):
        self.ip("address", "add", f"{self.address}/24", "dev", self.interface)
        for interface in ("lo", self.interface):
            self.ip("link", "set", interface, "up")

    def run(self, script, **variables):
        """Starts a script of this folder."""
        python = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, "-u", FOLDER / script],
            env=os.environ | {"PYTHONPATH": python} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def remove(self):
        ip("netns", "delete", self.name, check=False)
        shutil.rmtree(self._files, ignore_errors=True)


@pytest.fixture
def machines():
    """Two machines with a cable between them."""
    made = []
    try:
        for number in range(2):
            made.append(Machine(number))
        ends = [f"{m.interface} netns {m.name}".split() for m in made]
        ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for machine in made:
            machine.start()
        yield made
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    finally:
        for machine in made:
            machine.remove()


@pytest.mark.slow
@pytest.mark.parametrize("cut_at", [0, 1])
def test_processes_whose_network_is_cut_end(cut_at, machines):
    """Nothing that is sent arrives any more, and no connection is closed."""
    shared = {
        launch.COORDINATOR_ADDRESS: f"{machines[0].address}:4567",
        launch.NUM_PROCESSES: "2",
        "JAX_NUM_CPU_DEVICES": "2",
    }
    processes = [
        machine.run("stopping.py", **shared, **{launch.PROCESS_ID: str(number)})
        for number, machine in enumerate(machines)
    ]
    try:
        read = ["", ""]
        for number, process in enumerate(processes):
            while "trains in" not in read[number]:
                line = process.stdout.readline()
                assert line, read
                read[number] += line
        time.sleep(2.0)
        assert [process.poll() for process in processes] == [None, None]
        machines[cut_at].ip("link", "set", machines[cut_at].interface, "down")
        cut = time.monotonic()
        for number, process in enumerate(processes):
            out, _ = process.communicate(timeout=120)
            read[number] += out
        seconds = time.monotonic() - cut
        assert seconds < SECONDS
        print(f"both ended {seconds:.1f} s after the cut")
    finally:
        for process in processes:
            process.kill()
    for number, process in enumerate(processes):
        messages = re.findall(r"^jpipe: (.*)$", read[number], flags=re.M)
        assert process.returncode == 72, read[number]
        (message,) = messages
        assert message.startswith(f"process {number} ends: process {1 - number} has not been heard of for 15 s")
