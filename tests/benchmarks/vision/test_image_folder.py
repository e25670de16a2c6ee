from __future__ import annotations

import pickle

import image_files
import pytest
from each import of_each

from pytest_gpucluster.benchmarks.vision.datasets import open_images
from pytest_gpucluster.errors import EnvironmentBroken

pytest.importorskip("PIL")


@pytest.mark.parametrize("place", ["", "train"], ids=["here", "train"])
def test_each_folder_is_a_class_and_images_become_squares(tmp_path, place):
    image_files.write_image_folder(tmp_path / place, classes=3, images=6)
    (tmp_path / place / "n0001" / ".DS_Store").write_bytes(b"no image, and hidden")
    images = pickle.loads(pickle.dumps(open_images(tmp_path, side=32)))
    assert (images.name, len(images), images.shape, images.classes) == ("folder", 18, (32, 32, 3), 3)
    assert [images[row][1] for row in range(18)] == [0] * 6 + [1] * 6 + [2] * 6
    image, _ = images[6 + 3]  # n0001/3.png: without loss
    assert (image.shape, image[5, 5].tolist()) == ((32, 32, 3), [80, 120, 200])


def test_the_middle_of_an_image_is_taken(tmp_path):
    from PIL import Image

    image_files.write_image_folder(tmp_path, classes=2, images=1)
    wide = Image.new("RGB", (90, 30), (255, 0, 0))
    wide.paste((0, 255, 0), (30, 0, 60, 30))
    wide.save(tmp_path / "n0000" / "a.png")
    images = open_images(tmp_path, side=30)
    image, _ = next(images[row] for row in range(3) if images._files[row][0].endswith("a.png"))
    assert image.view(-1, 3).unique(dim=0).tolist() == [[0, 255, 0]]


@of_each("mode", ["L", "RGBA", "P", "1"])
def test_images_of_other_kinds_become_red_green_and_blue(tmp_path, mode):
    from PIL import Image

    image_files.write_image_folder(tmp_path, classes=2, images=1)
    Image.new(mode, (40, 40)).save(tmp_path / "n0000" / "a.png")
    images = open_images(tmp_path, side=28)
    assert {images[row][0].shape for row in range(3)} == {(28, 28, 3)}


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
    with pytest.raises(EnvironmentBroken, match=r"has 1 folders of.* 2 classes"):
        open_images(tmp_path, side=32)
    image_files.write_image_folder(tmp_path)
    (tmp_path / "n0009").mkdir()
    with pytest.raises(EnvironmentBroken, match=r"n0009: this class"):
        open_images(tmp_path, side=32)
    (tmp_path / "n0009" / "readme.txt").write_text("?")
    with pytest.raises(EnvironmentBroken, match=r"n0009/readme\..*is none.* \.jpg, \.jpeg, \.png"):
        open_images(tmp_path, side=32)
