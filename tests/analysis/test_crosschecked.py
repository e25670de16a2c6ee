"""Our figures compared with those of nccl-tests: what is agreement, and what is not."""

import math
from dataclasses import replace

import pytest
from each import of_each
from example_journals import collective, places
from nccl_tests import table
from written_runs import read as read_run

from pytest_gpucluster.analysis import crosscheck, nccl_tests
from pytest_gpucluster.analysis.crosscheck import (
    AGREES,
    DIFFERS,
    MISSING,
    NOT_COMPARABLE,
    WRONG,
    collectives_of,
    compare_outputs,
    program_commands,
)
from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.metrics.codec import number_to_json

MB, GB = 1_000_000, 1_000_000_000


def mine(*tests, hosts=1, **more):
    return collectives_of(
        read_run(*(tests or [collective({"1 MB": 40.0, "1 GB": 440.0})]), ranks=places(hosts), **more)
    )


def theirs(sizes=None, **more):
    return nccl_tests.read_table(table(sizes or {MB: 40.0, GB: 440.0}, **more), "out.txt")


def kinds(found):
    return [row.kind for row in found.rows]


def test_two_programs_that_measure_the_same_agree():
    found = compare_outputs(mine(), [theirs({MB: 39.0, GB: 431.0})])
    assert (kinds(found), found.answer) == ([AGREES, AGREES], crosscheck.AGREEMENT)
    assert "REHEARSAL" in mine(device="cpu", rehearsal=True).why_not
    assert (found.wrong, found.unmatched, found.notes) == ((), (), ())


@of_each("case", [(400.0, DIFFERS), (480.0, DIFFERS), (420.0, AGREES), (449.0, AGREES)])
def test_a_difference_is_a_finding_in_either_direction(case):
    value, kind = case
    found = compare_outputs(mine(), [theirs({MB: 39.2, GB: value})])
    assert kinds(found) == [AGREES, kind]
    assert found.answer == (crosscheck.FINDING if kind == DIFFERS else crosscheck.AGREEMENT)
    assert found.rows[1].difference_ratio == pytest.approx(0.98 * 440 / value - 1)
    assert compare_outputs(mine(), [theirs({MB: 39.2, GB: value})], beyond=0.2).answer == crosscheck.AGREEMENT
    assert compare_outputs(mine(), [theirs({MB: 39.2, GB: value})], beyond=0.001).answer == crosscheck.FINDING


def test_an_all_reduce_is_compared_in_place_and_all_others_out_of_place():
    halves = {"sizes": {GB: 440.0}, "out_of_place": (100.0, 0)}
    assert kinds(compare_outputs(mine(collective({"1 GB": 440.0})), [theirs(**halves)])) == [AGREES]
    gathered = mine(collective({"1 GB": 440.0}, name="all_gather"))
    found = compare_outputs(gathered, [theirs(**halves, program="all_gather_perf")])
    assert kinds(found) == [DIFFERS]
    assert found.rows[0].nccl_tests_gb_per_second == 100.0


def test_one_process_is_compared_with_our_slowest_rank_and_one_for_each_gpu_with_the_average():
    run = mine(collective({"1 GB": 440.0}, slowest={"1 GB": 400.0}))
    assert compare_outputs(run, [theirs({GB: 440.0})]).rows[0].ours_gb_per_second == 400.0
    assert compare_outputs(run, [theirs({GB: 440.0}, per_process=1)]).rows[0].ours_gb_per_second == 440.0
    assert compare_outputs(run, [theirs({GB: 440.0}, per_process=4)]).rows[0].ours_gb_per_second == 400.0


def test_only_the_ranks_of_the_same_host_are_compared():
    slow = collective({"1 GB": 440.0})
    # As a journal of two nodes: each node measured its own group, and gpu-b was slower.
    values = slow["measurements"][0]["values"]
    values |= {str(rank): 300.0 for rank in range(8, 16)}
    run = mine(slow, hosts=2)
    assert compare_outputs(run, [theirs({GB: 432.0})]).answer == crosscheck.AGREEMENT
    assert compare_outputs(run, [theirs({GB: 432.0}, hosts=("gpu-b",))]).rows[0].ours_gb_per_second == 300.0


def test_another_host_is_another_measurement_unless_that_is_allowed():
    found = compare_outputs(mine(), [theirs(hosts=("gpu-z",))])
    assert kinds(found) == [NOT_COMPARABLE, NOT_COMPARABLE]
    assert found.answer == crosscheck.NOTHING
    assert "gpu-z" in found.rows[0].why
    found = compare_outputs(mine(), [theirs(hosts=("gpu-z",))], other_hosts=True)
    assert found.answer == crosscheck.AGREEMENT
    assert [note.partition(":")[0] for note in found.notes] == ["gpu-z"]


def test_wrong_data_are_a_finding_at_any_size_and_in_either_half():
    assert kinds(compare_outputs(mine(), [theirs(wrong=1.0)])) == [WRONG, WRONG]
    found = compare_outputs(mine(collective({"1 GB": 440.0})), [theirs({GB: 440.0}, out_of_place=(436.0, 2))])
    assert (kinds(found), found.answer) == ([WRONG], crosscheck.FINDING)
    # At a size that we have not measured, and with a count in the closing line only.
    found = compare_outputs(mine(), [theirs({MB: 40.0, GB: 440.0}), theirs({77: 1.0}, wrong=4.0)])
    assert (found.answer, found.wrong) == (crosscheck.FINDING, ("all_reduce: 8 wrong elements (out.txt)",))
    found = compare_outputs(mine(), [theirs({MB: 39.2, GB: 440.0}, bounds=1)])
    assert (kinds(found), found.answer) == ([AGREES, AGREES], crosscheck.FINDING)


def test_data_that_were_not_checked_are_no_agreement():
    found = compare_outputs(mine(), [theirs(wrong="N/A")])
    assert (kinds(found), found.answer) == ([NOT_COMPARABLE, NOT_COMPARABLE], crosscheck.NOTHING)
    assert "-c 0" in found.rows[0].why


@of_each("figure", [math.nan, 0.0, -1.0, math.inf])
def test_what_is_no_figure_is_no_agreement(figure):
    found = compare_outputs(mine(collective({"1 GB": 440.0})), [theirs({GB: figure})])
    assert (kinds(found), found.answer) == ([NOT_COMPARABLE], crosscheck.NOTHING)
    ours_is_none = mine(collective({"1 GB": number_to_json(figure)}))
    assert kinds(compare_outputs(ours_is_none, [theirs({GB: 440.0})])) == [NOT_COMPARABLE]
    unsure = mine(collective({"1 GB": 440.0}, inconclusive="too wide"))
    assert kinds(compare_outputs(unsure, [theirs({GB: 440.0})])) == [NOT_COMPARABLE]


def test_a_size_that_nccl_tests_left_out_is_missing_and_decides_unless_that_is_allowed():
    found = compare_outputs(mine(), [theirs({MB: 39.2})])
    assert (kinds(found), found.answer) == ([AGREES, MISSING], crosscheck.UNDECIDED)
    assert compare_outputs(mine(), [theirs({MB: 39.2})], partial=True).answer == crosscheck.AGREEMENT
    assert compare_outputs(mine(), [theirs({77: 39.2})], partial=True).answer == crosscheck.NOTHING


def test_the_commands_measure_each_size_of_the_run_with_its_ranks():
    run = mine(
        collective({"1 MB": 40.0, "1 GB": 440.0}),
        collective({"1 GB": 440.0}, name="all_to_all", dtype="fp32", hosts=2),
        hosts=2,
    )
    assert program_commands(run.points) == [
        "all_reduce_perf -b 1000000 -e 1000000 -g 8 -d bfloat16 -c 1 > all_reduce-bf16-8-1MB.txt",
        "all_reduce_perf -b 1000000000 -e 1000000000 -g 8 -d bfloat16 -c 1 > all_reduce-bf16-8-1GB.txt",
        "mpirun -np 16 alltoall_perf -b 1000000000 -e 1000000000 -g 1 -d float -c 1 > all_to_all-fp32-16-1GB.txt",
    ]


def test_an_output_of_which_the_journal_has_nothing_decides_unless_that_is_allowed():
    others = [theirs({GB: 440.0}, gpus=4), theirs({GB: 440.0}, dtype="float"), theirs({GB: 1.0}, program="x_perf")]
    for other in others:
        found = compare_outputs(mine(), [theirs(), other])
        assert found.answer == crosscheck.UNDECIDED, found.unmatched
        assert compare_outputs(mine(), [theirs(), other], partial=True).answer == crosscheck.AGREEMENT
        assert compare_outputs(mine(), [other], partial=True).answer == crosscheck.NOTHING
    [unmatched] = found.unmatched
    assert "bfloat16 by 8 ranks on 1 node" in unmatched


def test_a_size_that_was_rounded_down_to_whole_parts_is_the_same_size():
    run = mine(collective({"1 GB": 440.0}, hosts=3), hosts=3)
    rounded = GB // (24 * 16) * (24 * 16)
    assert rounded < GB
    hosts = ("gpu-a", "gpu-b", "gpu-c")
    assert compare_outputs(run, [theirs({rounded: 432.0}, hosts=hosts)]).answer == crosscheck.AGREEMENT
    assert kinds(compare_outputs(run, [theirs({GB - 24 * 16: 432.0}, hosts=hosts)])) == [MISSING]
    assert kinds(compare_outputs(run, [theirs({GB + 1: 432.0}, hosts=hosts)])) == [MISSING]


def test_a_size_that_came_twice_is_as_good_as_its_worse_line():
    twice = theirs({GB: 440.0})
    slow = theirs({GB: 300.0})
    found = compare_outputs(mine(collective({"1 GB": 440.0})), [replace(twice, rows=twice.rows + slow.rows)])
    assert kinds(found) == [DIFFERS]


def test_a_figure_that_is_printed_too_coarsely_is_not_compared():
    small = mine(collective({"1 MB": 0.05}))
    found = compare_outputs(small, [theirs({MB: 0.05})])
    assert (kinds(found), found.rows[0].why.startswith("0.05 GB/s ")) == ([NOT_COMPARABLE], True)


def test_labels_that_this_project_does_not_write_are_an_error():
    line = collective({"1 GB": 440.0})
    del line["measurements"][0]["labels"]["nnodes"]
    with pytest.raises(JournalError, match=r"nccl\.all_reduce\.busbw has labels"):
        mine(line)
