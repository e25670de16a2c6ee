"""Which rank of one run is which of another."""

from __future__ import annotations

from pytest_gpucluster.analysis.run_view import match
from pytest_gpucluster.journal.records import RankPlace


def ranks(*places: tuple[str, int, str]) -> dict[int, RankPlace]:
    return {
        rank: RankPlace(rank=rank, host=host, local_rank=local, gpu={"uuid": uuid} if uuid else None)
        for rank, (host, local, uuid) in enumerate(places)
    }


BEFORE = ranks(("a", 0, "G0"), ("a", 1, "G1"), ("b", 0, "G2"), ("b", 1, "G3"))


def matched(found):
    return {rank: (one.old, one.by, one.swapped) for rank, one in found.items()}


def test_a_gpu_is_known_wherever_it_is():
    now = ranks(("b", 1, "G3"), ("b", 0, "G2"), ("c", 0, "G1"), ("a", 0, "G0"))
    assert matched(match(BEFORE, now)) == {0: (3, "GPU", ""), 1: (2, "GPU", ""), 2: (1, "GPU", ""), 3: (0, "GPU", "")}


def test_a_new_gpu_stands_in_the_slot_of_the_old_one_and_that_is_reported():
    now = ranks(("a", 0, "G0"), ("a", 1, "NEW"), ("b", 0, "G2"), ("b", 1, "G3"))
    assert matched(match(BEFORE, now))[1] == (1, "slot", "G1")


def test_on_other_hosts_the_number_decides_and_no_rank_is_taken_twice():
    now = ranks(("x", 0, "N0"), ("x", 1, "N1"), ("a", 0, "G0"), ("y", 1, "N3"), ("y", 2, "N4"))
    found = match(BEFORE, now)
    assert found[2].old == 0
    assert 0 not in found  # rank 0 of before is the GPU of rank 2 now
    assert matched(found)[3] == (3, "rank number", "G3")
    assert 4 not in found
    assert len({one.old for one in found.values()}) == len(found)


def test_on_cpu_and_for_nodes_the_slot_decides():
    cpu = ranks(("a", 0, ""), ("a", 1, ""))
    assert matched(match(cpu, ranks(("a", 1, ""), ("a", 0, "")))) == {0: (1, "slot", ""), 1: (0, "slot", "")}
    moved = ranks(("b", 0, "G0"), ("b", 1, "G1"), ("a", 0, "G2"), ("a", 1, "G3"))
    assert {rank: one.old for rank, one in match(BEFORE, moved, by_gpu=False).items()} == {0: 2, 1: 3, 2: 0, 3: 1}
