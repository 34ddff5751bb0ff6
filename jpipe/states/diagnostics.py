"""The diagnostics of `jpipe.optim.diagnose_delay` in a training state, for each stage."""

import re

import numpy as np

from jpipe.engine.state import PipelineState, num_rounds
from jpipe.optim.diagnose_delay import quantities_from
from jpipe.states.locations import owners, read

_LEAF = re.compile(r"(?P<at>.*)\.delay_(?P<kind>facts|sums)\['(?P<name>\w+)'\].*")


def values(state: PipelineState) -> dict[str, np.ndarray]:
    """Name -> `[S]`, the numbers of `jpipe.optim.delay_diagnostics` for each stage. Every process must call it.

    Raises:
      ValueError: if the optimizer keeps none.
    """
    homes, wanted = [], []
    for owner in owners(state.program, num_rounds(state)):
        found = {path: leaf.location for path, leaf in owner.optimizer_state.items() if _LEAF.fullmatch(path)}
        homes += [owner.home] * bool(found)
        wanted += [found] * bool(found)
    if not wanted:
        raise ValueError(
            "the optimizer keeps no diagnostics. Wrap it: `optimizer=jpipe.optim.diagnose_delay(optimizer)`."
        )
    num_stages = state.program.stages.num_stages
    facts: dict[str, np.ndarray] = {}
    sums: dict[str, np.ndarray] = {}
    for home, leaves in zip(homes, read(state, wanted), strict=True):
        for path, value in leaves.items():
            match = _LEAF.fullmatch(path)
            assert match is not None
            into = facts if match["kind"] == "facts" else sums
            per_stage = into.setdefault(match["name"], np.zeros(num_stages))
            per_stage[home] = value if into is facts else per_stage[home] + value
    return quantities_from(facts, sums)
