"""What a launcher that starts a script again has to know, and how it decides.

The processes tell the launcher what they do by small files in a folder that lasts as long as it. Nothing here starts
a process. Standard library only.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FOLDER = "JPIPE_LAUNCHER_FOLDER"
"""The environment variable that names the folder; the processes have it only if they are started again."""

DEVICES_GONE = 74
"""The exit code of a process whose devices cannot be used again."""

FOLLOWERS = (71, 72, 73)
"""Exit codes of processes that end because of another one, see `jpipe.distributed`."""

_WRONG_OPTION = 2


CONNECTED, SAVES, SAVED = "connected", "saves", "saved"
"""What is told, see `tell`."""


class End(NamedTuple):
    """The end of a start.

    Attributes:
      code: 0, or the exit code of the first process that failed; 128 + n if signal n ended it.
      process: that process; 0 if none failed.
      signalled: whether a signal to the launcher asked for the end.
    """

    code: int
    process: int
    signalled: bool

    @property
    def follows(self) -> bool:
        """Whether the process ended because of another one."""
        return self.code in FOLLOWERS


class Told(NamedTuple):
    """The words of the processes of one start.

    Attributes:
      connected: the processes that have connected.
      saves: whether the script has made a `jpipe.Checkpoints`.
      saved: the newest step that any start has saved; None: none.
    """

    connected: frozenset[int]
    saves: bool
    saved: int | None

    @classmethod
    def take(cls, folder: pathlib.Path) -> "Told":
        """Reads what the processes told by `tell`, and forgets who has connected."""
        connected = set()
        for path in folder.glob(f"{CONNECTED}.*"):
            connected.add(int(path.suffix[1:]))
            path.unlink()
        saved = folder / SAVED
        step = int(saved.read_text()) if saved.exists() else None
        return cls(frozenset(connected), (folder / SAVES).exists(), step)


_MEMORY = pathlib.Path("/dev/shm")


def memory_folder(name: str) -> pathlib.Path | None:
    """A folder in memory that outlives the processes of this machine, as long as the launcher; None: there is none.

    Args:
      name: its name, the same in every start.
    """
    folder = pathlib.Path(os.environ.get(FOLDER, ""))
    return folder / name if _MEMORY in folder.parents else None


def tell(name: str, text: str = "") -> None:
    """Tells the launcher something, if it starts the script again when a process dies.

    Args:
      name: `CONNECTED` and the number of the process after a dot, `SAVES`, or `SAVED` with the step.
      text: the text.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return
    draft = pathlib.Path(folder, f"{name}.{os.getpid()}.draft")
    with contextlib.suppress(OSError):  # the launcher is gone
        draft.write_text(text)
        draft.replace(draft.with_name(name))


@dataclasses.dataclass
class Restarts:
    """Decides after each start whether there is another one, and which processes it has.

    Attributes:
      most: the number of starts after the first.
      most_fruitless: the number of starts in a row that may save no newer checkpoint.
      numbers: the numbers of processes that a start may have, the largest first.
      slots: the processes of the next start, by their numbers in the first one, which name their devices.
    """

    most: int
    most_fruitless: int
    numbers: list[int]
    slots: list[int]
    _count: int = 0
    _fruitless: int = 0
    _told: Told = Told(frozenset(), False, None)
    _was_connected: set[int] = dataclasses.field(default_factory=set)
    _early: int | None = None  # the slot that ended first in the start before, without a connection

    def after(self, end: End, told: Told) -> str:
        """Takes the end of a start. Returns why there is no other one, in words; empty if there is one."""
        before, self._told = self._told.saved, told
        if end.code == _WRONG_OPTION:
            return "exit code 2 says that an option or a file is wrong."
        if self._count == self.most:
            return f"--restarts={self.most} are used up."
        gone = self._gone(end, told)
        if gone is not None:
            slots = [slot for slot in self.slots if slot != gone]
            count = next((number for number in self.numbers if number <= len(slots)), None)
            if count is None:
                return f"the devices of process {end.process} are gone, and --min-processes={self.numbers[-1]}."
            self.slots, self._fruitless = slots[:count], 0
        elif told.saved != before:
            self._fruitless = 0
        else:
            self._fruitless += 1
        if self._fruitless == self.most_fruitless:
            newer = "" if told.saved is None else f" after that of step {told.saved}"
            return (
                f"--restarts-without-progress={self.most_fruitless}, and so many starts in a row have saved no "
                f"checkpoint{newer}. Remove the cause, save more often, or give a larger number."
            )
        self._count += 1
        return ""

    def _gone(self, end: End, told: Told) -> int | None:
        """The slot whose devices are gone; None: none."""
        slot = self.slots[end.process]
        self._was_connected |= {self.slots[i] for i in told.connected}
        early, self._early = self._early, None
        if end.code == DEVICES_GONE:
            return slot
        if end.process in told.connected or end.follows:
            return None
        # A script that never connects is wrong, and its devices are not the cause.
        if slot == early and slot in self._was_connected and len(self.slots) > self.numbers[-1]:
            return slot
        self._early = slot
        return None

    def words(self) -> str:
        """The next start in a sentence."""
        count, told = len(self.slots), self._told
        processes = f"{count} process{'es' if count > 1 else ''}"
        if told.saved is not None:
            place = f"after the checkpoint of step {told.saved}"
        elif told.saves or not told.connected:
            place = "and no checkpoint was saved yet"
        else:
            place = "from the beginning unless the script saves by itself: it has made no `jpipe.Checkpoints`"
        return f"start {self._count + 1} of at most {self.most + 1}: {processes}, {place}."


@contextlib.contextmanager
def folder_in_memory() -> Iterator[pathlib.Path]:
    """A folder that lasts as long as this launcher. In it the processes tell what they do, and keep what is to survive
    them; in memory, where the system has such folders.

    Removes those of launchers that were killed.
    """
    base = _MEMORY
    if fcntl is None or not (base.is_dir() and os.access(base, os.W_OK)):
        base = pathlib.Path(tempfile.gettempdir())
    prefix, lock = "jpipe-launch-", ".lock"
    for old in base.glob(f"{prefix}*/{lock}"):
        with contextlib.suppress(OSError), open(old) as file:  # it is held, or of another user
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old.parent)
    folder = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    try:
        with open(folder / "lock.draft", "x") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
                (folder / "lock.draft").rename(folder / lock)  # with its name it is held
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
