"""The results of a fleet: outliers, verdicts, which nodes to drain, at any number of nodes and criteria."""

import random
import re

import pytest
from written_runs import HBM, MATMUL, case, measured, place, read

from pytest_gpucluster.analysis.fleet import NodeRun, drain_text, fleet, fleet_blocks, fleet_page, journals_below, mixed
from pytest_gpucluster.analysis.output import as_text
from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch.hostlist import expand_hostlist

EVIL = "<script>\x1b[31m\u202eevil\n" + "x" * 10_000


def answer(host, *tests, values=(730,), **more):
    tests = tests or (case(MATMUL, "passed", measured(list(values))), case(HBM, "passed"))
    return NodeRun(path=f"{host}.jsonl", journal=read(*tests, ranks=[place(0, host=host)], **more))


def picture(*answers, expected=()):
    return fleet(answers, expected=expected)


def fleet_table(found):
    return as_text(fleet_blocks(found), 80)


BROKEN = {"end": {"verdict": "BROKEN", "exit": 11, "reason": "lost"}}


def test_every_node_is_good_to_be_drained_or_without_an_answer():
    found = picture(
        *(answer(f"gpu-{number}", values=[730 + number / 10]) for number in range(6)),
        answer("gpu-7", case(MATMUL, "failed", message="too slow"), case(HBM, "passed")),
        answer("gpu-8", values=[500]),
        answer("gpu-9", case(MATMUL, "error", message="lost"), case(HBM, "passed"), **BROKEN),
        answer("gpu-a", case(MATMUL, "passed", measured([730]))),
        expected=["gpu-0", "gpu-b"],
    )
    assert list(found.drained) == ["gpu-7", "gpu-8"]
    assert list(found.without_answer) == ["gpu-9", "gpu-a", "gpu-b"]
    shown = fleet_table(found)
    rows = [
        "gpu-7  REJECTED  1 failed, 1 passed\n    failed: test_matmul",
        "gpu-8  ACCEPTED  1 behind, 1 passed\n    behind: test_matmul",
        "gpu-9  BROKEN    1 error, 1 passed\n    error: test_matmul",
        "gpu-a  ACCEPTED  1 passed, 1 not in its run\n    not in its run: test_hbm",
        "gpu-0  ACCEPTED  2 passed",
    ]
    places = [shown.find(row) for row in rows]
    assert places == sorted(places)
    assert places[0] > 0
    assert re.search(r"gpu-a: .* test_hbm", shown)
    assert "rank 0 (gpu-8, GPU 0 GPU-gpu-8-0): test_matmul: matmul.bf16.tflops 500 TFLOPS" in " ".join(shown.split())
    assert re.findall(r"\d+", shown.splitlines()[-1]) == ["11", "6", "2", "3"]


def test_the_newest_run_of_a_node_counts_and_the_earlier_one_is_noted():
    slow = answer("gpu-1", case(MATMUL, "failed", message="slow"), started_at="2026-01-01T00:00:00+00:00")
    found = picture(answer("gpu-1"), slow)
    [note] = list(found.notes)
    assert (list(found.drained), note.startswith("gpu-1 "), note.endswith(": REJECTED")) == ([], True, True)
    again = answer("gpu-1", case(MATMUL, "failed", message="slow"), started_at="2027-01-01T00:00:00+00:00")
    assert list(picture(answer("gpu-1"), again).drained) == ["gpu-1"]


def test_a_run_on_several_nodes_is_noted_and_left_out():
    both = NodeRun(path="j", journal=read(case(MATMUL), ranks=[place(0, host="a"), place(1, host="b")]))
    found = picture(answer("gpu-1"), both)
    assert [node.name for node in found.nodes] == ["gpu-1"]
    assert any(note.startswith("j: ") and "2 nodes" in note for note in found.notes)


def test_nodes_that_should_be_alike_and_are_not_are_noted():
    found = picture(answer("gpu-1"), answer("gpu-2", sku="H200 SXM", digest="e" * 64))
    assert any("H100 SXM, H200 SXM" in note for note in found.notes)
    assert any("different limits" in note for note in found.notes)
    assert mixed([answer("gpu-1"), answer("gpu-2", rehearsal=True)])
    simulated = [answer(name, device="simulated") for name in ("gpu-1", "gpu-2")]
    assert mixed([answer("gpu-0"), simulated[0]])
    assert not mixed(simulated)


def test_nothing_hostile_reaches_the_terminal_or_the_drain_file():
    found = picture(answer("gpu-1", case(MATMUL, "failed", message=EVIL)), answer(EVIL), expected=[EVIL + "2"])
    for text in (fleet_table(found), drain_text(found)):
        assert all(line.isprintable() for line in text.splitlines())
    assert max(map(len, fleet_table(found).splitlines())) <= 80
    assert "<script>\x1b" not in fleet_page(found)
    assert "\u202e" not in fleet_page(found)
    with pytest.raises(LaunchError, match="Slurm"):
        drain_text(picture(answer(EVIL, case(MATMUL, "failed", message="slow"))))


def test_the_drain_file_is_what_schedulers_take():
    bad = [answer(f"gpu-00{number}", case(MATMUL, "failed", message="slow")) for number in (3, 4)]
    text = drain_text(picture(*bad, answer("gpu-005"), expected=["gpu-009"]))
    lines = text.splitlines()
    assert expand_hostlist(lines[lines.index("[slurm]") + 1]) == ["gpu-003", "gpu-004"]
    assert lines[lines.index("[kubernetes]") + 1 :] == ["gpu-003", "gpu-004"]
    assert "# gpu-003: REJECTED: test_matmul: slow" in lines
    assert any(line.startswith("# no answer") and line.endswith("gpu-009") for line in lines)
    assert "{n;p}' 'my drain.txt')" in drain_text(picture(*bad), file="'my drain.txt'")
    assert [line for line in drain_text(picture(answer("gpu-1"))).splitlines() if not line.startswith("#")] == []


def test_the_page_has_the_matrix_of_nodes_and_tests():
    found = picture(*(answer(f"gpu-{number}") for number in range(6)), answer("gpu-8", values=[500]))
    page = fleet_page(found)
    row = (
        page.partition("Nodes and tests</caption>")[2].partition('<th scope="row">gpu-8</th>')[2].partition("</tr>")[0]
    )
    assert re.findall("<td.*?>(.*?)</td>", row) == ["behind", "OK"]
    assert "7 nodes: 6 good, 1 to be drained" in page
    assert 'class="verdict v-bad"' in page
    assert 'class="verdict v-neutral"' in fleet_page(picture(*(answer(f"gpu-{number}") for number in range(6))))
    assert "<h1>SIMULATED" in fleet_page(
        picture(answer("gpu-0", device="simulated"), answer("gpu-1", device="simulated"))
    )


def test_journals_are_found_below_a_folder_each_once(tmp_path):
    for name in ("a", "b/c"):
        (tmp_path / "real" / name).mkdir(parents=True)
        (tmp_path / "real" / name / "journal.jsonl").write_text("{}")
    (tmp_path / "real" / "latest").symlink_to("a")
    (tmp_path / "link").symlink_to("real")
    for place_ in (tmp_path / "real", tmp_path / "link"):
        assert [str(path.relative_to(place_)) for path in journals_below(place_)] == [
            "a/journal.jsonl",
            "b/c/journal.jsonl",
        ]


def test_a_journal_that_cannot_be_read_is_its_node_s_where_the_folder_says_whose():
    lost = (
        ("sweep/gpu-2/journal.jsonl", "sweep/gpu-2/journal.jsonl: empty"),
        ("x/journal.jsonl", "x/journal.jsonl: bad"),
    )
    found = fleet([answer("gpu-1")], expected=["gpu-1", "gpu-2", "gpu-3"], unreadable=lost)
    assert found.without_answer == {
        "gpu-2": "sweep/gpu-2/journal.jsonl: empty",
        "x/journal.jsonl": "bad",
        "gpu-3": "no journal",
    }


def node(number, *values, metric="matmul.bf16.tflops", sku="H100 SXM", limit=None, width=0.005, **run):
    host = f"gpu-{number:03}"
    ranks = [place(rank, host=host) for rank in range(len(values))]
    line = measured(list(values), metric, limit=limit, width=width)
    return NodeRun(path=f"{host}.jsonl", journal=read(case(MATMUL, "passed", line), ranks=ranks, sku=sku, **run))


def found(answers, **more):
    return [(each.node, each.rank, each.judged.metric) for each in fleet(answers, **more).outliers]


def healthy(count, gpus=8, seed=1, middle=730.0):
    draws = random.Random(seed)
    return [node(number, *(draws.gauss(middle, 3) for _ in range(gpus))) for number in range(count)]


def test_a_gpu_far_behind_all_others_is_named_and_the_healthy_are_not():
    slow = node(99, 730, 729, 731, 640, 730, 732, 728, 730)
    assert found([*healthy(8), slow]) == [("gpu-099", 3, "matmul.bf16.tflops")]
    assert found(healthy(64)) == []


def test_the_healthy_are_rarely_named_however_alike_they_are():
    alike = [node(number, *([730.0] * 8)) for number in range(7)]
    a_bit = node(8, *([729.0] * 8))
    assert found([*alike, a_bit]) == [], "one in a thousand is no fault, even without scatter"
    assert sum(len(found(healthy(32, seed=seed))) for seed in range(20)) == 0


def test_half_of_the_fleet_may_be_slow_and_the_other_half_is_no_outlier():
    half = [node(number, *([730.0 + number] * 2)) for number in range(5)]
    slow = [node(number, *([500.0 + number] * 2)) for number in range(5, 9)]
    assert {each[0] for each in found([*half, *slow])} <= {f"gpu-{number:03}" for number in range(5, 9)}


def test_only_like_numbers_are_compared_and_less_is_better_where_it_is():
    for value in ("NaN", -3, "Infinity"):
        assert found([*healthy(4, gpus=2), node(9, 730, value)]) == [], "left to the limits"
    assert found([*healthy(6), node(9, *([500.0] * 8), sku="H200 SXM")]) == []
    assert found([*healthy(6), node(9, *([500.0] * 4))]) == [], "with another number of ranks"
    assert found([node(1, *([730.0] * 7), 200)]) == [], "one node is no fleet"
    cool = [node(number, 60, metric="gpu.temperature") for number in range(8)]
    assert found([*cool, node(9, 80, metric="gpu.temperature")]) == [], "a state of the moment"
    late = "nccl.all_reduce.latency"
    fast = [node(number, 20 + number / 10, metric=late) for number in range(8)]
    assert found([*fast, node(9, 60, metric=late)]) == [("gpu-009", 0, late)]
    assert found([*fast, node(9, 5, metric=late)]) == []
    runs = [*healthy(8), node(9, *([690.0] * 8))]
    assert (len(found(runs)), found(runs, behind=0.10)) == (8, [])


def test_a_limits_own_ratio_holds_over_the_fleet_also_where_there_are_few_nodes():
    limit = {"min": 1.0, "min_ratio_to_median": 0.95}
    runs = [node(0, 730, limit=limit), node(1, 731, limit=limit), node(2, 690, limit=limit)]
    [behind] = fleet(runs).outliers
    assert (behind.node, "94.5 %" in behind.why, "95 %" in behind.why) == ("gpu-002", True, True)
    assert found([node(0, 730), node(1, 731), node(2, 690)]) == [], "three values do not say how much they scatter"
