import json
import re

import pytest
from simulated_fabric import measured, places, surveyed

from pytest_gpucluster.isolation.link_survey import compact, culprit_lines, survey_text, to_json
from pytest_gpucluster.isolation.round_robin import across_nodes, within_node

NODE = places(1, 4)
SLOW = measured(within_node(NODE, 0), lambda s, r: 0.25 if 3 in (s, r) else 1.0, noise=0, rate=40.0)


def survey(readings, **more):
    return surveyed(readings, NODE, **more)


def test_a_slow_gpu_is_reported_with_its_host_its_links_and_a_hint():
    first, *rest = culprit_lines(survey(SLOW), "slow")
    for field in ("GPU of rank 3 (node-000, GPU 3): all its 3 links", " 10 GB/s, 0.25 of ", "nvidia-smi nvlink -s, -e"):
        assert field in first
    assert rest[1].startswith("3 bad links")
    assert rest[2].startswith("  rank 0 (node-000, GPU 0) to rank 3 (node-000, GPU 3): 10 GB/s, 0.25 ")
    assert len(rest) == 2 + 6


@pytest.mark.parametrize(("left", "conclusion"), [(0.25, "slow by itself"), (0.9, "shared")], ids=["itself", "shared"])
def test_the_second_measurement_shows_whether_the_link_or_a_shared_part_is_slow(left, conclusion):
    one_slow = measured(within_node(NODE, 0), lambda s, r: 0.25 if {s, r} == {1, 2} else 1.0, noise=0, rate=40.0)
    again = measured([((1, 2),)], noise=0, rate=40.0 * left)
    first, *rest = culprit_lines(survey(one_slow, alone=again), "slow")
    assert "between rank 1 (node-000, GPU 1) and rank 2 (node-000, GPU 2): 10 GB/s, 0.25 " in first
    assert re.search(rf"alone {40.0 * left:g} GB/s, .*{conclusion}", first)
    assert f"alone {40.0 * left:g} GB/s" in rest[2]


def test_wrong_data_are_reported_with_the_word_and_the_wrong_direction_only():
    readings = measured(within_node(NODE, 0), noise=0, rate=40.0, wrong=[(2, 1)])
    lines = culprit_lines(survey(readings), "wrong")
    assert "between rank 1 (node-000, GPU 1) and rank 2 (node-000, GPU 2): wrong data: 1 of 131072 words" in lines[0]
    assert "byte 8: found 0x0000000000000010, expected 0x0000000000000011" in lines[0]
    assert len(lines) == 4
    assert lines[3].startswith("  rank 2 (node-000, GPU 2) to rank 1 (node-000, GPU 1): 40 GB/s")


def test_many_bad_links_are_cut_and_the_file_with_all_of_them_is_named():
    there = places(24, 1)
    fabric = measured(across_nodes(there), lambda s, r: 0.25 if 5 in (s, r) else 1.0)
    lines = culprit_lines(surveyed(fabric, there, "world"), "slow")
    assert lines[0].startswith("the node node-005: all its 23 links")
    assert lines[-1].startswith("  and 30 more directions")
    assert lines[-1].endswith("links-world.json")


def names(readings, nodes, rails):
    found = surveyed(readings, places(nodes, rails), "world")
    return [line.partition(":")[0] for line in culprit_lines(found, "slow")[: len(found.culprits("slow"))]]


def test_ports_rails_nodes_and_pairs_of_nodes_have_the_names_an_operator_looks_for():
    rounds = across_nodes(places(5, 4))
    assert names(measured(rounds, lambda s, r: 0.3 if 6 in (s, r) else 1.0), 5, 4) == [
        "the port of rank 6 (node-001, GPU 2) on rail 2"
    ]
    assert names(measured(rounds, lambda s, r: 0.3 if s % 4 == 1 else 1.0), 5, 4) == ["rail 1"]
    assert names(measured(rounds, lambda s, r: 0.3 if 3 in (s // 4, r // 4) else 1.0), 5, 4) == ["the node node-003"]
    assert names(measured(rounds, lambda s, r: 0.3 if {s // 4, r // 4} == {0, 4} else 1.0), 5, 4) == [
        "4 of 4 rails between node-000 and node-004"
    ]


def test_the_text_has_the_matrix_with_the_bad_cells_marked():
    lines = survey_text(survey(SLOW)).splitlines()
    assert lines[0] == "links within nodes: 6 pairs in 3 rounds, 2 s (1.5 s planned)"
    assert lines[1] == "median 25 GB/s, from 10 GB/s to 40 GB/s"
    assert lines[2].startswith("all data arrived")
    start = lines.index("node-000, GB/s, from row to column (* far below the median, or wrong)")
    assert [line.split()[-4:] for line in lines[start + 2 :]] == [
        ["-", "40", "40", "10*"],
        ["40", "-", "40", "10*"],
        ["40", "40", "-", "10*"],
        ["10*", "10*", "10*", "-"],
    ]


def test_of_many_nodes_each_has_a_line_of_its_slowest_and_its_median():
    there = places(24, 1)
    lines = survey_text(surveyed(measured(across_nodes(there), noise=0, rate=40.0), there, "world")).splitlines()
    assert [line for line in lines if line.startswith("rail 0, GB/s")]
    assert "  rank 23 (node-023, GPU 0): 40, 40" in lines


def test_json_has_every_reading_and_the_culprit():
    body = json.loads(json.dumps(to_json(survey(SLOW, alone=measured([((0, 3),)], noise=0, rate=10.0)))))
    assert body["columns"][:3] == ["sender", "receiver", "value"]
    assert len(body["readings"]) == 12
    assert [0, 3, 10.0, 10.0, 10.0, 2**20, ""] in body["readings"]
    assert len(body["alone"]) == 2
    [culprit] = body["culprits"]
    assert (culprit["what"], culprit["kind"], culprit["ranks"]) == ("slow", "gpu", [3])
    assert body["ranks"][3] == "rank 3 (node-000, GPU 3)"


def test_the_journal_has_a_whole_node_and_of_a_large_fabric_the_slowest():
    small = json.loads(compact(survey(SLOW)))
    assert len(small["readings"]) == 12
    assert small["readings"][0] == [0, 3, 10.0]
    assert "left_out" not in small
    there = places(24, 1)
    large = compact(surveyed(measured(across_nodes(there)), there, "world"))
    assert len(json.loads(large)["readings"]) + json.loads(large)["left_out"] == 24 * 23
    assert len(large) < 1000
