"""Legal synchronous tables drawn at random."""

import numpy as np

import jpipe


def random_table(seed: int) -> jpipe.Schedule:
    """A table of 1 to 4 stages and 1 to 4 microbatches, in which every stage updates at some time after its last gradient.

    In each tick a stage runs one of the operations that it can run, or none. Odd seeds split the backward.
    """
    rng = np.random.default_rng(seed)
    S, N = rng.integers(1, 5, 2).tolist()
    kinds = "FBW" if seed % 2 else "FB"
    tick_of: dict[tuple[str, int], list[int]] = {
        (k, s): [] for k in kinds for s in range(S)
    }
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
