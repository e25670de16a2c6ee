"""Two runs compared: what has changed, and the answer."""

from each import of_each
from written_runs import HBM, MATMUL, case, measured, place, read, write

from pytest_gpucluster.analysis.compare import compare_runs
from pytest_gpucluster.analysis.run_view import RunView, without_samples
from pytest_gpucluster.journal import journal


def found(old, new, **more):
    return compare_runs(RunView.of(old), RunView.of(new), **more)


def one(*values, **more):
    return read(case(MATMUL, "passed", measured(values, **more)))


def of(metric, *values, **more):
    return one(*values, metric=metric, **more)


BOUNDS = {"min": 1.0, "max": 2.0}
BUSBW, BEST, LATENCY = "nccl.all_reduce.busbw", "matmul.bf16.best_tflops", "nccl.all_reduce.latency"
BEFORE = one(730, 730)
ANSWERS = {
    "the same": (BEFORE, one(730, 730), "NO REGRESSION", "same"),
    "one rank is slower": (BEFORE, one(730, 600), "REGRESSION", "regressed"),
    "a little slower": (BEFORE, one(730, 720), "NO REGRESSION", "worse"),
    "too noisy to say": (BEFORE, one(730, 600, width=0.9), "UNDECIDED", "unsure"),
    "no number now": (BEFORE, one(730, "NaN"), "UNDECIDED", "not comparable"),
    "a rank has no value now": (BEFORE, one(730), "UNDECIDED", "missing"),
    "a rank had no value before": (one(730), BEFORE, "UNDECIDED", "missing"),
    "better": (BEFORE, one(730, 900), "NO REGRESSION", "same"),
    "another size is another value": (one(730, n="1"), one(730, n="2"), "NOT COMPARABLE", "missing"),
    "in another unit": (BEFORE, one(730, 730, unit="GFLOPS"), "NOT COMPARABLE", "not comparable"),
    "a fall back to sockets is no missing value": (
        of(BUSBW, 40, 41, transport="NET/IB"),
        of(BUSBW, 4, 5, transport="NET/Socket"),
        "REGRESSION",
        "regressed",
    ),
    "another winner of a search is no missing value": (
        of(BEST, 740, 740, n="8192", layout="nn"),
        of(BEST, 600, 600, n="13312", layout="nt"),
        "REGRESSION",
        "regressed",
    ),
    "less is better": (of(LATENCY, 20, 20), of(LATENCY, 30, 30), "REGRESSION", "regressed"),
    "a state decides nothing": (
        of("gpu.temperature", 60, 60),
        of("gpu.temperature", 80, 80),
        "NOT COMPARABLE",
        "regressed",
    ),
    "what no limit judges decides nothing": (
        one(730, 730, status="recorded"),
        one(600, 600, status="recorded"),
        "NOT COMPARABLE",
        "regressed",
    ),
    "it is unknown whether more is better": (
        of("not.known", 60, limit=BOUNDS),
        of("not.known", 60, limit=BOUNDS),
        "NOT COMPARABLE",
        "not comparable",
    ),
}


@of_each("case", list(ANSWERS))
def test_the_answer_follows_from_the_values(case):
    old, new, answer, kind = ANSWERS[case]
    compared = found(old, new)
    assert (compared.answer, compared.changes[0].kind) == (answer, kind)


ENDINGS = {
    ("passed", "failed"): "REGRESSION",
    ("passed", "error"): "UNDECIDED",
    ("passed", "skipped"): "UNDECIDED",
    ("skipped", "passed"): "UNDECIDED",
    ("failed", "passed"): "NO REGRESSION",
    ("failed", "failed"): "NO REGRESSION",
    ("skipped", "skipped"): "NO REGRESSION",
}


@of_each("endings", list(ENDINGS))
def test_how_a_test_has_ended_counts_too(endings):
    before, now = endings
    good = case(MATMUL, "passed", measured([730, 730]))
    compared = found(
        read(good, case(HBM, before)), read(good, case(HBM, now, message="slow" if now != "passed" else ""))
    )
    assert compared.answer == ENDINGS[endings]
    whys = [pair.why for change in compared.changes if change.judged is None for pair in change.pairs]
    assert len(whys) == (endings != ("skipped", "skipped"))
    assert [why for why in whys if not why.startswith(f"{before} before")] == []
    assert ("slow" in "".join(whys)) is (before == "passed")


def test_a_test_that_only_one_run_has_is_missing_and_partial_passes_over_it():
    both = case(MATMUL, "passed", measured([730, 730]))
    long, short = read(both, case(HBM, "passed", measured([3.0, 3.0], "hbm.copy.bandwidth"))), read(both)
    for old, new in ((long, short), (short, long)):
        assert found(old, new).answer == "UNDECIDED"
        assert found(old, new, partial=True).answer == "NO REGRESSION"
    broke = read(both, case(HBM, "error", message="lost"))
    assert found(long, broke, partial=True).answer == "UNDECIDED", "a test that broke is no test that was left out"
    assert found(long, read(), partial=True).answer == "NOT COMPARABLE"
    failed = read(both, case(HBM, "failed", message="slow"))
    assert found(short, failed, partial=True).answer == "UNDECIDED", "what failed is never passed over"
    skipped = read(both, case(HBM, "skipped"))
    assert found(skipped, short).answer == "NO REGRESSION", "no run has ever run that test"


def test_a_run_that_was_killed_says_in_which_test():
    both = case(MATMUL, "passed", measured([730, 730]))
    old = read(both, case(HBM, "passed"))
    for after in ([], [HBM]):  # the run ended in the second test, and before it
        new = read(
            both, collected=[MATMUL, HBM], then=[{"type": "start", "nodeid": each} for each in after], closed=False
        )
        assert found(old, new, partial=True).answer == "UNDECIDED", "that test was not left out on purpose"
    compared = found(old, new)
    assert compared.answer == "UNDECIDED"
    assert any("not run now" in change.worst.why for change in compared.changes)


def test_ranks_are_matched_by_their_gpus():
    swapped = (place(0, uuid="GPU-gpu-a-1"), place(1, uuid="GPU-gpu-a-0"))
    old = read(case(MATMUL, "passed", measured([700, 600])))
    new = read(case(MATMUL, "passed", measured([600, 700])), ranks=swapped)
    assert found(old, new).answer == "NO REGRESSION"
    assert found(old, read(case(MATMUL, "passed", measured([600, 700])))).answer == "REGRESSION"


def test_a_replaced_gpu_is_compared_with_the_one_that_was_in_its_slot():
    new = read(case(MATMUL, "passed", measured([730, 600])), ranks=(place(0), place(1, uuid="GPU-new")))
    [change] = found(one(730, 730), new).changes
    assert (change.kind, change.worst.matched_by) == ("regressed", "slot")
    assert "GPU-gpu-a-1" in change.worst.why


def test_of_the_whole_cluster_there_is_one_value_from_any_rank():
    old = read(case(MATMUL, "passed", measured({0: 0.98}, "scaling.efficiency", unit="ratio")))
    new = read(case(MATMUL, "passed", measured({1: 0.80}, "scaling.efficiency", unit="ratio")))
    [change] = found(old, new).changes
    assert (change.kind, len(change.pairs)) == ("regressed", 1)


def test_runs_of_another_kind_have_no_answer_and_no_changes():
    compared = found(one(730, 730), read(case(MATMUL, "passed", measured([730, 730])), sku="H200 SXM"))
    assert (compared.answer, compared.changes) == ("NOT COMPARABLE", ())
    [obstacle] = compared.obstacles
    assert "H100 SXM before, H200 SXM" in obstacle


def test_samples_make_an_interval_where_the_journal_has_none():
    def run(values):
        line = {**measured([sum(values) / len(values)], width=None), "samples": {"0": values}}
        return read(case(MATMUL, "passed", line), ranks=(place(0),))

    assert found(run([90, 100, 110] * 4), run([84, 94, 104] * 4)).answer == "UNDECIDED"
    assert found(run([99, 100, 101] * 4), run([93, 94, 95] * 4)).answer == "REGRESSION"


def test_a_journal_read_without_its_samples_gives_the_same_answer(tmp_path):
    line = {**measured([100], width=None), "samples": {"0": [90, 100, 110, 101]}, "telemetry": {"0": {"sm_clock": 1}}}
    path = write(tmp_path, case(MATMUL, "passed", line, measured([730, 731], n="2")), ranks=(place(0), place(1)))
    small = journal.read(path, slim=without_samples)
    assert RunView.of(small) == RunView.of(journal.read(path))
    assert [(each.samples, each.telemetry) for each in small.results[0].measurements] == [({}, {}), ({}, {})]
