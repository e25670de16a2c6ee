from __future__ import annotations

import os
import pickle
import struct

import image_files
import pytest
import torch
from each import of_each

from pytest_gpucluster.benchmarks.vision.datasets import open_images
from pytest_gpucluster.errors import EnvironmentBroken

numpy = pytest.importorskip("numpy")


def python_2(labels: list[int], content: bytes) -> bytes:
    """The pickle that Python 2 makes of CIFAR's dictionary: protocol 2, its strings being bytes."""

    def string(text: bytes) -> bytes:
        return pickle.BINSTRING + struct.pack("<i", len(text)) + text

    def number(value: int) -> bytes:
        return pickle.BININT + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + string(b"u1") + number(0) + number(1) + pickle.TUPLE3 + pickle.REDUCE
    state = number(3) + string(b"|") + pickle.NONE * 3 + number(-1) * 2 + number(0)
    dtype += pickle.MARK + state + pickle.TUPLE + pickle.BUILD
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + pickle.TUPLE1 + string(b"b")
    array += pickle.TUPLE3 + pickle.REDUCE
    shape = number(len(labels)) + number(3072) + pickle.TUPLE2
    array += pickle.MARK + number(1) + shape + dtype + pickle.NEWFALSE + string(content) + pickle.TUPLE + pickle.BUILD
    items = string(b"data") + array + string(b"labels") + pickle.EMPTY_LIST
    items += pickle.MARK + b"".join(map(number, labels)) + pickle.APPENDS
    return pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS + pickle.STOP


def numpy_s_own(labels: list[int], content: bytes, protocol: int = 4) -> bytes:
    array = numpy.frombuffer(content, dtype="u1").reshape(-1, 3072)
    return pickle.dumps({b"data": array.copy(), b"labels": labels, b"filenames": [b"a.png"]}, protocol=protocol)


def write_pickled(folder, make, rows=5):
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(5):
        made = image_files.cifar_rows(rows, part * rows)
        content = make([label for label, _ in made], b"".join(image for _, image in made))
        (folder / f"data_batch_{part + 1}").write_bytes(content)
    return folder


@pytest.mark.parametrize("kind", ["binary", "python 2", "numpy"])
def test_images_and_labels_are_read_in_rows_columns_and_colours(tmp_path, kind):
    if kind == "binary":
        image_files.write_cifar(tmp_path / "cifar-10-batches-bin")
    else:
        write_pickled(tmp_path / "cifar-10-batches-py", python_2 if kind == "python 2" else numpy_s_own)
    images = open_images(tmp_path, side=224)
    assert (images.name, len(images), images.shape, images.classes) == ("cifar-10", 25, (32, 32, 3), 10)
    image, label = images[17]
    assert label == 7
    assert torch.equal(image, torch.tensor([17, 100, 200], dtype=torch.uint8).expand(32, 32, 3))


def test_the_file_of_python_2_is_one_that_numpy_itself_reads():
    assert pickle.loads(python_2([1, 2], bytes(2 * 3072)), encoding="bytes")[b"data"].shape == (2, 3072)


class Runs:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_nothing_in_a_pickle_is_run(tmp_path):
    folder, marker = write_pickled(tmp_path / "data", python_2), tmp_path / "marker"
    (folder / "data_batch_3").write_bytes(pickle.dumps({b"data": Runs(str(marker))}, protocol=4))
    with pytest.raises(EnvironmentBroken, match=rf"^{folder / 'data_batch_3'}: .* posix\.mkdir, .*cifar-10-binary"):
        open_images(folder, side=224)
    assert not marker.exists()


def rows_of(labels, rows=2, dtype="u1", width=3072):
    return pickle.dumps({b"data": numpy.zeros((rows, width), dtype=dtype), b"labels": labels}, protocol=4)


@of_each(
    "broken",
    [
        (numpy_s_own([1], bytes(3072))[:-100], "cannot be unpickled: "),
        (b"", "cannot be unpickled: EOFError"),
        (pickle.dumps([1]), "no dictionary"),
        (pickle.dumps({b"labels": [1]}), 'no array b"data" with a list b"labels"'),
        (rows_of([1]), "has 1 labels, 2 rows and 6144 bytes"),
        (rows_of([1, 2], dtype="f4"), 'b"data" is an array of f4, (2, 3072)'),
        (rows_of([1, 2], width=3000), 'b"data" is an array of u1, (2, 3000)'),
        (rows_of([1, 10]), "row 1 is 10, and there are 10"),
        (rows_of([1, "2"]), "no whole numbers"),
        (numpy_s_own([1], bytes(3072), protocol=5), "Take the binary version"),
    ],
)
def test_a_broken_pickle_is_an_error_that_names_it(tmp_path, broken):
    folder = write_pickled(tmp_path / "data", python_2)
    (folder / "data_batch_2").write_bytes(broken[0])
    with pytest.raises(EnvironmentBroken) as caught:
        open_images(folder, side=224)
    assert str(caught.value).startswith(f"{folder / 'data_batch_2'}: ")
    assert broken[1] in str(caught.value)


def test_a_binary_file_that_is_cut_off_missing_or_has_a_wrong_label_is_an_error_that_names_it(tmp_path):
    path = image_files.write_cifar(tmp_path) / "data_batch_4.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(EnvironmentBroken, match=rf"^{path}: .* 15364 bytes, .* 3073 each"):
        open_images(tmp_path, side=224)
    path.write_bytes(b"\x0b" + whole[1:])
    with pytest.raises(EnvironmentBroken, match=rf"^{path}: .*label.* 0 is 11, .* 10 classes"):
        open_images(tmp_path, side=224)
    path.unlink()
    with pytest.raises(EnvironmentBroken, match=r"data_batch_4\..*missing.* CIFAR-10 has data_batch_1, "):
        open_images(tmp_path, side=224)
