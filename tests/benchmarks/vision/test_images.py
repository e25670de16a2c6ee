from __future__ import annotations

import pickle

import torch

from pytest_gpucluster.benchmarks.vision.datasets import Block, StoredImages, SyntheticImages

READ = []


def read():
    READ.append(1)
    return Block(images=torch.arange(2 * 30 * 40 * 3).view(2, 30, 40, 3).to(torch.uint8), labels=[7, 3])


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


def test_a_copy_of_stored_images_reads_for_itself_and_takes_no_image_along():
    READ.clear()
    images = StoredImages("some", 10, read)
    assert (len(images), images.shape, len(READ)) == (2, (30, 40, 3), 1)
    sent = pickle.dumps(images)
    assert len(sent) < 1000
    copy = pickle.loads(sent)
    assert (len(copy), len(READ)) == (2, 1)
    image, label = copy[1]
    assert (label, len(READ)) == (3, 2)
    assert torch.equal(image, images[1][0])
