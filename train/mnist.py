"""MNIST: handwritten digits, 28 x 28, in ten classes.

The database of Yann LeCun, Corinna Cortes and Christopher J.C. Burges. A part of it
ships with the project (`mnist_small/README.md`); the whole is four files in the idx
format, which `--config.data.dir` names the directory of.
"""

import dataclasses
import gzip
import hashlib
import io
import pathlib
import zlib

import numpy as np

from train.data import Batch, Dataset

_SMALL = pathlib.Path(__file__).parent / "mnist_small" / "digits.npz"
_SMALL_SHA256 = "41be0540081e4ee9c5164de239c5abf2b31772b54d487385cde32fe7a8e7b296"

# Name of each official file, sha256 of it unpacked, shape of what it holds.
_OFFICIAL = {
    "train-images-idx3-ubyte": (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        (60000, 28, 28),
    ),
    "train-labels-idx1-ubyte": (
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        (60000,),
    ),
    "t10k-images-idx3-ubyte": (
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        (10000, 28, 28),
    ),
    "t10k-labels-idx1-ubyte": (
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        (10000,),
    ),
}
# Mean and standard deviation of the training pixels, as fractions of white.
_MEAN, _STD = 0.1307, 0.3081


@dataclasses.dataclass(frozen=True)
class MNIST:
    """Handwritten digits."""

    dir: str | None = None
    """Directory of the four official idx files, packed (.gz) or not. None: the 8,572
    training and 2,000 test images that ship with the project."""
    max_shift: int = 0
    """Pixels by which a training image is moved at most, in either direction."""

    def __post_init__(self):
        if not 0 <= self.max_shift < 28:
            raise ValueError(
                f"`max_shift` must be from 0 to 27 pixels, got {self.max_shift}."
            )

    def load(self) -> Dataset:
        """Reads the images and checks that they are the real ones.

        Raises:
          FileNotFoundError: if a file is missing; says which.
          ValueError: if a file is damaged; says how.
        """
        if self.dir is None:
            arrays = _read_small()
        else:
            arrays = read_official(self.dir)
        train_images, train_labels, test_images, test_labels = arrays
        return Dataset(
            train=Images(train_images, train_labels, self.max_shift),
            test=Images(test_images, test_labels),
            source=f"MNIST, {len(train_images):,} training and {len(test_images):,} "
            f"test images ({'shipped part' if self.dir is None else self.dir})",
            unit="images",
        )


class Images:
    """Images uint8 `[M, H, W]` with labels `[M]`; batches are float32 `[B, H, W, 1]`."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, max_shift: int = 0):
        self.images, self.labels, self.max_shift = images, labels, max_shift

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: np.ndarray, rng: np.random.Generator | None) -> Batch:
        images = self.images[indices]
        if rng is not None and self.max_shift:
            images = _shift(images, self.max_shift, rng)
        inputs = (images.astype(np.float32) / 255 - _MEAN) / _STD
        return {
            "inputs": inputs[..., None],
            "labels": self.labels[indices].astype(np.int32),
        }


def _shift(images: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """Each image moved by up to `most` pixels down and right, black moving in."""
    num_images, height, width = images.shape
    down, right = rng.integers(-most, most + 1, (2, num_images, 1, 1))
    padded = np.pad(images, ((0, 0), (most, most), (most, most)))
    rows = np.arange(height)[None, :, None] + most - down
    columns = np.arange(width)[None, None, :] + most - right
    return padded[np.arange(num_images)[:, None, None], rows, columns]


def read_official(
    directory: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images and labels, test images and labels, uint8, from the idx files.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is not the official one.
    """
    return tuple(
        _read_idx(pathlib.Path(directory), name, sha256, shape)
        for name, (sha256, shape) in _OFFICIAL.items()
    )


def _read_idx(directory, name, sha256, shape):
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            break
    else:
        raise FileNotFoundError(
            f"MNIST needs the file `{name}` or `{name}.gz` in `{directory}`, which has "
            "neither. Put the four official files there, or leave `data.dir` out to "
            "train on the part of MNIST that ships with the project."
        )
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(
                f"`{path}` cannot be unpacked ({error}): it is damaged. Fetch it again."
            ) from error
    _check_sha256(path, content, sha256)
    return np.frombuffer(content, np.uint8)[-int(np.prod(shape)) :].reshape(shape)


def _read_small():
    try:
        content = _SMALL.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"the digits that ship with the project are missing: `{_SMALL}`. Restore "
            "the file, or name a directory of the official ones as `data.dir`."
        ) from None
    _check_sha256(_SMALL, content, _SMALL_SHA256)
    with np.load(io.BytesIO(content)) as arrays:
        names = ("train_images", "train_labels", "test_images", "test_labels")
        return tuple(arrays[name] for name in names)


def _check_sha256(path, content, expected):
    got = hashlib.sha256(content).hexdigest()
    if got != expected:
        raise ValueError(
            f"`{path}` is not the file that it should be: the sha256 of its "
            f"{len(content):,} bytes begins with {got[:12]}, not {expected[:12]}. "
            "Fetch it again."
        )
