"""The calls that all processes make together, and the test by which process 0 sees that they differ.

Every process counts its calls, and keeps a checksum over the names of all calls so far, and one over the batches of all
steps. Process 0 asks for both after as many calls as the slowest process has made. A step that is left out moves all
later ones, so it is seen at whatever call they are compared.
"""

import collections
import zlib
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

_MOST_KEPT = 1024
"""Calls that a process may be ahead of the slowest one, at most, so that both can be compared."""


class Batch(NamedTuple):
    """The rows that a process gives to a step.

    Attributes:
      share: names the share of every batch that this process gives. Processes of equal shares give equal rows.
      checksum: the checksum of the rows.
    """

    share: str
    checksum: int


class Calls:
    """The calls of this process, noted by the main thread and read by the watchdog's.

    Attributes:
      asked: the number of the call that process 0 asks for.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._names = 0
        self._batches: dict[str, int] = {}
        self._last: collections.deque[_Call] = collections.deque(maxlen=_MOST_KEPT)

    def note(self, name: str, steps: int, batch: Batch | None = None) -> None:
        """A call begins, after so many steps, with it if it is one."""
        self._names = zlib.crc32(name.encode(), self._names)
        share, sum_of_batches = "", 0
        if batch is not None:
            share, (_, checksum) = batch.share, batch
            before = self._batches.get(share, 0)
            sum_of_batches = zlib.crc32(checksum.to_bytes(4, "little"), before)
            self._batches[share] = sum_of_batches
        number = self._last[-1].number + 1 if self._last else 1
        self._last.append(_Call(number, name, steps, self._names, share, batches=sum_of_batches))

    def look(self) -> dict[str, Any]:
        """The "number" of calls, the number that was "asked" for, and "at" it the call; None if it is not kept."""
        last = list(self._last)
        position = self.asked - last[0].number if last else -1
        at = last[position] if 0 <= position < len(last) else None
        number = last[-1].number if last else 0
        return {"number": number, "asked": self.asked, "at": at}


class _Call(NamedTuple):
    """A call, and the checksums of all calls up to it."""

    number: int
    name: str
    steps: int
    names: int
    share: str
    batches: int


_RULE = "Every process must make the same calls in the same order, also where one of them alone uses the result."


def next_to_ask(last: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The newest call of all processes, by their last lines; None while they answer for another one."""
    if len({line["calls"]["asked"] for line in last.values()}) > 1:
        return None
    return min(line["calls"]["number"] for line in last.values())


def difference(last: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Describes the difference of the calls of the processes in words; None if they agree as far as they can be
    compared.

    Args:
      last: process -> its last line.
    """
    numbers = {p: line["calls"]["number"] for p, line in last.items()}
    for p, line in sorted(last.items()):
        ahead = [q for q in sorted(last) if numbers[q] > numbers[p]]
        if line["left"] and ahead:
            return (
                f"{_names([p])} ended after {numbers[p]} calls, and the next one, of {_names(ahead)}, waits for it. "
                f"{_RULE}"
            )
    if next_to_ask(last) is None:
        return None
    given = {p: line["calls"]["at"] for p, line in last.items()}
    calls = {p: _Call(*call) for p, call in given.items() if call is not None}
    odd = _odd({p: call.names for p, call in calls.items()})
    if odd:
        listed = ", ".join(f"{calls[p].name} in process {p}" for p in _one_of_each(calls, odd))
        what = _unlike(odd, calls, "made", "calls")
        return f"{what}: call {calls[odd[0]].number} is {listed}. {_RULE}"
    for share in {call.share for call in calls.values()} - {""}:
        alike = {p: call for p, call in calls.items() if call.share == share}
        odd = _odd({p: call.batches for p, call in alike.items()})
        if odd:
            what = _unlike(odd, alike, "gave", "batches")
            return (
                f"{what}, in step {calls[odd[0]].steps} or before. They hold parts "
                "of the same replicas and must give the same rows: one of them has left out a step, or reads other "
                "data."
            )
    return None


def _unlike(odd: list[int], among: Mapping[int, Any], verb: str, noun: str) -> str:
    """The start of a message about processes that are unlike the others, or each other."""
    if len(odd) == len(among):
        return f"{_names(odd)} {verb} different {noun}"
    return f"{_names(odd)} {verb} other {noun} than the rest"


def _odd(values: Mapping[int, Hashable]) -> list[int]:
    """The processes whose value differs from that of most; all of them if there is no such value."""
    counts = collections.Counter(values.values()).most_common(2)
    if len(counts) < 2:
        return []
    (usual, most), (_, second) = counts
    return sorted(p for p, value in values.items() if most == second or value != usual)


def _one_of_each(calls: Mapping[int, _Call], odd: list[int]) -> list[int]:
    """One process for each name of a call, an odd one if there is any."""
    order = [*odd, *sorted(calls.keys() - set(odd))]
    first = {calls[p].name: p for p in reversed(order)}
    return sorted(first.values(), key=order.index)


def _names(processes: list[int]) -> str:
    return f"process{'es' * (len(processes) > 1)} {', '.join(map(str, processes))}"
