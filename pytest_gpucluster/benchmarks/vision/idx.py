"""FashionMNIST, MNIST and their like: IDX files, as they are or compressed by gzip.

Source of the format: "THE IDX FILE FORMAT", https://yann.lecun.com/exdb/mnist/: big-endian, a magic number that tells
the type (08: unsigned byte) and the number of dimensions, the dimensions, the data.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from functools import partial
from pathlib import Path

import torch

from pytest_gpucluster.benchmarks.vision.images import Block, StoredImages
from pytest_gpucluster.errors import EnvironmentBroken

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
_UNSIGNED_BYTES = 0x08


def find_idx(folder: Path) -> tuple[Path, Path] | None:
    """Return the files of images and of labels in a folder; None if there are no images of this format.

    Raises: EnvironmentBroken if there are images, and no labels.
    """
    images, labels = _existing(folder, IMAGES), _existing(folder, LABELS)
    if images is None:
        return None
    if labels is None:
        raise EnvironmentBroken(f"{images}: beside it there is neither {LABELS} nor {LABELS}.gz")
    return images, labels


def open_idx(images: Path, labels: Path) -> StoredImages:
    """Open images and their labels.

    Raises: EnvironmentBroken, with the file, if one cannot be read, is no such file, or is not as long as it says.
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
            f"{path}: has {size} bytes, and its header tells of {' x '.join(map(str, shape))}, which is {due}: it is "
            f"{'cut off' if size < due else 'too long'}. Copy it again"
        )
    if path.suffix == ".gz":
        flat = torch.frombuffer(data, dtype=torch.uint8)
    else:
        # Mapped: the pages are shared by all ranks and workers of the node.
        flat = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return flat[header:].view(shape)
