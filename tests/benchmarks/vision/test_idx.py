from __future__ import annotations

import gzip

import image_files
import pytest
import torch

from pytest_gpucluster.benchmarks.vision.image_source import open_images
from pytest_gpucluster.errors import EnvironmentBroken

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize("place", ["", "raw", "FashionMNIST/raw"], ids=["here", "raw", "torchvision"])
@pytest.mark.parametrize("suffix", ["", ".gz"], ids=["raw", "gzip"])
def test_images_and_labels_are_read(tmp_path, place, suffix):
    image_files.write_idx(tmp_path / place, suffix=suffix)
    images = open_images(tmp_path, side=224)
    assert (images.name, len(images), images.shape, images.classes) == ("idx", 24, (28, 28, 1), 10)
    image, label = images[13]
    assert label == 3
    assert torch.equal(image, torch.full((28, 28, 1), 13, dtype=torch.uint8))


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def longer(path):
    path.write_bytes(path.read_bytes() + b"x")


def other_magic(path):
    path.write_bytes(b"\0\0\x0d\x03" + path.read_bytes()[4:])


def empty(path):
    path.write_bytes(b"")


def fewer(path):
    path.write_bytes(image_files.idx(torch.zeros(23, dtype=torch.uint8)))


@pytest.mark.parametrize(
    ("spoil", "name", "told"),
    [
        (cut, IMAGES, "has 18827 bytes, and its header tells of 24 x 28 x 28, which is 18832: it is cut off. Copy it"),
        (cut, LABELS, "has 27 bytes, and its header tells of 24, which is 32: it is cut off"),
        (longer, LABELS, "which is 32: it is too long"),
        (other_magic, IMAGES, "with 3 dimensions: it begins with 00000d03, not with 00000803"),
        (empty, LABELS, "with 1 dimension: it begins with nothing, not with 00000801"),
        (fewer, LABELS, "has 23 labels, and "),
    ],
    ids=["cut images", "cut labels", "long labels", "floats", "empty", "too few labels"],
)
def test_a_broken_file_is_an_error_that_names_it(tmp_path, spoil, name, told):
    image_files.write_idx(tmp_path)
    spoil(tmp_path / name)
    with pytest.raises(EnvironmentBroken) as caught:
        open_images(tmp_path, side=224)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert told in str(caught.value)


def truncated(content):
    return content[:-20]


def flipped(content):
    return content[:-6] + bytes([content[-6] ^ 255]) + content[-5:]


def not_compressed(content):
    return gzip.decompress(content)


@pytest.mark.parametrize("spoil", [truncated, flipped, not_compressed], ids=lambda spoil: spoil.__name__)
def test_a_broken_gzip_is_an_error_that_names_it(tmp_path, spoil):
    image_files.write_idx(tmp_path, suffix=".gz")
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(EnvironmentBroken) as caught:
        open_images(tmp_path, side=224)
    assert str(caught.value).startswith(f"{path}: cannot be read: ")


def test_images_without_labels_are_an_error(tmp_path):
    image_files.write_idx(tmp_path)
    (tmp_path / LABELS).unlink()
    with pytest.raises(EnvironmentBroken, match=rf"beside it there is neither {LABELS} nor {LABELS}\.gz"):
        open_images(tmp_path, side=224)
