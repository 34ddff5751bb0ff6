"""Groups the layers of a model: equal neighbours in a stage are one run, and stages with equal runs share a program.

Letters: S stages.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jpipe.packing import Leaf, Packing


class Signature(NamedTuple):
    """The facts that the layers of a run share.

    Attributes:
      kind: the number of their kind.
      stash: names of the skips that start there.
      pop: names of the skips that end there.
    """

    kind: int
    stash: tuple[str, ...]
    pop: tuple[str, ...]


class Groups(NamedTuple):
    """Stages grouped by the kinds of their layers; equal lists of kinds share a program.

    Attributes:
      signatures: the kinds of each program, with equal neighbours joined to one run.
      program_of_stage: `[S]`, position in `signatures`.
      stages_of: the stages that share each program.
      lengths: `[S][runs]`, number of layers in each run of a stage.
      longest: `[programs][runs]`, the largest of these numbers over the program's stages.
      steps: `[programs][runs]`, see `Run`.
    """

    signatures: list[tuple]
    program_of_stage: list[int]
    stages_of: list[tuple[int, ...]]
    lengths: list[tuple[int, ...]]
    longest: list[tuple[int, ...]]
    steps: list[tuple]

    def pack(
        self,
        *uses: Callable[[Any], Iterable[Leaf]],
        last: Sequence[Leaf] = (),
        devices: Sequence[Sequence[int]] | None = None,
        arranged: Callable[[int, int, list[Leaf]], list[Leaf]] | None = None,
        **options: Any,
    ) -> Packing:
        """Packs the leaves that layers have for some uses, such as their parameters.

        Args:
          *uses: kind -> leaves of one layer. Those of the first use come first.
          last: further leaves of the last stage.
          devices: see `devices_of_owners`. For arrays with rows for the stages that use them.
          arranged: number of a program, number of a run in it, and leaves of the run's layers -> the leaves that the
            run has; None: these.
          **options: `occupancy` and `tight` of `Packing.of`.

        Returns:
          A packing with one owner per program.
        """
        owners: list[list[Leaf]] = [[] for _ in self.signatures]
        for p, (owner, signature, longest) in enumerate(zip(owners, self.signatures, self.longest, strict=True)):
            for leaves_of in uses:
                for r, (kind, n) in enumerate(zip(signature, longest, strict=True)):
                    leaves = [leaf._replace(count=n) for leaf in leaves_of(kind)]
                    owner += leaves if arranged is None else arranged(p, r, leaves)
        owners[self.program_of_stage[-1]] += last
        owner_devices = devices_of_owners(self.program_of_stage, devices)
        return Packing.of(owners, devices=owner_devices, **options)


def pack_weights(
    groups: Groups,
    trained: Callable[[Any], Iterable[Leaf]],
    frozen: Callable[[Any], Iterable[Leaf]],
    devices: Sequence[Sequence[int]] | None,
    num_versions: Sequence[int],
    *,
    hooked: bool,
    **options: Any,
) -> Packing:
    """Packs the weights, for each owner those that are trained and then those that are frozen.

    Frozen weights are in arrays of their own, with one version. But every device allocates each array for its largest
    stage, and if some stages are frozen and others trained, they take less in the same arrays.

    Args:
      groups: the stages.
      trained: kind -> the trained weights of one layer.
      frozen: kind -> its frozen weights.
      devices: see `devices_of_owners`.
      num_versions: number of versions of the trained weights of each stage.
      hooked: whether passes read other weights than those that are updated, which frozen weights cannot lie beside.
      **options: see `Groups.pack`.
    """
    of_trained = groups.pack(trained, devices=devices, **options)
    apart = of_trained.with_constants(groups.pack(frozen, devices=devices, **options).named("frozen"))
    if hooked or not apart.constant:
        return apart
    together = groups.pack(trained, frozen, devices=devices, **options)
    pairs = zip(together.places, of_trained.places, strict=True)
    written = {place.array for places, first in pairs for place in places[: len(first)]}
    together = dataclasses.replace(together, constant=frozenset(together.arrays.keys() - written))
    devices_of_stage = [[s] for s, _ in enumerate(groups.program_of_stage)] if devices is None else devices

    def allocated(pack: Packing) -> int:
        total = 0
        for name, row_bytes in pack.row_bytes.items():
            rows: collections.Counter[int] = collections.Counter()
            for s, owner in enumerate(groups.program_of_stage):
                if any(place.array == name for place in pack.places[owner]):
                    for d in devices_of_stage[s]:
                        rows[d] += 1 if name in pack.constant else int(num_versions[s])
            total += row_bytes * max(rows.values())
        return total

    return min(apart, together, key=allocated)


def devices_of_owners(owner_of_stage: Sequence[int], devices: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """Lists, for each owner of a packing, the device of each copy of each stage that it stands for.

    Args:
      owner_of_stage: the owner of each stage.
      devices: the devices of the copies of each stage; None: every stage is on a device of its own.
    """
    devices_of_owner: list[list[int]] = [[] for _ in range(max(owner_of_stage) + 1)]
    for s, owner in enumerate(owner_of_stage):
        devices_of_owner[owner] += [s] if devices is None else devices[s]
    return devices_of_owner


def devices_of_use(name: str, devices: Sequence[Sequence[int]] | None) -> Sequence[Sequence[int]] | None:
    """The devices of stages for packing their leaves of one use, see `Groups.pack`; None: no stage has rows of its own.

    Stashes have slots instead of rows. Stages of several devices share them; those of one device that runs one
    microbatch after the other have slots of their own.
    """
    if name in ("parameters", "gradients", "optimizer_state", "state", "statistics"):
        return devices
    one_device = devices is not None and len({*itertools.chain(*devices)}) == 1
    return devices if one_device else None


class Run(NamedTuple):
    """Layers of one kind that follow one another in a stage, or in all stages of a program.

    Attributes:
      kind: their kind.
      length: their number; in a program the largest.
      first: the index of each leaf of the first layer in its array, if leaves have places already; else `()`.
      step: the distance of these indices from one layer to the next; None if there is one layer.
    """

    kind: Any
    length: int
    first: tuple[int, ...]
    step: tuple[int, ...] | None


def group(
    kinds: Sequence,
    starts: Sequence[int],
    ends_apart: bool = False,
    indices: Sequence[tuple[int, ...]] = (),
) -> Groups:
    """Groups stages.

    Args:
      kinds: kind of each layer; equal kinds compare equal.
      starts: first layer of each stage, and the number of layers at the end.
      ends_apart: see `Target`.
      indices: for each layer the index of each of its leaves in its array. The leaves of a run must lie at equal
        distances, and those of stages that share a program at the same indices. `()`: they have no places yet.
    """
    indices = indices or [()] * len(kinds)
    programs: list[tuple[list[Run], Any]] = []
    lengths, program_of_stage = [], []
    for start, stop in itertools.pairwise(starts):
        runs = _runs(kinds[start:stop], indices[start:stop])
        end = (start == starts[0], stop == starts[-1]) if ends_apart else None
        for p, (shared, shared_end) in enumerate(programs):
            joined = _joined(shared, runs) if end == shared_end else None
            if joined is not None:
                programs[p] = joined, end
                break
        else:
            p = len(programs)
            programs.append((runs, end))
        program_of_stage.append(p)
        lengths.append(tuple(run.length for run in runs))
    stages_of = [tuple(s for s, q in enumerate(program_of_stage) if q == p) for p in range(len(programs))]
    columns = [
        [tuple(getattr(run, name) for run in runs) for runs, _ in programs] for name in ("kind", "length", "step")
    ]
    signatures, longest, steps = columns
    return Groups(signatures, program_of_stage, stages_of, lengths, longest, steps)


def _runs(kinds: Sequence, indices: Sequence[tuple[int, ...]]) -> list[Run]:
    """The runs of a stage."""
    runs: list[Run] = []
    before: tuple[int, ...] = ()
    for kind, index in zip(kinds, indices, strict=True):
        run = Run(kind, 1, index, None)
        if runs and runs[-1].kind == kind:
            step = tuple(b - a for a, b in zip(before, index, strict=True))
            if runs[-1].step in (None, step):
                run = runs.pop()
                run = run._replace(length=run.length + 1, step=step)
        runs.append(run)
        before = index
    return runs


def _joined(shared: Sequence[Run], runs: Sequence[Run]) -> list[Run] | None:
    """The runs of a program if one more stage shares it; None if the stage cannot."""
    if [(run.kind, run.first) for run in shared] != [(run.kind, run.first) for run in runs]:
        return None
    joined = []
    for a, b in zip(shared, runs, strict=True):
        steps = {a.step, b.step} - {None}
        if len(steps) > 1:
            return None
        joined.append(a._replace(length=max(a.length, b.length), step=next(iter(steps), None)))
    return joined
