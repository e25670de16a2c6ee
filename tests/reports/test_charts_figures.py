"""The figures of a test: from its measurements and the files it has left, also where these are damaged or missing."""

import json
import math
import os
import xml.etree.ElementTree as ET

import example_runs
import pytest
from example_runs import ARTIFACTS, BURN_IN, HOST_LINK, HOT_RANK, LINKS, LORA, WORLD_ALL_REDUCE, artifacts_name

from pytest_gpucluster import journal
from pytest_gpucluster.journal import JudgedMetric, TestResult
from pytest_gpucluster.reports.charts import artifact
from pytest_gpucluster.reports.charts.courses import burn_in_courses
from pytest_gpucluster.reports.charts.figures import figures_of


@pytest.fixture
def run(tmp_path):
    """A run's folder, and its results by their id."""
    folder = example_runs.write(tmp_path / "run", "cluster")
    told = journal.read(folder / journal.FILE_NAME, keep_samples=False)
    return folder, {result.nodeid: result for result in told.results}


def place_of(folder, nodeid):
    return folder / ARTIFACTS / artifacts_name(nodeid)


def shown(figures):
    """Return the figures by title, after looking that each is a chart or says why it is none."""
    for figure in figures:
        if figure.svg:
            ET.fromstring(str(figure.svg))
            assert figure.table is None or figure.table.rows
        else:
            assert figure.caption
    return {figure.title: figure for figure in figures}


def test_busbw_stands_over_the_message_size_with_its_limit(run):
    folder, results = run
    figure = shown(figures_of(results[WORLD_ALL_REDUCE], folder))["nccl.all_reduce.busbw by size"]
    assert [row[0] for row in figure.table.rows] == list(example_runs.SIZES)
    assert figure.table.tones == ("", "", "", "failed", "failed")
    assert "limit, at least" in figure.svg
    assert "NET/Socket" in figure.caption
    assert "Crosses miss their limit." in figure.caption


def test_a_sweep_takes_its_sizes_in_order_and_leaves_out_what_is_no_size():
    sizes = ["1 GB", "8 B", "many", "1 MB", "-1 GB"]
    told = TestResult(
        nodeid="a::b",
        outcome="passed",
        measurements=tuple(
            JudgedMetric(metric="nccl.all_reduce.busbw", unit="GB/s", value=1.0, status="passed", labels={"size": size})
            for size in sizes
        ),
    )
    (figure,) = figures_of(told, None)
    assert [row[0] for row in figure.table.rows] == ["8 B", "1 MB", "1 GB"]


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        (("recorded", "recorded", "passed"), "All sizes that have a limit keep it."),
        (("recorded", "recorded", "recorded"), "No size has a limit."),
        (("recorded", "error", "passed"), "1 size could not be judged."),
        (("failed", "error", "error"), "Crosses miss their limit. 2 sizes could not be judged."),
    ],
)
def test_a_sweep_says_that_its_limits_are_kept_only_where_they_are(statuses, said):
    told = tuple(
        JudgedMetric(metric="nccl.all_reduce.busbw", value=1.0, status=status, labels={"size": f"{number} GB"})
        for number, status in enumerate(statuses, start=1)
    )
    (figure,) = figures_of(TestResult(nodeid="a::b", outcome="failed", measurements=told), None)
    assert figure.caption == said


def test_two_sizes_are_no_sweep():
    both = tuple(JudgedMetric(metric="hbm.copy.bandwidth", value=1.0, labels={"size": f"{n} GB"}) for n in (1, 2))
    assert figures_of(TestResult(nodeid="a::b", outcome="passed", measurements=both), None) == ()


def test_the_slow_links_of_a_node_come_first_and_are_outlined(run):
    folder, results = run
    figures = shown(figures_of(results[LINKS], folder))
    assert list(figures) == ["Links, gpu-02", "Links, gpu-01"]
    bad = figures["Links, gpu-02"]
    assert str(bad.svg).count('stroke-width="2.2"') == 14  # 7 partners, both directions
    assert "the GPU of rank 13 (gpu-02, GPU 5)" in bad.caption
    assert bad.table.tones.count("failed") == 14
    assert bad.table.tones[:14] == ("failed",) * 14  # the slowest stand first
    assert 'stroke-width="2.2"' not in str(figures["Links, gpu-01"].svg)
    assert "rank 13" not in figures["Links, gpu-01"].caption


def test_links_across_nodes_are_a_map_for_each_rail(run):
    folder, results = run
    told = json.loads((place_of(folder, LINKS) / "links-node.json").read_text())
    readings = [[rail, 8 + rail, 48.0 - rail] for rail in range(6)]
    told |= {"scope": "world", "readings": readings, "culprits": [], "not_measured": [[6, 14], [7, 15]]}
    (place_of(folder, LINKS) / "links-node.json").unlink()
    (place_of(folder, LINKS) / "links-world.json").write_text(json.dumps(told))
    figures = shown(figures_of(results[LINKS], folder))
    assert list(figures) == ["Links, rail 0", "Links, rail 1", "Links, rail 2", "Links, rail 3"]
    assert "2 more maps are not shown" in figures["Links, rail 0"].caption
    assert "2 pairs of all were not measured" in figures["Links, rail 0"].caption
    (row,) = figures["Links, rail 1"].table.rows
    assert row == ("rank 1 (gpu-01, GPU 1)", "rank 9 (gpu-02, GPU 1)", "47")


def test_the_loss_curve_has_its_limit_and_the_held_out_loss(run):
    folder, results = run
    figure = shown(figures_of(results[LORA], folder))["Loss"]
    assert "held out" in figure.svg
    assert "limit, last 10" in figure.svg
    assert figure.caption.startswith("lora_tiny, mean of the last 10 steps: 0.33")
    assert len(figure.table.rows) <= 40


def test_of_a_burn_in_the_slowest_rank_is_named(run):
    folder, results = run
    figure = shown(figures_of(results[BURN_IN], folder))["Course of the burn-in"]
    assert f"rank {HOT_RANK}" in figure.svg
    assert figure.table.rows[0][0] == str(HOT_RANK)
    assert len(figure.table.rows) == 16
    assert "ranks 0-15" in figure.caption


def test_of_many_ranks_half_are_an_area(run):
    folder, results = run
    place = place_of(folder, BURN_IN)
    for rank in range(16, 200):
        (place / f"burn-in-rank-{rank}.csv").write_text((place / "burn-in-rank-0.csv").read_text())
    (figure,) = burn_in_courses(results[BURN_IN], folder)
    assert "fill-opacity" in figure.svg
    assert f"the slowest at its end is rank {HOT_RANK}" in figure.caption
    assert len(figure.svg) < 20_000
    assert len(figure.table.rows) == 64
    assert "136 more" in figure.table.left_out


def test_a_local_workers_course_is_its_ranks(run):
    folder, results = run
    place = place_of(folder, BURN_IN)
    for worker in (3, 12):
        there = folder / ARTIFACTS / f"rank-{worker}" / place.name
        there.mkdir(parents=True)
        (there / "burn-in-rank-0.csv").write_text((place / f"burn-in-rank-{worker}.csv").read_text())
    for path in place.iterdir():
        path.unlink()
    (figure,) = burn_in_courses(results[BURN_IN], folder)
    assert sorted(int(row[0]) for row in figure.table.rows) == [3, 12]


def test_host_links_are_shown_by_rank(run):
    folder, results = run
    figure = shown(figures_of(results[HOST_LINK], folder))["Host link, both"]
    assert figure.table.head == ("Rank", "h2d, GB/s", "d2h, GB/s")
    assert len(figure.table.rows) == 16


def test_without_a_folder_there_is_what_the_journal_holds(run):
    _, results = run
    assert figures_of(results[LINKS], None) == ()
    assert len(figures_of(results[WORLD_ALL_REDUCE], None)) == 1


def test_a_run_without_its_files_has_no_figures_of_them(run, tmp_path):
    _, results = run
    assert figures_of(results[LINKS], tmp_path / "elsewhere") == ()


_READING = '{"schema_version": 1, "scope": "node", "nodes": [[0, 1]], "ranks": ["a", "b"], "readings": '
DAMAGED = {
    "empty": "",
    "cut off": '{"schema_version": 1, "readings": [[0, 1',
    "a list": "[]",
    "a number": "7",
    "another version": '{"schema_version": 2}',
    "no readings": '{"schema_version": 1, "nodes": [[0, 1]]}',
    "readings without values": _READING + "[[0, 1]]}",
    "values that are text": _READING + '[[0, 1, "fast"]]}',
    "ranks that are none": _READING + "[[-1, true, 5.0]]}",
    "nodes that are none": '{"schema_version": 1, "nodes": [7], "readings": []}',
    "too deep": "[" * 100_000,
    "not UTF-8": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_matrix_is_named(run, content):
    folder, results = run
    path = place_of(folder, LINKS) / "links-node.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (figure,) = figures_of(results[LINKS], folder)
    assert not figure.svg
    assert figure.caption.startswith("Not shown: links-node.json: ")
    assert str(folder) not in figure.caption


@pytest.mark.parametrize(
    ("nodeid", "name"),
    [(LINKS, "links-node.json"), (LORA, "curve-group-0.csv"), (BURN_IN, "burn-in-rank-11.csv")],
    ids=["links", "loss", "burn-in"],
)
class TestAFileThatCannotBeShown:
    """It is named, the others are shown, and nothing waits for it or is filled with it."""

    def told(self, run, nodeid):
        folder, results = run
        return " ".join(figure.caption for figure in figures_of(results[nodeid], folder))

    def test_damaged(self, run, nodeid, name):
        (place_of(run[0], nodeid) / name).write_text("what is this?\n1,2\n3")
        assert f"{name}:" in self.told(run, nodeid)

    def test_too_large(self, run, nodeid, name):
        with (place_of(run[0], nodeid) / name).open("ab") as file:
            file.truncate(artifact.LARGEST_BYTES + 1)
        told = self.told(run, nodeid)
        assert "at most 16 MB are shown" in told or "more than 16 MB in all" in told

    def test_a_pipe(self, run, nodeid, name):
        path = place_of(run[0], nodeid) / name
        path.unlink()
        os.mkfifo(path)
        assert f"{name}: no regular file" in self.told(run, nodeid)

    def test_a_link_to_nowhere(self, run, nodeid, name):
        path = place_of(run[0], nodeid) / name
        path.unlink()
        path.symlink_to("gone")
        assert f"{name}: cannot be read: No such file" in self.told(run, nodeid)


def test_a_course_that_was_cut_off_is_shown_as_far_as_it_goes(run):
    folder, results = run
    path = place_of(folder, BURN_IN) / "burn-in-rank-3.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:20]) + "\n210.000,680,9.7")
    (figure,) = burn_in_courses(results[BURN_IN], folder)
    assert "Not shown" not in figure.caption
    assert len(figure.table.rows) == 16


def test_a_course_without_a_single_number_is_left_out(run):
    folder, results = run
    path = place_of(folder, BURN_IN) / "burn-in-rank-11.csv"
    path.write_text("seconds,products,busy_seconds,tflops\n10.0,5,1.0,nan\n20.0,5,1.0,inf\n")
    (figure,) = burn_in_courses(results[BURN_IN], folder)
    assert "11" not in [row[0] for row in figure.table.rows]


def test_a_loss_that_is_no_number_is_told(run):
    folder, results = run
    path = place_of(folder, LORA) / "curve-group-0.csv"
    lines = path.read_text().splitlines()
    cells = lines[-2].split(",")
    lines[-2] = ",".join([cells[0], "nan", *cells[2:]])
    path.write_text("\n".join(lines) + "\n")
    figure = shown(figures_of(results[LORA], folder))["Loss"]
    assert "1 losses are no numbers" in figure.caption
    assert "mean of the last 10 steps: nan" in figure.caption


def test_hostile_names_in_a_matrix_are_texts(run):
    folder, results = run
    path = place_of(folder, LINKS) / "links-node.json"
    told = json.loads(path.read_text())
    told["ranks"] = ["<script>alert(1)</script> (\x1b[31m</svg>, GPU 0)"] * 16
    told["culprits"] = [{"ranks": "x", "pairs": [[0, 1], [2], "y", ["a", "b"]], "text": "<img onerror=1>"}, 7]
    path.write_text(json.dumps(told))
    for figure in shown(figures_of(results[LINKS], folder)).values():
        assert "<script" not in str(figure.svg)
        assert "<img" not in str(figure.svg)


def test_a_test_s_own_id_is_no_pattern(run):
    folder, _ = run
    odd = TestResult(nodeid="acceptance/*::[a-z]", outcome="passed")
    assert figures_of(odd, folder) == ()


def test_a_link_that_was_not_measured_is_an_empty_cell(run):
    folder, results = run
    path = place_of(folder, LINKS) / "links-node.json"
    told = json.loads(path.read_text())
    told["readings"][0][2] = None
    path.write_text(json.dumps(told))
    figure = shown(figures_of(results[LINKS], folder))["Links, gpu-01"]
    assert ">?<" in str(figure.svg)
    assert any(math.isnan(float(row[2])) for row in figure.table.rows)
