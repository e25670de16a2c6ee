"""The table of nccl-tests: what is read of it, and what is refused."""

import pytest
from each import of_each
from nccl_tests import table

from pytest_gpucluster.analysis.nccl_tests import IN_PLACE, OUT_OF_PLACE, read_table
from pytest_gpucluster.errors import OutputError

SIZES = {1_000_000: 40.4, 1_000_000_000: 442.28}
GOOD = table(SIZES)


def test_each_line_is_read_with_both_of_its_halves():
    output = read_table(table(SIZES), "out.txt")
    assert (output.collective, output.ranks, output.processes) == ("all_reduce", 8, 1)
    assert (output.hosts, output.nccl, output.wrong) == (("gpu-a",), "2.27.3", 0)
    assert [row.size_bytes for row in output.rows] == list(SIZES)
    assert {row.dtype for row in output.rows} == {"bfloat16"}
    last = output.rows[1].figures
    assert (last[IN_PLACE].busbw, last[OUT_OF_PLACE].busbw) == (442.28, 437.9)
    assert last[IN_PLACE].resolution == pytest.approx(0.01)


def test_ranks_and_processes_are_distinguished():
    several = table(SIZES, hosts=("gpu-a.example", "gpu-b.example"), per_process=1)
    output = read_table(several, "out.txt")
    assert (output.ranks, output.processes, output.hosts) == (16, 16, ("gpu-a", "gpu-b"))
    output = read_table(table(SIZES, hosts=("gpu-a", "gpu-b"), per_process=8), "out.txt")
    assert (output.ranks, output.processes) == (16, 2)


def test_wrong_elements_are_counted_and_data_that_were_not_checked_are_not_right():
    assert read_table(table(SIZES, wrong=3), "out.txt").wrong == 12
    assert read_table(table(SIZES, bounds=2), "out.txt").wrong == 2
    output = read_table(table(SIZES, wrong="N/A"), "out.txt")
    assert [row.figures[IN_PLACE].wrong for row in output.rows] == [None, None]


@of_each("tag", ["[1,0]<stdout>: ", "[1,12]<stdout>:", " 0: "])
def test_what_a_launcher_puts_before_each_line_is_left_out(tag):
    tagged = "".join(f"{tag}{line}\n" for line in table(SIZES).splitlines())
    assert read_table(tagged, "out.txt").rows == read_table(table(SIZES), "out.txt").rows


BAD = {
    "empty": ("", "no table"),
    "another program": ("all_reduce_perf: command not found\n", "no table"),
    "cut off": (GOOD.partition("# Out of bounds")[0], "cut off"),
    "bounds": (GOOD.replace("# Out of bounds", "#"), "cut off: .*'Out of bounds"),
    "without MPI": (GOOD * 2, "2 tables in one output.* build nccl-tests with MPI=1"),
    "split": (GOOD.replace("Group  0", "Group  1"), "groups"),
    "no GPUs": (GOOD.replace("# nThread", "# threads"), "GPUs"),
    "zero GPUs": (GOOD.replace("nGpus 8", "nGpus 0"), "no GPU"),
    "log": (GOOD.replace("442.28", "442.28 node [0] NCCL INFO"), ":19: .*without NCCL_DEBUG"),
    "a figure less": (GOOD.replace("442.28", ""), ":19: 12 values for 13"),
    "older than #wrong": (GOOD.replace("#wrong", " error"), "no line has the columns"),
    "no number": (GOOD.replace("442.28", "fast"), ":19: "),
    "negative": (table(SIZES, wrong=-1), "not a line"),
}


@of_each("case", list(BAD))
def test_what_is_no_whole_table_is_refused(case):
    text, message = BAD[case]
    with pytest.raises(OutputError, match=f"(?s)^out.txt.*{message}"):
        read_table(text, "out.txt")
