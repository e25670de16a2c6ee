import pytest

from pytest_gpucluster.benchmarks.collective_payload import shape_of


@pytest.mark.parametrize(
    ("collective", "sent", "received"),
    [
        ("all_reduce", 1024, 1024),
        ("all_gather", 128, 1024),
        ("reduce_scatter", 1024, 128),
        ("all_to_all", 1024, 1024),
        ("broadcast", 1024, 1024),
        ("send_recv", 1024, 1024),
    ],
)
def test_a_size_is_the_larger_tensor_as_in_nccl_tests(collective, sent, received):
    shape = shape_of(collective, 4096, itemsize=4, ranks=8)
    assert (shape.sent, shape.received, shape.payload_bytes) == (sent, received, 4096)
    assert shape.in_place == (collective in ("all_reduce", "broadcast"))
    assert shape.tensor_bytes == 4 * (sent if shape.in_place else sent + received)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize(
    ("payload_bytes", "itemsize", "ranks", "part"),
    [
        (10**9, 2, 16, 31_250_000),
        (10**9, 2, 12, 41_666_664),  # 41,666,666 rounded down to whole 16 bytes
        (10**6, 4, 3, 83_332),
        (40, 4, 3, 3),  # less than 16 bytes for each: no rounding
        (8, 2, 3, 1),
        (8, 4, 1024, 1),  # more than was asked for, where nccl-tests moves nothing
    ],
    ids=["even", "aligned", "odd", "few", "single", "many ranks"],
)
def test_parts_are_multiples_of_16_bytes_and_an_element_at_least(collective, payload_bytes, itemsize, ranks, part):
    shape = shape_of(collective, payload_bytes, itemsize=itemsize, ranks=ranks)
    assert shape.part == part
    assert shape.payload_bytes == part * itemsize * ranks
    assert sorted({shape.sent, shape.received})[-1] == part * ranks


def test_a_pair_can_send_and_receive_and_one_rank_cannot():
    assert shape_of("send_recv", 4096, itemsize=4, ranks=2).sent == 1024
    with pytest.raises(ValueError, match="a send_recv needs 2 ranks and more"):
        shape_of("send_recv", 4096, itemsize=4, ranks=1)
