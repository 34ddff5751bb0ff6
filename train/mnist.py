"""MNIST: handwritten digits, 28 x 28 pixels, in ten classes.

The database of Yann LeCun, Corinna Cortes and Christopher J.C. Burges. A part of it
ships with the project (`mnist_small/README.md`). The whole database is four files in the
idx format; `--config.data.dir` names their directory.
"""

import dataclasses
import gzip
import hashlib
import io
import math
import pathlib
import zlib

import numpy as np

from train.data import Batch, Dataset

_SMALL = pathlib.Path(__file__).parent / "mnist_small" / "digits.npz"
_SMALL_SHA256 = "41be0540081e4ee9c5164de239c5abf2b31772b54d487385cde32fe7a8e7b296"

# Name of each official file, its sha256 when unpacked, and the shape of its array.
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
    """Handwritten digits; the label of an image is its digit."""

    dir: str | None = None
    """Directory of the four official idx files, packed (.gz) or not. None: the 8,572
    training and 2,000 test images that ship with the project."""
    max_shift: int = 0
    """The most pixels by which a training image is moved, in either direction."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_shift < 28:
            raise ValueError(f"`max_shift` must be from 0 to 27 pixels, got {self.max_shift}.")

    def load(self) -> Dataset:
        """Reads the images and compares their files with the official checksums.

        Raises:
          FileNotFoundError: if a file is missing; names it.
          ValueError: if a file is damaged; names it.
        """
        train_images, train_labels, test_images, test_labels = _read(self.dir)
        return Dataset(
            train=Images(train_images, train_labels, self.max_shift),
            test=Images(test_images, test_labels),
            source=_source(self, train_images, test_images),
            unit="images",
        )


@dataclasses.dataclass(frozen=True)
class MNISTPixels(MNIST):
    """Handwritten digits in noise; the label of a pixel is 1 on a digit, 0 beside it."""

    noise: float = 0.5
    """Standard deviation of the noise of each pixel; white is 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"`noise` must be at least 0, got {self.noise}.")

    def load(self) -> Dataset:
        """Loads the data as `MNIST.load` does, with labels `[B, 28, 28]`."""
        train_images, train_labels, test_images, test_labels = _read(self.dir)
        return Dataset(
            train=Pixels(train_images, train_labels, self.max_shift, self.noise),
            test=Pixels(test_images, test_labels, noise=self.noise),
            source=f"pixels of {_source(self, train_images, test_images)}",
            unit="pixels",
        )


class Images:
    """Images with one label each.

    Args:
      images: uint8 `[M, H, W]`. Batches hold float32 `[B, H, W, 1]`.
      labels: integers `[M]`.
      max_shift: the most pixels by which training images are moved.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, max_shift: int = 0):
        self.images, self.labels, self.max_shift = images, labels, max_shift

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: np.ndarray, rng: np.random.Generator | None) -> Batch:
        images, labels = self._shifted(indices, rng)
        white = images.astype(np.float32) / 255
        return {"inputs": _normalised(white), "labels": labels}

    def _shifted(self, indices: np.ndarray, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        """Images uint8 `[B, H, W]`, moved in training, and labels int32 `[B]`."""
        images = self.images[indices]
        if rng is not None and self.max_shift:
            images = _shift(images, self.max_shift, rng)
        return images, self.labels[indices].astype(np.int32)


class Pixels(Images):
    """Noisy images with one label per pixel, `[B, H, W]`; see `MNISTPixels`.

    Noise of training images is drawn anew each time. A held-out image always has the
    same noise, drawn from its number.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        max_shift: int = 0,
        noise: float = 0.0,
    ):
        super().__init__(images, labels, max_shift)
        self.noise = noise

    def batch(self, indices: np.ndarray, rng: np.random.Generator | None) -> Batch:
        images, _ = self._shifted(indices, rng)
        labels = (images >= 128).astype(np.int32)  # before the noise
        if rng is not None:
            noise = rng.standard_normal(images.shape, np.float32)
        else:
            rngs = map(np.random.default_rng, indices)
            shape = images.shape[1:]
            noise = np.stack([rng.standard_normal(shape, np.float32) for rng in rngs])
        white = images.astype(np.float32) / 255 + np.float32(self.noise) * noise
        return {"inputs": _normalised(white), "labels": labels}


def _normalised(white: np.ndarray) -> np.ndarray:
    """Fractions of white `[B, H, W]` as inputs `[B, H, W, 1]` of a model."""
    return ((white - _MEAN) / _STD)[..., None].astype(np.float32)


def _source(options: MNIST, train: np.ndarray, test: np.ndarray) -> str:
    """A description of the images for the head of a run."""
    place = "shipped part" if options.dir is None else options.dir
    return f"MNIST, {len(train):,} training and {len(test):,} test images ({place})"


def _shift(images: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """Moves each image by up to `most` pixels in both directions and fills in black."""
    num_images, height, width = images.shape
    down, right = rng.integers(-most, most + 1, (2, num_images, 1, 1))
    padded = np.pad(images, ((0, 0), (most, most), (most, most)))
    rows = np.arange(height)[None, :, None] + most - down
    columns = np.arange(width)[None, None, :] + most - right
    return padded[np.arange(num_images)[:, None, None], rows, columns]


_Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _read(directory: str | None) -> _Arrays:
    return _read_small() if directory is None else read_official(directory)


def read_official(directory: str) -> _Arrays:
    """Reads the four official idx files.

    Args:
      directory: the directory of the files, packed (.gz) or not.

    Returns:
      Training images and labels, test images and labels, all uint8.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is not the official one.
    """
    train_images, train_labels, test_images, test_labels = (
        _read_idx(pathlib.Path(directory), name, sha256, shape) for name, (sha256, shape) in _OFFICIAL.items()
    )
    return train_images, train_labels, test_images, test_labels


def _read_idx(directory: pathlib.Path, name: str, sha256: str, shape: tuple[int, ...]) -> np.ndarray:
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
            raise ValueError(f"`{path}` cannot be unpacked ({error}): it is damaged. Download it again.") from error
    _check_sha256(path, content, sha256)
    return np.frombuffer(content, np.uint8)[-int(np.prod(shape)) :].reshape(shape)


def _read_small() -> _Arrays:
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


def _check_sha256(path: pathlib.Path, content: bytes, expected: str) -> None:
    got = hashlib.sha256(content).hexdigest()
    if got != expected:
        raise ValueError(
            f"`{path}` is not the official file: the sha256 of its {len(content):,} bytes "
            f"begins with {got[:12]}, not with {expected[:12]}. Download it again."
        )
