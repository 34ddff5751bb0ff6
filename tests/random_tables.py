"""Legal tables drawn at random."""

import numpy as np

import jpipe
from jpipe.schedule import IDLE


def random_table(seed: int) -> jpipe.Schedule:
    """A table of 1 to 4 stages and 1 to 4 microbatches, in which every stage updates at some time after its last
    gradient.

    In each tick a stage runs one of the operations that it can run, or none. Odd seeds split the backward.
    """
    rng = np.random.default_rng(seed)
    S, N = rng.integers(1, 5, 2).tolist()
    kinds = "FBW" if seed % 2 else "FB"
    tick_of: dict[tuple[str, int], list[int]] = {(k, s): [] for k in kinds for s in range(S)}
    rows, updated, t = [], [False] * S, 0
    while not all(updated):
        row = []
        for s in range(S):
            ready = [k for k in kinds if _can_run(k, s, t, tick_of, S, N)]
            if all(len(tick_of[k, s]) == N for k in kinds) and not updated[s]:
                ready.append("U")
            kind = rng.choice(ready) if ready and rng.random() < 0.8 else "."
            if kind in kinds:
                row.append(f"{kind}{len(tick_of[kind, s])}")
                tick_of[kind, s].append(t)
            else:
                row.append("U1" if kind == "U" else ".")
                updated[s] |= kind == "U"
        rows.append(" ".join(row))
        t += 1
    header = " ".join(f"{s}@{s}" for s in range(S))
    text = "\n".join([header, *rows])
    return jpipe.Schedule.from_text(text, name=f"random {seed}").check()


def _can_run(kind: str, s: int, t: int, tick_of: dict, S: int, N: int) -> bool:
    """Whether what the next operation of a kind reads has arrived before tick t."""
    m = len(tick_of[kind, s])
    needs = {
        "F": [("F", s - 1)] if s > 0 else [],
        "B": [("F", s)] + ([("B", s + 1)] if s < S - 1 else []),
        "W": [("B", s)],
    }[kind]
    return m < N and all(len(tick_of[n]) > m and tick_of[n][m] < t for n in needs)


def random_asynchronous_table(seed: int) -> jpipe.Schedule:
    """A table of a steady state of 1 to 4 stages, whose messages, gradients and updates may each wait for rounds.

    Every pass reads one of the two newest versions that it can read. Odd seeds split the backward.
    """
    rng = np.random.default_rng(seed)
    S, N = rng.integers(1, 5, 2).tolist()
    T = N + int(rng.integers(0, 4))
    split = bool(seed % 2)

    def later(ticks: np.ndarray, least: int) -> np.ndarray:
        return ticks + int(rng.integers(least, least + rng.choice([2, 2 * T])))

    forward, backward = {}, {}
    forward[0] = np.sort(rng.choice(T, N, replace=False))
    for s in range(1, S):
        forward[s] = later(forward[s - 1], 1)
    backward[S - 1] = later(forward[S - 1], 0)
    for s in reversed(range(S - 1)):
        backward[s] = later(backward[s + 1], 1)
    cells = {
        name: np.full((T, S), IDLE)
        for name in (
            "forward",
            "backward",
            "weight_grad",
            "forward_version",
            "backward_version",
            "update",
        )
    }
    for s in range(S):
        gradient = later(backward[s], 0) if split else backward[s]
        updated = int(rng.integers(gradient[-1], gradient[0] + T))
        k, t = divmod(updated, T)
        cells["update"][t, s] = 1 - k
        for m in range(N):
            for name, ticks in (("forward", forward[s]), ("backward", backward[s])):
                k, t = divmod(int(ticks[m]), T)
                cells[name][t, s] = m - N * k
                newest = 1 + (int(ticks[m]) - updated - 1) // T
                version = newest - int(rng.integers(0, 2))
                cells[f"{name}_version"][t, s] = version - k
            if split:
                k, t = divmod(int(gradient[m]), T)
                cells["weight_grad"][t, s] = m - N * k
    name = f"random asynchronous {seed}"
    return jpipe.Schedule(name, N, np.arange(S), np.arange(S), **cells).check()
