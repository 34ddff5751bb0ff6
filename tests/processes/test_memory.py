"""No process holds the whole model, but process 0 the weights that it asks for."""

import json
import re

import pytest
from processes.launching import launch

CACHE = 2**28
"""Bytes of a checkpoint's files that TensorStore keeps while it reads single leaves."""


@pytest.mark.slow
def test_no_process_holds_the_whole_model(tmp_path, monkeypatch):
    """Four processes with a stage each, so that the whole model is four times the share of a process.

    The bounds are in bytes of the share, of *parts*, one array of one stage, and of a cache.
    """
    # What is freed goes back to the system, so that the peaks are of what is used.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**20))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    done = launch("memory.py", tmp_path, num_processes=4, timeout=900)
    assert done.returncode == 0, done.stderr
    found = {
        int(process): json.loads(line) for process, line in re.findall(r"^\[(\d)\] (\{.*)$", done.stdout, flags=re.M)
    }
    assert len(found) == 4
    for process, measured in found.items():
        sizes, peaks = measured["sizes"], measured["peaks"]
        own, part, weights = sizes["own"], sizes["part"], sizes["weights"]
        state = own + sizes["private"]
        assert weights > 2e8
        assert sizes["state"] == 4 * own == pytest.approx(3 * weights, rel=0.01)
        bounds = {
            "init": own + state + 2 * part,
            "step": sizes["temporaries"] + 2 * part,
            "get_params": 4 * part + (weights if process == 0 else 0),
            "save": own + 3 * part,
            "restore": own + state + 2 * part,
            "restore elsewhere": own + state + 2 * part + CACHE,
            # Its layers of the old state, the arrays of the new one on the host, and the new one.
            "adopt": own + own + state + 2 * part,
        }
        for name, bound in bounds.items():
            assert peaks[name]["peak"] < bound, (process, name, peaks, sizes)
            assert bound < sizes["state"] + CACHE * ("elsewhere" in name)
        # What does hold all weights on every process is seen.
        assert peaks["control"]["peak"] > weights
        assert bounds["get_params"] < weights or process == 0
