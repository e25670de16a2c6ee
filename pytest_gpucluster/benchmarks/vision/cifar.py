"""CIFAR-10: the binary version, and the Python version without running what is in it.

Source of both formats: "The CIFAR-10 dataset", https://www.cs.toronto.edu/~kriz/cifar.html: in the binary version, rows
of one byte for the label and 3072 for the image; in the Python version a pickled dictionary with b"data", an array of
rows of 3072 bytes, and b"labels". An image is 1024 bytes of red, then of green, then of blue, row by row.
"""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from pytest_gpucluster.benchmarks.vision.images import Block, StoredImages
from pytest_gpucluster.errors import EnvironmentBroken

CLASSES = 10
FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
_SIDE, _COLOURS = 32, 3
_IMAGE_BYTES = _COLOURS * _SIDE * _SIDE
INSTEAD = "Take the binary version (cifar-10-binary.tar.gz) instead, or copy it again"


def find_cifar(folder: Path) -> list[Path] | None:
    """Return the five files of a folder, those of the binary version if both are there; None if there are none.

    Raises: EnvironmentBroken if only some are there.
    """
    for suffix in (".bin", ""):
        paths = [folder / f"{name}{suffix}" for name in FILES]
        missing = [path for path in paths if not path.is_file()]
        if not missing:
            return paths
        if len(missing) < len(paths):
            raise EnvironmentBroken(f"{missing[0]}: is not there, and CIFAR-10 has {', '.join(FILES)}")
    return None


def open_cifar(paths: list[Path]) -> StoredImages:
    """Open the files of CIFAR-10.

    Raises: EnvironmentBroken, with the file, if one cannot be read or is not what it must be.
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
            f"{path}: has {len(labels)} labels, {array.shape[0]} rows and {size} bytes, and they do not go together"
        )
    if not all(type(label) is int for label in labels):
        raise EnvironmentBroken(f"{path}: has labels that are no whole numbers. {INSTEAD}")
    return torch.frombuffer(bytearray(array.content), dtype=torch.uint8).view(-1, _IMAGE_BYTES), labels


class _Dtype:
    """Stands for numpy.dtype: only its name is kept."""

    def __init__(self, name: bytes | str, *_more: object) -> None:
        self.name = name.decode("ascii") if isinstance(name, bytes) else str(name)

    def __setstate__(self, _state: object) -> None:
        pass  # byte order and alignment, which bytes have not


class _Array:
    """Stands for numpy.ndarray: what its pickle says of it, without numpy."""

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
    """Reads plain values and numpy's arrays. Nothing else can be named in the file, so nothing of it is run."""

    KNOWN: ClassVar[dict[tuple[str, str], object]] = {
        ("numpy", "dtype"): _Dtype,
        ("numpy", "ndarray"): _Array,
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name of numpy.

        Raises: EnvironmentBroken for any other name.
        """
        if (module, name) not in self.KNOWN:
            raise EnvironmentBroken(f"its pickle wants to run {module}.{name}, and only numpy's arrays may be in it")
        return self.KNOWN[module, name]

    def persistent_load(self, _pid: object) -> Any:
        """Refuse. Raises: EnvironmentBroken."""
        raise EnvironmentBroken("its pickle refers to something outside of it")
