"""A folder of images, as ImageNet is laid out: one folder for each class, with JPEG or PNG files in it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from pytest_gpucluster.benchmarks.vision.images import Sample
from pytest_gpucluster.errors import EnvironmentBroken

SUFFIXES = (".jpg", ".jpeg", ".png")


class ImageFolder:
    """Images that are read and decoded one by one, when they are asked for.

    Each is scaled and cut at its centre to a square. No image is turned or cut at random: what is measured is the
    same from run to run.

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
