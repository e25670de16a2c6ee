"""Small data sets on disk, laid out as the real ones are."""

import gzip
import struct

import torch


def idx(values):
    """An IDX file of unsigned bytes."""
    return struct.pack(f">I{values.dim()}I", 0x0800 | values.dim(), *values.shape) + bytes(values.flatten().tolist())


def write_idx(folder, *, rows=24, side=28, suffix=""):
    """FashionMNIST with a few rows: the first pixel of each is its number, and labels go round."""
    folder.mkdir(parents=True, exist_ok=True)
    images = torch.arange(rows, dtype=torch.uint8)[:, None, None].repeat(1, side, side)
    labels = torch.arange(rows, dtype=torch.uint8) % 10
    for name, values in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        content = idx(values)
        (folder / f"{name}{suffix}").write_bytes(gzip.compress(content) if suffix == ".gz" else content)
    return folder


def write_image_folder(folder, *, classes=3, images=6, side=(60, 44)):
    """JPEG and PNG files of one tint for each class."""
    from PIL import Image

    for label in range(classes):
        (folder / f"n{label:04}").mkdir(parents=True, exist_ok=True)
        for number in range(images):
            tint = (80 * label % 256, 40 * number % 256, 200)
            Image.new("RGB", side, tint).save(folder / f"n{label:04}" / f"{number}.{('JPEG', 'png')[number % 2]}")
    return folder
