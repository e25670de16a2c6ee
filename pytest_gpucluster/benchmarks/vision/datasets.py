"""Data sets of images with labels: FashionMNIST and MNIST, CIFAR-10, a folder of images, and synthetic ones.

:func:`open_images` recognises the kind of data under a path. IDX files may be compressed by gzip; the Python version of
CIFAR-10 is read without running what its pickle holds; a folder of images is laid out as ImageNet is: one folder for
each class, with JPEG or PNG files in it.

Source of IDX: "THE IDX FILE FORMAT", https://yann.lecun.com/exdb/mnist/: big-endian, a magic number that gives the type
(08: unsigned byte) and the number of dimensions, the dimensions, the data.

Source of both CIFAR-10 formats: "The CIFAR-10 dataset", https://www.cs.toronto.edu/~kriz/cifar.html: in the binary
version, rows of one byte for the label and 3072 for the image; in the Python version a pickled dictionary with b"data",
an array of rows of 3072 bytes, and b"labels". An image is 1024 bytes of red, then of green, then of blue, row by row.
"""

from __future__ import annotations

import gzip
import math
import os
import pickle
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

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

    @property
    def name(self) -> str: ...

    @property
    def classes(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int, int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Sample:
        """Return one image.

        Raises: EnvironmentBroken if it cannot be read.
        """


@dataclass(frozen=True)
class SyntheticImages:
    """Images of noise, each with the tint of its class, so that their classes can be learned.

    A few are made from a seed at the first access, and repeated: the measurement is of the loader's transfer, not of
    how images are made.
    """

    rows: int
    side: int
    seed: int = 0
    name: str = field(default="synthetic", init=False)
    classes: int = field(default=10, init=False)

    MADE = 60

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and colours."""
        return (self.side, self.side, 3)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Sample:
        row %= self.MADE
        return self._made[row], row % self.classes

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_made"}

    @cached_property
    def _made(self) -> torch.Tensor:
        draws = torch.Generator().manual_seed(self.seed)
        noise = torch.randint(0, 128, (self.MADE, *self.shape), dtype=torch.uint8, generator=draws)
        tints = torch.randint(0, 128, (self.classes, 3), dtype=torch.uint8, generator=draws)
        return noise + tints[torch.arange(self.MADE) % self.classes][:, None, None]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Images of one size in one tensor.

    Attributes:
        images: uint8, rows x height x width x colours.
        labels: one for each row.
    """

    images: torch.Tensor
    labels: list[int]


class StoredImages:
    """A data set that is read as a whole.

    Args:
        name: of the data.
        classes: number of classes.
        read: reads it. Each worker reads for itself: a pickled tensor would be sent through shared memory.

    Raises: as ``read`` does.
    """

    def __init__(self, name: str, classes: int, read: Callable[[], Block]) -> None:
        self.name, self.classes, self._read = name, classes, read
        self._block: Block | None = read()
        _, height, width, colours = self._block.images.shape
        self.shape = (height, width, colours)
        self._rows = len(self._block.labels)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Sample:
        if self._block is None:
            self._block = self._read()
        return self._block.images[row], self._block.labels[row]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_block": None}


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
_UNSIGNED_BYTES = 0x08


def find_idx(folder: Path) -> tuple[Path, Path] | None:
    """Return the files of images and of labels in a folder; None if it has no images of this format.

    Raises: EnvironmentBroken if there are images, and no labels.
    """
    images, labels = _existing(folder, IMAGES), _existing(folder, LABELS)
    if images is None:
        return None
    if labels is None:
        raise EnvironmentBroken(f"{images}: neither {LABELS} nor {LABELS}.gz is next to it")
    return images, labels


def open_idx(images: Path, labels: Path) -> StoredImages:
    """Open images and their labels.

    Raises: EnvironmentBroken, with the file, if one cannot be read, is no such file, or has not the length that its
        header states.
    """
    found = StoredImages("idx", 0, partial(read_idx, images, labels))
    found.classes = max(found[row][1] for row in range(len(found))) + 1
    return found


def read_idx(images: Path, labels: Path) -> Block:
    """Read both files, the images mapped into memory where they are not compressed. Raises: as :func:`open_idx`."""
    values = _read(images, dimensions=3)
    numbers: list[int] = _read(labels, dimensions=1).tolist()
    if len(numbers) != len(values) or not numbers:
        raise EnvironmentBroken(f"{labels}: has {len(numbers)} labels, and {images} has {len(values)} images")
    return Block(images=values.unsqueeze(3), labels=numbers)


def _existing(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read(path: Path, *, dimensions: int) -> torch.Tensor:
    header = 4 + 4 * dimensions
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = bytearray(file.read())
            start = bytes(data[:header])
            size = len(data)
        else:
            with path.open("rb") as file:
                start = file.read(header)
            size = path.stat().st_size
    except (OSError, EOFError, zlib.error) as error:
        raise EnvironmentBroken(f"{path}: cannot be read: {error or 'it ends too early'}") from error
    magic = _UNSIGNED_BYTES << 8 | dimensions
    if len(start) < header or struct.unpack(">I", start[:4])[0] != magic:
        raise EnvironmentBroken(
            f"{path}: is no IDX file of unsigned bytes with {dimensions} dimension{'s' * (dimensions > 1)}: it begins "
            f"with {start[:4].hex() or 'nothing'}, not with {magic:08x}"
        )
    shape = struct.unpack(f">{dimensions}I", start[4:])
    due = header + math.prod(shape)
    if size != due:
        raise EnvironmentBroken(
            f"{path}: has {size} bytes, and its header states {' x '.join(map(str, shape))}, which is {due}: it is "
            f"{'cut off' if size < due else 'too long'}. Copy it again"
        )
    if path.suffix == ".gz":
        flat = torch.frombuffer(data, dtype=torch.uint8)
    else:
        # Mapped: the pages are shared by all ranks and workers of the node.
        flat = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return flat[header:].view(shape)


CLASSES = 10
FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
_SIDE, _COLOURS = 32, 3
_IMAGE_BYTES = _COLOURS * _SIDE * _SIDE
INSTEAD = "Take the binary version (cifar-10-binary.tar.gz) instead, or copy it again"


def find_cifar(folder: Path) -> list[Path] | None:
    """Return the five files of a folder, those of the binary version if both exist; None if there are none.

    Raises: EnvironmentBroken if only some exist.
    """
    for suffix in (".bin", ""):
        paths = [folder / f"{name}{suffix}" for name in FILES]
        missing = [path for path in paths if not path.is_file()]
        if not missing:
            return paths
        if len(missing) < len(paths):
            raise EnvironmentBroken(f"{missing[0]}: is missing, and CIFAR-10 has {', '.join(FILES)}")
    return None


def open_cifar(paths: list[Path]) -> StoredImages:
    """Open the files of CIFAR-10.

    Raises: EnvironmentBroken, with the file, if one cannot be read or has another format.
    """
    return StoredImages("cifar-10", CLASSES, partial(read_cifar, paths))


def read_cifar(paths: list[Path]) -> Block:
    """Read the files one after the other. Raises: as :func:`open_cifar`."""
    parts = [_read_binary(path) if path.suffix == ".bin" else _read_pickled(path) for path in paths]
    labels = []
    for path, (_, its) in zip(paths, parts, strict=True):
        wrong = next((row for row, label in enumerate(its) if not 0 <= label < CLASSES), None)
        if wrong is not None:
            raise EnvironmentBroken(
                f"{path}: the label of row {wrong} is {its[wrong]}, and there are {CLASSES} classes"
            )
        labels += its
    flat = torch.cat([images for images, _ in parts])
    return Block(images=flat.view(-1, _COLOURS, _SIDE, _SIDE).permute(0, 2, 3, 1), labels=labels)


def _read_binary(path: Path) -> tuple[torch.Tensor, list[int]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EnvironmentBroken(f"{path}: cannot be read: {error}") from error
    if not data or len(data) % (1 + _IMAGE_BYTES):
        raise EnvironmentBroken(
            f"{path}: has {len(data)} bytes, and rows of CIFAR-10 have {1 + _IMAGE_BYTES} each: it is cut off. Copy it "
            "again"
        )
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 1 + _IMAGE_BYTES)
    return rows[:, 1:], rows[:, 0].tolist()


def _read_pickled(path: Path) -> tuple[torch.Tensor, list[int]]:
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except EnvironmentBroken as error:
        raise EnvironmentBroken(f"{path}: {error}. {INSTEAD}") from None
    except Exception as error:  # a broken pickle raises nearly anything
        raise EnvironmentBroken(f"{path}: cannot be unpickled: {type(error).__name__}: {error}. {INSTEAD}") from error
    if not isinstance(content, dict):
        raise EnvironmentBroken(f"{path}: holds no dictionary. {INSTEAD}")
    array, labels = (content.get(key, content.get(key.decode())) for key in (b"data", b"labels"))
    if not isinstance(array, _Array) or not isinstance(labels, list):
        raise EnvironmentBroken(f'{path}: holds no array b"data" with a list b"labels". {INSTEAD}')
    size = len(array.content)
    if array.dtype not in ("u1", "uint8") or array.by_columns or array.shape[1:] != (_IMAGE_BYTES,):
        raise EnvironmentBroken(f'{path}: b"data" is an array of {array.dtype}, {array.shape}. {INSTEAD}')
    if size != array.shape[0] * _IMAGE_BYTES or len(labels) != array.shape[0] or not labels:
        raise EnvironmentBroken(
            f"{path}: has {len(labels)} labels, {array.shape[0]} rows and {size} bytes, which do not match"
        )
    if not all(type(label) is int for label in labels):
        raise EnvironmentBroken(f"{path}: has labels that are no whole numbers. {INSTEAD}")
    return torch.frombuffer(bytearray(array.content), dtype=torch.uint8).view(-1, _IMAGE_BYTES), labels


class _Dtype:
    """Stands for numpy.dtype: only its name is kept."""

    def __init__(self, name: bytes | str, *_more: object) -> None:
        self.name = name.decode("ascii") if isinstance(name, bytes) else str(name)

    def __setstate__(self, _state: object) -> None:
        pass  # byte order and alignment, which bytes do not have


class _Array:
    """Stands for numpy.ndarray: its pickled state, without numpy."""

    shape: tuple[int, ...] = ()
    dtype = "nothing"
    by_columns = False
    content = b""

    def __setstate__(self, state: Any) -> None:
        # Source: numpy.ndarray.__setstate__: version, shape, dtype, whether in Fortran's order, data.
        _, shape, dtype, by_columns, content = state
        if not (isinstance(dtype, _Dtype) and isinstance(content, bytes) and all(type(n) is int for n in shape)):
            raise EnvironmentBroken("holds an array that is not made of bytes")
        self.shape, self.dtype, self.by_columns, self.content = tuple(shape), dtype.name, bool(by_columns), content


def _reconstruct(kind: object, *_shape_and_type: object) -> _Array:
    if kind is not _Array:
        raise EnvironmentBroken("holds something else than an array")
    return _Array()


class _Unpickler(pickle.Unpickler):
    """Reads plain values and numpy's arrays. Any other name in the file is an error, so none of its code is run."""

    KNOWN: ClassVar[dict[tuple[str, str], object]] = {
        ("numpy", "dtype"): _Dtype,
        ("numpy", "ndarray"): _Array,
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return the substitute for a name of numpy.

        Raises: EnvironmentBroken for any other name.
        """
        if (module, name) not in self.KNOWN:
            raise EnvironmentBroken(f"its pickle refers to {module}.{name}, and only numpy's arrays are allowed in it")
        return self.KNOWN[module, name]

    def persistent_load(self, _pid: object) -> Any:
        """Reject external references. Raises: EnvironmentBroken."""
        raise EnvironmentBroken("its pickle refers to an external object")


SUFFIXES = (".jpg", ".jpeg", ".png")


class ImageFolder:
    """Images that are read and decoded one by one, on access.

    Each is scaled and cropped at its centre to a square. No image is rotated or cropped at random: the measurement is
    the same from run to run.

    Args:
        folder: whose folders are the classes, numbered in the order of their names.
        side: of the squares, in pixels.

    Raises: EnvironmentBroken, with the file or folder, if a class is empty, a file is no image by its name, or there
        are fewer than two classes.
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
            raise EnvironmentBroken(
                f"{folder}: has {self.classes} folders of images, and at least 2 classes are needed"
            )

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


PLACES = ("", "raw", "FashionMNIST/raw", "cifar-10-batches-bin", "cifar-10-batches-py")
"""Where the files of a data set may lie, below the given path: as in its archive or as torchvision stores them."""

ALLOWED = (
    "the IDX files of FashionMNIST or MNIST (train-images-idx3-ubyte, train-labels-idx1-ubyte, also as .gz), the five "
    "files of CIFAR-10 (data_batch_1.bin ..., or data_batch_1 ... of the Python version), or one folder for each class "
    f"with {', '.join(SUFFIXES)} files in it (also below train/)"
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
        folder = path / place
        files = find_idx(folder)
        if files is not None:
            return open_idx(*files)
        parts = find_cifar(folder)
        if parts is not None:
            return open_cifar(parts)
    train = path / "train"
    folder = train if train.is_dir() else path
    if not classes_in(folder):
        found = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
        raise EnvironmentBroken(f"{path}: holds no known data, but {found}. Allowed are {ALLOWED}")
    return ImageFolder(folder, side=side)
