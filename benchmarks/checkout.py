"""What a benchmark runs: the commit of a checkout."""

import pathlib
import subprocess


def commit(root: pathlib.Path) -> str:
    """The commit of a checkout, with `-dirty` if files differ from it, or "unknown".

    Args:
      root: a folder of the checkout.
    """
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        git = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git
        return "unknown"
    return git.stdout.strip() or "unknown"
