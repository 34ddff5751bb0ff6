"""The seconds of a run by what they went to."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

KINDS = ("training", "compiling", "evaluating", "saving", "waiting", "lost")
"""Steps; start and compilation, until the first step has run; held-out data; checkpoints, as far as training stops for
them; a minibatch that was not there when the step before had ended; what a run that is resumed trains again."""


class Goodput:
    """Counts seconds. At each moment they go to one kind, at first to "compiling".

    Args:
      clock: the seconds now.
      start: when counting begins, by the clock.
      before: the seconds of a run that goes on here.

    Example:
      >>> now = 0.0
      >>> goodput = Goodput(lambda: now, 0.0)
      >>> now = 4.0
      >>> before = goodput.begin("training")
      >>> now = 10.0
      >>> with goodput.spent("saving"):
      ...     now = 12.0
      >>> goodput.move(1.5, "waiting")
      >>> goodput.text()
      'goodput 38%: training 4.5 s, compiling 4.0 s, saving 2.0 s, waiting 1.5 s'
    """

    def __init__(self, clock: Callable[[], float], start: float, before: Mapping[str, float] | None = None):
        self._clock, self._since, self._kind = clock, start, "compiling"
        self._seconds = dict.fromkeys(KINDS, 0.0) | dict(before or {})

    def begin(self, kind: str) -> str:
        """The seconds from now on go to this kind; returns the one before."""
        now, before = self._clock(), self._kind
        self._seconds[before] += now - self._since
        self._since, self._kind = now, kind
        return before

    @contextlib.contextmanager
    def spent(self, kind: str) -> Iterator[None]:
        """The seconds inside of the `with` block go to this kind."""
        before = self.begin(kind)
        try:
            yield
        finally:
            self.begin(before)

    def move(self, seconds: float, kind: str) -> None:
        """Counts some of the seconds that went to the kind of now as those of another kind."""
        self._seconds[self._kind] -= seconds
        self._seconds[kind] += seconds

    def lose(self, seconds: float) -> None:
        """Counts seconds of a run that went on after the state from which this one goes on."""
        self._seconds["lost"] += seconds

    def seconds(self) -> dict[str, float]:
        """The seconds up to now, by kind."""
        self.begin(self._kind)
        return {kind: round(value, 3) for kind, value in self._seconds.items()}

    def text(self) -> str:
        """The part of all seconds that went to steps, and the seconds of each kind."""
        seconds = self.seconds()
        share = seconds["training"] / max(sum(seconds.values()), 1e-9)
        parts = [f"{kind} {value:,.1f} s" for kind, value in seconds.items() if round(value, 1)]
        return f"goodput {share:.0%}: {', '.join(parts)}"
