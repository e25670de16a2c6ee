from __future__ import annotations

import gzip
import pickle

import image_files
import pytest
import torch
from each import of_each

from pytest_gpucluster.benchmarks.vision.datasets import StoredImages, SyntheticImages, open_images
from pytest_gpucluster.errors import EnvironmentBroken

pytest.importorskip("PIL")
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def test_synthetic_images_follow_from_the_seed_and_come_again():
    images = SyntheticImages(1000, 32)
    assert (len(images), images.shape, images.classes) == (1000, (32, 32, 3), 10)
    first, label = images[3]
    assert len(pickle.dumps(images)) < 1000
    again, same = pickle.loads(pickle.dumps(images))[3 + SyntheticImages.MADE]
    assert torch.equal(first, again)
    assert (label, same) == (3, 3)
    assert (first.shape, first.dtype) == ((32, 32, 3), torch.uint8)
    assert not torch.equal(first, SyntheticImages(1000, 32, seed=1)[3][0])


READ = []


def read():
    READ.append(1)
    return torch.arange(2 * 30 * 40 * 3).view(2, 30, 40, 3).to(torch.uint8), torch.tensor([7, 3])


def test_a_copy_of_stored_images_reads_for_itself_and_takes_no_image_along():
    READ.clear()
    images = StoredImages("some", read)
    assert (len(images), images.shape, images.classes, len(READ)) == (2, (30, 40, 3), 8, 1)
    sent = pickle.dumps(images)
    assert len(sent) < 1000
    copy = pickle.loads(sent)
    assert (len(copy), len(READ)) == (2, 1)
    image, label = copy[1]
    assert (label, len(READ)) == (3, 2)
    assert torch.equal(image, images[1][0])


def test_a_broken_file_is_an_error_that_names_it(tmp_path):
    cases = [
        (IMAGES, lambda content: content[:-5], "has 18827 bytes, and its header states 24 x 28 x 28, which is"),
        (LABELS, lambda content: content[:-5], "has 27 bytes, and its header states 24, which is 32: it is"),
        (LABELS, lambda content: content + b"x", "which is 32: it is too"),
        (IMAGES, lambda content: b"\0\0\x0d\x03" + content[4:], "begins with 00000d03, not with 00000803"),
        (LABELS, lambda content: b"", "with 1 dimension: it begins with nothing, not with 00000801"),
        (LABELS, lambda _: image_files.idx(torch.zeros(23, dtype=torch.uint8)), "has 23 labels, and "),
    ]
    folder = image_files.write_idx(tmp_path / "data")
    for name, spoil, text in cases:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(spoil(whole))
        with pytest.raises(EnvironmentBroken) as caught:
            open_images(folder, side=224)
        assert str(caught.value).startswith(f"{folder / name}: ")
        assert text in str(caught.value)
        (folder / name).write_bytes(whole)


def test_missing_files_are_an_error(tmp_path):
    (image_files.write_idx(tmp_path / "idx", suffix=".gz") / f"{LABELS}.gz").unlink()
    with pytest.raises(EnvironmentBroken, match=rf"neither {LABELS} nor {LABELS}\.gz"):
        open_images(tmp_path / "idx", side=224)


@pytest.mark.parametrize("place", ["", "raw", "FashionMNIST/raw"], ids=["here", "raw", "torchvision"])
@pytest.mark.parametrize("suffix", ["", ".gz"], ids=["raw", "gzip"])
def test_images_and_labels_of_idx_files_are_read(tmp_path, place, suffix):
    image_files.write_idx(tmp_path / place, suffix=suffix)
    images = open_images(tmp_path, side=224)
    assert (images.name, len(images), images.shape, images.classes) == ("idx", 24, (28, 28, 1), 10)
    image, label = images[13]
    assert label == 3
    assert torch.equal(image, torch.full((28, 28, 1), 13, dtype=torch.uint8))


@of_each(
    "spoil",
    [
        lambda content: content[:-20],
        lambda content: content[:-6] + bytes([content[-6] ^ 255]) + content[-5:],
        gzip.decompress,
    ],
)
def test_a_broken_gzip_is_an_error_that_names_it(tmp_path, spoil):
    path = image_files.write_idx(tmp_path, suffix=".gz") / f"{IMAGES}.gz"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(EnvironmentBroken, match=rf"^{path}: cannot be read: "):
        open_images(tmp_path, side=224)


def test_what_is_no_folder_with_known_data_is_an_error(tmp_path):
    with pytest.raises(EnvironmentBroken, match=r"/none.*--gpucluster-data images=FOLDER"):
        open_images(tmp_path / "none", side=32)
    with pytest.raises(EnvironmentBroken, match=rf"{tmp_path}: .*known data.* nothing\. .*IDX"):
        open_images(tmp_path, side=32)
    for name in ("test_batch.bin", "cifar-10-binary.tar.gz"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(EnvironmentBroken, match=r"known data.* cifar-10-binary\.tar\.gz, test_batch\.bin\. .*IDX"):
        open_images(tmp_path, side=32)
    with pytest.raises(EnvironmentBroken, match=r"test_batch\.bin.*file, and"):
        open_images(tmp_path / "test_batch.bin", side=32)


@pytest.mark.parametrize("place", ["", "train"], ids=["here", "train"])
def test_each_folder_is_a_class_and_images_become_squares(tmp_path, place):
    image_files.write_image_folder(tmp_path / place, classes=3, images=6)
    (tmp_path / place / "n0001" / ".DS_Store").write_bytes(b"no image, and hidden")
    images = pickle.loads(pickle.dumps(open_images(tmp_path, side=32)))
    assert (images.name, len(images), images.shape, images.classes) == ("folder", 18, (32, 32, 3), 3)
    assert [images[row][1] for row in range(18)] == [0] * 6 + [1] * 6 + [2] * 6
    image, _ = images[6 + 3]  # n0001/3.png: without loss
    assert (image.shape, image[5, 5].tolist()) == ((32, 32, 3), [80, 120, 200])


def test_the_middle_of_an_image_is_taken_and_other_kinds_become_red_green_and_blue(tmp_path):
    from PIL import Image

    image_files.write_image_folder(tmp_path, classes=2, images=1)
    wide = Image.new("RGB", (90, 30), (255, 0, 0))
    wide.paste((0, 255, 0), (30, 0, 60, 30))
    wide.save(tmp_path / "n0000" / "a.png")
    for mode in ("L", "RGBA", "P", "1"):
        Image.new(mode, (40, 40)).save(tmp_path / "n0001" / f"{mode}.png")
    images = open_images(tmp_path, side=30)
    assert {images[row][0].shape for row in range(7)} == {(30, 30, 3)}
    image, _ = next(images[row] for row in range(7) if images._files[row][0].endswith("a.png"))
    assert image.view(-1, 3).unique(dim=0).tolist() == [[0, 255, 0]]


@of_each("spoil", [lambda whole: whole[: len(whole) // 2], lambda whole: b"<html>not found</html>", lambda whole: b""])
def test_an_image_that_cannot_be_decoded_or_is_gone_is_an_error_that_names_it(tmp_path, spoil):
    for name in ("0.JPEG", "1.png"):
        image_files.write_image_folder(tmp_path)
        path = tmp_path / "n0002" / name
        path.write_bytes(spoil(path.read_bytes()))
        images = open_images(tmp_path, side=32)
        with pytest.raises(EnvironmentBroken, match=rf"^{path}: cannot be decoded: "):
            [images[row] for row in range(len(images))]
    (tmp_path / "n0000" / "0.JPEG").unlink()
    with pytest.raises(EnvironmentBroken, match=r"n0000/0\.JPEG: cannot be decoded: FileNotFoundError"):
        images[0]


def test_what_is_no_image_by_its_name_an_empty_class_and_a_single_class_are_errors(tmp_path):
    image_files.write_image_folder(tmp_path, classes=1)
    with pytest.raises(EnvironmentBroken, match=r"has 1 folders"):
        open_images(tmp_path, side=32)
    image_files.write_image_folder(tmp_path)
    (tmp_path / "n0009").mkdir()
    with pytest.raises(EnvironmentBroken, match=r"n0009: this class"):
        open_images(tmp_path, side=32)
    (tmp_path / "n0009" / "readme.txt").write_text("?")
    with pytest.raises(EnvironmentBroken, match=r"n0009/readme\..*is none.* \.jpg, \.jpeg, \.png"):
        open_images(tmp_path, side=32)
