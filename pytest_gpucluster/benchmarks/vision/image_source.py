"""Which kind of data lies under a path: IDX files, CIFAR-10, or a folder of images."""

from __future__ import annotations

from pathlib import Path

from pytest_gpucluster.benchmarks.vision.cifar import find_cifar, open_cifar
from pytest_gpucluster.benchmarks.vision.idx import find_idx, open_idx
from pytest_gpucluster.benchmarks.vision.image_folder import SUFFIXES, ImageFolder, classes_in
from pytest_gpucluster.benchmarks.vision.images import Images
from pytest_gpucluster.errors import EnvironmentBroken

PLACES = ("", "raw", "FashionMNIST/raw", "cifar-10-batches-bin", "cifar-10-batches-py")
"""Where the files of a data set may lie, below the path that was given: as its archive and as torchvision lay them."""

ALLOWED = (
    "the IDX files of FashionMNIST or MNIST (train-images-idx3-ubyte, train-labels-idx1-ubyte, also as .gz), the five "
    "files of CIFAR-10 (data_batch_1.bin ..., or data_batch_1 ... of the Python version), or one folder for each class "
    f"with {', '.join(SUFFIXES)} files in it (also below train/)"
)


def open_images(path: Path, *, side: int) -> Images:
    """Open the training images under a path. Not collective, and nothing but files is touched.

    Args:
        path: a folder.
        side: of the squares to which files of an image each are scaled. Data sets of one size keep theirs.

    Raises: EnvironmentBroken, with the file, if there is nothing, nothing known, or something broken.
    """
    if not path.is_dir():
        what = "is a file, and must be a folder" if path.exists() else "is not there"
        raise EnvironmentBroken(f"{path}: {what}. Name the folder: --gpucluster-data images=FOLDER")
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
