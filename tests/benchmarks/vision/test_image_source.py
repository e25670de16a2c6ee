from __future__ import annotations

import image_files
import pytest

from pytest_gpucluster.benchmarks.vision.image_source import open_images
from pytest_gpucluster.errors import EnvironmentBroken


def test_a_path_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(
        EnvironmentBroken, match=r"/none: is not there\. Name the folder: --gpucluster-data images=FOLDER"
    ):
        open_images(tmp_path / "none", side=32)


def test_a_file_is_an_error(tmp_path):
    (tmp_path / "data.tar.gz").write_bytes(b"")
    with pytest.raises(EnvironmentBroken, match=r"data\.tar\.gz: is a file, and must be a folder"):
        open_images(tmp_path / "data.tar.gz", side=32)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ((), "nothing"),
        (("test_batch.bin", "cifar-10-binary.tar.gz"), "cifar-10-binary.tar.gz, test_batch.bin"),
    ],
    ids=["empty", "an archive"],
)
def test_a_folder_without_known_data_is_an_error_that_says_what_is_allowed(tmp_path, names, found):
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(EnvironmentBroken) as caught:
        open_images(tmp_path, side=32)
    assert str(caught.value).startswith(f"{tmp_path}: holds no known data, but {found}. Allowed are the IDX files of ")


def test_the_binary_version_of_cifar_comes_before_the_pickled_one(tmp_path):
    image_files.write_cifar(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(b"no pickle")
    assert open_images(tmp_path, side=32).name == "cifar-10"
