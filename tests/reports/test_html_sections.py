"""What the sections of ``report.html`` say, and where: about merged and compared runs, culprits, and advice."""

import html
import math
import re
from types import SimpleNamespace

from each import of_each

from pytest_gpucluster.isolation.finding import Culprit, IsolationResult, Outcome
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import MergedFrom, Run, TestResult
from pytest_gpucluster.journal.run_directory import ARTIFACTS, artifacts_name
from pytest_gpucluster.judge.judged import JudgedLimit, JudgedMetric
from pytest_gpucluster.metrics.finding import Finding, Identity
from pytest_gpucluster.reports.failures import advice_in
from pytest_gpucluster.reports.findings import isolation_of
from pytest_gpucluster.reports.html import page
from pytest_gpucluster.reports.html.criterion import RunFiles, search_values
from pytest_gpucluster.session.isolation import Search

BASELINE = {"kind": "regressed", "rank": 3, "old": {"value": 781.0}, "change_ratio": -0.052, "why": "beyond noise"}


def text_of(document):
    shown = re.sub(r"<(script|style)>.*?</\1>", "", document, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", shown)).split())


def page_of(*results, run=None, **others):
    journal = Journal(run=run or Run(run_id="r", started_at="2026-11-21T09:00:00Z"), results=results, **others)
    return page.render(journal)


def measured(**others):
    fields = {"status": "failed", "value": 740.0, "worst_rank": 1, "values": {0: 780.0, 1: 740.0}}
    judged = JudgedMetric(metric="m.tflops", unit="TFLOPS", limit=JudgedLimit(min=700.0), **{**fields, **others})
    return TestResult(nodeid="a::b", name="b", outcome="failed", measurements=(judged,))


@of_each(
    "case",
    [
        ({"kind": "missing"}, "missing"),
        ({"kind": 7, "change_ratio": "NaN", "rank": None}, "7"),
        ({"old": {"value": math.nan}, "change_ratio": math.inf}, "unknown"),
        ({"kind": "worse", "why": "<script>"}, "worse; <script>"),
        ({"kind": "worse", "old": "<b>"}, "unknown; baseline: old must be a JSON object, found '<b>'; see the journal"),
    ],
)
def test_any_baseline_in_a_journal_is_shown_and_no_markup(case):
    baseline, expected = case
    shown = text_of(page_of(measured(baseline=BASELINE)))
    assert "regressed: 781 TFLOPS before (-5.2 %) on rank 3" in shown
    document = page_of(measured(baseline=baseline))
    assert "Compared with the baseline" in document
    assert expected in text_of(document)
    assert "<td><b>" not in document
    assert document.count("<script>") == 1


def test_merged_runs_are_named_and_so_is_that_they_are_of_different_clusters():
    runs = (
        MergedFrom(journal="/runs/1", sha256="ab12", run_id="first", verdict="REJECTED", exit=1),
        MergedFrom(journal="/runs/2", sha256="cd34", run_id="second", verdict="ACCEPTED", exit=0),
    )
    fields = {"run_id": "r", "started_at": "", "merged_from": runs}
    properties = (("merged run 1", "why it ended"), ("merged run 1 sha256", "ab12"), ("site", "x"), ("site", "x"))
    document = page_of(run=Run(**fields), properties=properties)
    assert document.count("why it ended") == document.count("<dt>site</dt>") == 1
    merged = text_of(document.partition('id="merged"')[2])
    assert "1 first REJECTED, exit code 1 /runs/1 ab12 2 second ACCEPTED, exit code 0 /runs/2 cd34" in merged
    assert "Merged runs" not in page_of()


def test_a_pass_after_a_failure_and_one_that_was_not_judged_say_so_in_their_row():
    attempts = (
        ("attempt 1", "failed: 585 TFLOPS"),
        ("attempt 2", "run second: passed"),
        ("attempt 3", "run third, which counts: passed"),
    )
    passed = {"nodeid": "a::b", "name": "b", "outcome": "passed"}
    document = page_of(TestResult(**passed, attempts=3, properties=attempts), TestResult(**passed, unjudged="no SKU"))
    rows = [text_of(row) for row in re.findall(r'<tr class="why[^>]*>(.*?)</tr>', document, re.DOTALL)]
    assert rows == ["attempt 1: failed: 585 TFLOPS", "not judged: no SKU"]


NAMES = {0: "gpu-01", 1: "gpu-02", 2: "gpu-03"}


def searched(**changes):
    found = IsolationResult(
        culprits=(Culprit(units=(1,), kind="unit", failed=2, probes=3, evidence=("round 1, alone: 212 GB/s",)),),
        cleared=(0,),
        undecided=(2,),
        rounds=((Outcome(members=(0, 1), busbw=212.0), Outcome(members=(2,), busbw=None, failure="timed out")),),
        why_undecided="no time",
        reproduced=True,
    )
    plan = SimpleNamespace(names=NAMES, cut_short="")
    return {**Search(plan=plan, found=found, seconds=12.3).to_json(), **changes}


def shown(**changes):
    return search_values(isolation_of(searched(**changes)))


def test_a_search_is_shown_as_the_product_writes_it_and_a_link_with_both_ends():
    search = shown()
    culprits = [(each["name"], each["failed_probes"]) for each in search["culprits"]]
    assert culprits == [("gpu-02", "failed 2 of 3 probes: intermittent")]
    assert (search["cleared"], search["undecided"]) == ("gpu-01", "gpu-03: no time")
    culprit = {"units": [0, 2], "kind": "link", "failed": 3, "probes": 3, "intermittent": False, "evidence": []}
    assert shown(culprits=[culprit])["culprits"][0]["name"].endswith("between gpu-01 and gpu-03")
    assert re.search("not reproduced.*rank lost", shown(culprits=[], reproduced=False, cut_short="rank lost")["result"])


GPU = Identity(host="gpu-02", index=3, uuid="GPU-1", serial="165", pci="00000000:5D:00.0")


def finding(**changes):
    fields = {"code": "ecc.uncorrected", "found": "2 errors: since reboot", "allowed": "0", "remedy": "drain; reset"}
    return Finding(kind="hardware", gpu=GPU, **{**fields, **changes})


def test_a_finding_of_the_health_criterion_is_split_as_it_writes_it():
    text = f"{GPU}: ecc.uncorrected (hardware): 2 errors: since reboot; allowed: 0"
    assert advice_in([f"1 finding\n  {finding()}\nE   assert not findings"]) == [(text, "drain; reset")]


def test_the_same_advice_stands_once_and_lines_of_source_code_are_none():
    text = f"{finding()}\nE       what to do: reboot\n>       raise Error('what to do: nothing')\nwhat to do: reboot"
    assert [remedy for _, remedy in advice_in([text, text])] == ["drain; reset", "reboot"]
    assert advice_in(["585 TFLOPS < 700 TFLOPS", "", "what to do:", "someone: x (hardware): half a finding"]) == []


def test_a_hostile_text_takes_no_long_time_and_stays_bounded():
    text = "\n".join(
        ["a: " * 5000 + "x (hardware): " + "; allowed: " * 2000, *(f"what to do: {i}" for i in range(900))]
    )
    found = advice_in([text])
    assert len(found) == 64
    assert max(len(text) for each in found for text in each) <= 600


# ---- links to the files of the run

NODEID = "acceptance/test_links.py::test_links[node]"


def leave(folder, *names):
    for name in names:
        path = folder / ARTIFACTS / artifacts_name(NODEID) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1234567890" * 200)


def test_files_of_a_test_are_linked_relative_to_the_page(tmp_path):
    leave(tmp_path, "matrix.json", "deeper/curve.csv")
    links, more = RunFiles(folder=tmp_path, page_folder=None).of_test(NODEID)
    name = artifacts_name(NODEID)
    assert [name for name, _ in links] == ["matrix.json", "deeper/curve.csv"]
    assert links[0][1] == f"./{ARTIFACTS}/{name}/matrix.json"
    assert more == ""
    links, _ = RunFiles(folder=tmp_path, page_folder=tmp_path / "pages").of_test(NODEID)
    assert (tmp_path / "pages" / links[0][1]).resolve() == tmp_path / ARTIFACTS / name / "matrix.json"


def test_only_what_is_there_is_linked_and_links_out_of_the_run_are_not(tmp_path):
    for folder in (None, tmp_path):
        files = RunFiles(folder=folder, page_folder=None)
        assert (files.of_test(NODEID), files.of_the_run()) == (([], ""), [])
    (tmp_path / "secret").write_text("x")
    leave(tmp_path, "own.csv")
    place = tmp_path / ARTIFACTS / artifacts_name(NODEID)
    (place / "away").symlink_to(tmp_path / "secret")
    (place / "up").symlink_to(tmp_path, target_is_directory=True)
    assert [name for name, _ in files.of_test(NODEID)[0]] == ["own.csv"]
    (tmp_path / "journal.jsonl").write_text("{}\n")
    assert files.of_the_run() == [("journal.jsonl", "./journal.jsonl")]
