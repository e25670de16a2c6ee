from __future__ import annotations

import gzip

import image_files
import pytest
import torch
from each import of_each

from pytest_gpucluster.benchmarks.vision.datasets import open_images
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


@of_each(
    "broken",
    [
        (IMAGES, lambda content: content[:-5], "has 18827 bytes, and its header states 24 x 28 x 28, which is 18832"),
        (LABELS, lambda content: content[:-5], "has 27 bytes, and its header states 24, which is 32: it is cut"),
        (LABELS, lambda content: content + b"x", "which is 32: it is too"),
        (IMAGES, lambda content: b"\0\0\x0d\x03" + content[4:], "begins with 00000d03, not with 00000803"),
        (LABELS, lambda content: b"", "with 1 dimension: it begins with nothing, not with 00000801"),
        (LABELS, lambda content: image_files.idx(torch.zeros(23, dtype=torch.uint8)), "has 23 labels, and "),
    ],
)
def test_a_broken_file_is_an_error_that_names_it(tmp_path, broken):
    name, spoil, values = broken
    path = image_files.write_idx(tmp_path) / name
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(EnvironmentBroken) as caught:
        open_images(tmp_path, side=224)
    assert str(caught.value).startswith(f"{path}: ")
    assert values in str(caught.value)


@of_each(
    "spoil",
    [
        lambda content: content[:-20],
        lambda content: content[:-6] + bytes([content[-6] ^ 255]) + content[-5:],
        gzip.decompress,
    ],
)
def test_a_broken_gzip_and_missing_labels_are_an_error_that_names_them(tmp_path, spoil):
    image_files.write_idx(tmp_path, suffix=".gz")
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(EnvironmentBroken, match=rf"^{path}: cannot be read: "):
        open_images(tmp_path, side=224)
    image_files.write_idx(tmp_path, suffix=".gz")
    (tmp_path / f"{LABELS}.gz").unlink()
    with pytest.raises(EnvironmentBroken, match=rf"neither {LABELS} nor {LABELS}\.gz"):
        open_images(tmp_path, side=224)
