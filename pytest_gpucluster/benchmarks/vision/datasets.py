"""Data sets of images with labels: FashionMNIST and MNIST, a folder of images, and synthetic ones.

:func:`open_images` recognises the kind of data under a path. IDX files may be compressed by gzip; a folder of
images is laid out as ImageNet is: one folder for each class, with JPEG or PNG files in it. :class:`ImageBatches` reads
a rank's share by worker processes.

Source of IDX: "THE IDX FILE FORMAT", https://yann.lecun.com/exdb/mnist/: big-endian, a magic number that gives the type
(08: unsigned byte) and the number of dimensions, the dimensions, the data.
"""

from __future__ import annotations

import gzip
import itertools
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import DistributedSampler

from pytest_gpucluster.benchmarks.training.loader import Batches, in_batches
from pytest_gpucluster.errors import EnvironmentBroken

Sample = tuple[torch.Tensor, int]
"""An image, uint8, height x width x colours, and its label."""


class Images(Protocol):
    """Labelled images of one size. Each worker of a loader gets a copy of its own, by pickle.

    Attributes:
        name: of the data, a label of the measurements.
        classes: labels are 0 to ``classes`` - 1.
        shape: height, width and colours of each image.
    """

    name: str
    classes: int
    shape: tuple[int, int, int]

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Sample:
        """Return one image.

        Raises: EnvironmentBroken if it cannot be read.
        """


class SyntheticImages:
    """Images of noise, each with the tint of its class, so that their classes can be learned.

    A few are made from a seed at the first access, and repeated: the measurement is of the loader's transfer, not of
    how images are made.
    """

    name, classes, MADE = "synthetic", 10, 60

    def __init__(self, rows: int, side: int, seed: int = 0) -> None:
        self._rows, self._seed, self.shape = rows, seed, (side, side, 3)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Sample:
        row %= self.MADE
        return self._made[row], row % self.classes

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_made"}

    @cached_property
    def _made(self) -> torch.Tensor:
        draws = torch.Generator().manual_seed(self._seed)
        noise = torch.randint(0, 128, (self.MADE, *self.shape), dtype=torch.uint8, generator=draws)
        tints = torch.randint(0, 128, (self.classes, 3), dtype=torch.uint8, generator=draws)
        return noise + tints[torch.arange(self.MADE) % self.classes][:, None, None]


Stored = tuple[torch.Tensor, torch.Tensor]
"""Images, uint8, rows x height x width x colours, and labels, int64."""


class StoredImages:
    """A data set that is read as a whole.

    Args:
        name: of the data.
        read: reads it. Each worker reads for itself: a pickled tensor would be sent through shared memory.

    Raises: as ``read`` does.
    """

    def __init__(self, name: str, read: Callable[[], Stored]) -> None:
        self.name, self._read = name, read
        images, labels = read()
        self._stored: Stored | None = images, labels
        _, height, width, colours = images.shape
        self.shape = (height, width, colours)
        self.classes, self._rows = int(labels.max()) + 1, len(labels)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Sample:
        if self._stored is None:
            self._stored = self._read()
        images, labels = self._stored
        return images[row], int(labels[row])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stored": None}


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
_UNSIGNED_BYTES = 0x08


def find_idx(folder: Path) -> StoredImages | None:
    """Open the IDX files of images and labels in a folder; None if it has no images of this format.

    Raises: EnvironmentBroken, with the file, if there are images and no labels, or if one cannot be read, is no such
        file, or has not the length that its header states.
    """
    images, labels = (
        next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
        for name in (IMAGES, LABELS)
    )
    if images is None:
        return None
    if labels is None:
        raise EnvironmentBroken(f"{images}: neither {LABELS} nor {LABELS}.gz is next to it")
    return StoredImages("idx", partial(_read_both, images, labels))


def _read_both(images: Path, labels: Path) -> Stored:
    values, numbers = _read_idx(images, dimensions=3), _read_idx(labels, dimensions=1)
    if len(numbers) != len(values) or not len(numbers):
        raise EnvironmentBroken(f"{labels}: has {len(numbers)} labels, and {images} has {len(values)} images")
    return values.unsqueeze(3), numbers.long()


def _read_bytes(path: Path) -> bytearray:
    try:
        data = path.read_bytes()
        return bytearray(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError, zlib.error) as error:
        raise EnvironmentBroken(f"{path}: cannot be read: {error or 'it ends too early'}") from error


def _read_idx(path: Path, *, dimensions: int) -> torch.Tensor:
    header, data = 4 + 4 * dimensions, _read_bytes(path)
    magic = _UNSIGNED_BYTES << 8 | dimensions
    if len(data) < header or struct.unpack(">I", data[:4])[0] != magic:
        raise EnvironmentBroken(
            f"{path}: is no IDX file of unsigned bytes with {dimensions} dimension{'s' * (dimensions > 1)}: it begins "
            f"with {data[:4].hex() or 'nothing'}, not with {magic:08x}"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    due = header + math.prod(shape)
    if len(data) != due:
        raise EnvironmentBroken(
            f"{path}: has {len(data)} bytes, and its header states {' x '.join(map(str, shape))}, which is {due}: it is"
            f" {'cut off' if len(data) < due else 'too long'}. Copy it again"
        )
    return torch.frombuffer(data, dtype=torch.uint8)[header:].view(shape)


SUFFIXES = (".jpg", ".jpeg", ".png")


class ImageFolder:
    """Images that are read and decoded one by one, on access.

    Each is scaled and cropped at its centre to a square. No image is rotated or cropped at random: the measurement is
    the same from run to run.

    Args:
        folder: whose folders are the classes, numbered in the order of their names.
        side: of the squares, in pixels.

    Raises: EnvironmentBroken, with the file or folder, if a class is empty, a file is no image by its name, or there
        are fewer than two classes: of one alone the loss is 0.
    """

    name = "folder"

    def __init__(self, folder: Path, *, side: int) -> None:
        self.shape = (side, side, 3)
        self._folder = folder
        # Names only: the list goes to each worker, and ImageNet's is 1.28 million long.
        self._files: list[tuple[str, int]] = []
        classes = classes_in(folder)
        for label, name in enumerate(classes):
            files = sorted(_visible(folder / name))
            for file in files:
                if not file.lower().endswith(SUFFIXES):
                    raise EnvironmentBroken(f"{folder / name / file}: is none of {', '.join(SUFFIXES)}")
            if not files:
                raise EnvironmentBroken(f"{folder / name}: this class has no images")
            self._files += [(f"{name}/{file}", label) for file in files]
        self.classes = len(classes)
        if self.classes < 2:
            raise EnvironmentBroken(f"{folder}: has {self.classes} folders of images, and at least 2 are needed")

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, row: int) -> Sample:
        from PIL import Image, ImageOps  # an extra

        name, label = self._files[row]
        height, width, colours = self.shape
        try:
            with Image.open(self._folder / name) as file:
                image = ImageOps.fit(file.convert("RGB"), (width, height))
        except Exception as error:  # a broken image raises nearly anything: OSError, SyntaxError, ValueError ...
            raise EnvironmentBroken(
                f"{self._folder / name}: cannot be decoded: {type(error).__name__}: {error}"
            ) from error
        values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return values.view(height, width, colours), label


def classes_in(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted."""
    return sorted(name for name in _visible(folder) if (folder / name).is_dir())


def _visible(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError as error:
        raise EnvironmentBroken(f"{folder}: cannot be read: {error}") from error


PLACES = ("", "raw", "FashionMNIST/raw")
"""Where the files of a data set may lie, below the given path: as in its archive or as torchvision stores them."""

ALLOWED = (
    "the IDX files of FashionMNIST or MNIST (train-images-idx3-ubyte, train-labels-idx1-ubyte, also as .gz), or one "
    f"folder for each class with {', '.join(SUFFIXES)} files in it (also below train/)"
)


def open_images(path: Path, *, side: int) -> Images:
    """Open the training images under a path. Not collective; reads files only.

    Args:
        path: a folder.
        side: of the squares to which files of an image each are scaled. Data sets of one size keep theirs.

    Raises: EnvironmentBroken, with the file, if there is no data, or it is unknown or broken.
    """
    if not path.is_dir():
        what = "is a file, and must be a folder" if path.exists() else "does not exist"
        raise EnvironmentBroken(f"{path}: {what}. Give the folder: --gpucluster-data images=FOLDER")
    for place in PLACES:
        found = find_idx(path / place)
        if found is not None:
            return found
    train = path / "train"
    folder = train if train.is_dir() else path
    if not classes_in(folder):
        names = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
        raise EnvironmentBroken(f"{path}: holds no known data, but {names}. Allowed are {ALLOWED}")
    return ImageFolder(folder, side=side)


class ImageBatches(Batches):
    """Batches of one rank's images and labels: uint8, batch x height x width x colours, and int64, batch.

    They have no end; an epoch's rest goes into the first batch of the next one, which is in another order. So the rate
    does not depend on the size of the data set.

    Args:
        images: to read.
        batch: images of a batch.
        rank, world_size: select the share of the images.
        workers, prefetch, pinned: as of ``Batches``.
    """

    def __init__(
        self,
        images: Images,
        *,
        batch: int,
        workers: int,
        prefetch: int,
        rank: int,
        world_size: int,
        pinned: bool,
    ) -> None:
        sampler = DistributedSampler(images, num_replicas=world_size, rank=rank, seed=0)  # type: ignore[var-annotated,arg-type]  # images are no Dataset to mypy

        def rows() -> Iterator[int]:
            for epoch in itertools.count():
                sampler.set_epoch(epoch)
                yield from sampler

        super().__init__(images, in_batches(rows(), batch), workers=workers, prefetch=prefetch, pinned=pinned)
