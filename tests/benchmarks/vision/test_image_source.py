from __future__ import annotations

import image_files
import pytest

from pytest_gpucluster.benchmarks.vision.datasets import open_images
from pytest_gpucluster.errors import EnvironmentBroken


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


def test_the_binary_version_of_cifar_comes_before_the_pickled_one(tmp_path):
    image_files.write_cifar(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(b"no pickle")
    assert open_images(tmp_path, side=32).name == "cifar-10"
