"""pytest's options mean under torchrun what they mean in plain pytest, also where only rank 1 falls short.

Each of them is given to plain pytest too, over the same suite, in which the tests then fail by themselves. What ran, in
which order, and pytest's own summary must be the same, on both ranks.
"""

import json
import re
import sys

import pytest
from sessions import Process, environment
from torchrun import start, torchrun, write_suite

SUITE = {
    "conftest.py": """
        import os
        import pytest
        from stamps import all_reduce, stamp

        @pytest.fixture
        def together(request):
            stamp(request.node.name)
            if "PLAIN" not in os.environ:
                return lambda: all_reduce(request.getfixturevalue("cluster"))
            return lambda: None
    """,
    "test_it.py": """
        import os
        import pytest
        from stamps import RANK

        FALLS_SHORT = RANK == 1 or "PLAIN" in os.environ

        def test_1(together):
            together()
            print("printed by test_1")

        def test_2(together):
            together()
            assert not FALLS_SHORT

        def test_3(together):
            together()

        @pytest.mark.slow
        def test_4(together):
            assert not FALLS_SHORT
            together()

        @pytest.mark.slow
        def test_5(together):
            together()

        def test_6(together):
            pytest.skip("not today")

        @pytest.mark.xfail(reason="known")
        def test_7(together):
            together()
            assert not FALLS_SHORT
    """,
}
INI = "markers =\n    slow\ncache_dir = cache-$RANK\n"
OLD_CACHE = {"test_it.py::test_1": True}
QUIET = ["-W", "ignore::pytest.PytestConfigWarning"]  # of ini settings whose plugin is not there
EVERYTHING = [f"test_{number}" for number in range(1, 8)]

# In this order, since the first ones leave a cache for the later ones.
OPTIONS = {
    "last failed, without a cache": ["--lf", "-v", "-rA", "--durations=2", "--durations-min=0"],
    "last failed": ["--lf", "-q"],
    "exit first": ["-x"],
    "selected": ["-k", "not test_5", "-m", "not slow", "--deselect", "test_it.py::test_6", "-v"],
    "collect only": ["--collect-only", "-q"],
}
RAN = {
    "last failed, without a cache": EVERYTHING,
    "last failed": ["test_2", "test_4"],
    "exit first": ["test_1", "test_2"],
    "selected": ["test_1", "test_2", "test_3", "test_7"],
    "collect only": [],
}


class Plain:
    """Plain pytest over the same suite."""

    def __init__(self, directory, options):
        (directory / "stamps").mkdir(exist_ok=True)
        (directory / "stamps" / "rank0.txt").unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            ".",
            "-p",
            "no:gpucluster",
            "-p",
            "no:hypothesispytest",
            "-p",
            "no:anyio",
        ]
        command += [*QUIET, *options, f"--junitxml={directory / 'report.xml'}"]
        environ = environment({"PLAIN": "1", "RANK": "0", "STAMPS": str(directory / "stamps")})
        with Process(command, directory / "suite", environ, forked=True) as process:
            self.output = process.wait().stdout
        stamps = directory / "stamps" / "rank0.txt"
        self.ran = [line.split()[0] for line in stamps.read_text().splitlines()] if stamps.exists() else []


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What every option did: name -> the run under torchrun, and plain pytest's."""
    ours, plain = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("plain")
    for directory in (ours, plain):
        write_suite(directory, SUITE, INI)
    old = ours / "suite" / "cache-1" / "v" / "cache" / "lastfailed"
    old.parent.mkdir(parents=True)
    old.write_text(json.dumps(OLD_CACHE))
    found = {}
    for name, options in OPTIONS.items():
        for path in (ours / "stamps").glob("*"):
            path.unlink()
        (ours / "output0.txt").unlink(missing_ok=True)
        (ours / "report.xml").unlink(missing_ok=True)
        run = torchrun(ours, None, *QUIET, *options, deadline=20.0)
        seen = {"output": run.output, "stamps": run.stamps, "exits": run.exits, "left over": run.left_over}
        if name != "collect only":
            seen |= {"end": run.end, "verdicts": run.verdicts}
        found[name] = (seen, Plain(plain, options))
    assert json.loads(old.read_text()) == OLD_CACHE, "rank 1 has written its cache"
    return found


def shown_tests(output):
    """What tells of each test once: of -v, of -q, of --collect-only."""
    one_each = r"^test_it\.py::test_\d(?: (?:PASSED|FAILED|SKIPPED|XFAIL)|$)|^[F.]{2,}"
    return re.findall(one_each, output, re.MULTILINE)


def summary(output):
    found = re.findall(r"^=* ?((?:\d+ \w+(?:, )?)+) in [\d.:s() ]+", output, re.MULTILINE)
    return found[-1] if found else None


@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_tests_run_in_the_same_order_and_are_told_as_in_plain_pytest(runs, name):
    seen, plain = runs[name]
    assert plain.ran == RAN[name], plain.output
    for rank in (0, 1):
        assert [stamp.name for stamp in seen["stamps"].get(rank, [])] == RAN[name], seen["output"]
    assert seen["left over"] == []
    assert seen["output"].count("test session starts") <= 1, "only rank 0 prints"
    assert shown_tests(seen["output"]) == shown_tests(plain.output)
    assert shown_tests(plain.output) or name == "exit first"
    if name == "collect only":
        assert seen["exits"] == [0]
        return
    assert summary(plain.output), plain.output
    assert summary(seen["output"]) == summary(plain.output), seen["output"]
    assert seen["exits"] == [1]
    assert seen["end"] == ("REJECTED", 1, "rank 0")
    assert seen["verdicts"]["test_2"].startswith("failure: rank 1 (node-a): AssertionError")


def test_r_and_durations_report_what_they_report_in_plain_pytest(runs):
    seen, plain = runs["last failed, without a cache"]
    for output in (seen["output"], plain.output):
        assert "PASSES" in output
        assert "printed by test_1" in output
        assert "slowest 2 durations" in output
        for line in ("PASSED test_it.py::test_1", "FAILED test_it.py::test_2", "XFAIL test_it.py::test_7"):
            assert len(re.findall(f"^{line}", output, re.MULTILINE)) == 1, line


def test_exit_first_says_so(runs):
    seen, plain = runs["exit first"]
    words = "stopping after 1 failures"
    assert words in plain.output
    assert words in seen["output"]
    not_run = [test for test in EVERYTHING if test not in RAN["exit first"]]
    assert all(seen["verdicts"][test].startswith("skipped: not run: ") for test in not_run)


RERUN = {
    "test_flaky.py": """
        from stamps import RANK, all_reduce, stamp

        ATTEMPTS = []

        def test_flaky(cluster):
            ATTEMPTS.append(1)
            stamp(f"flaky{len(ATTEMPTS)}")
            assert all_reduce(cluster, elements=len(ATTEMPTS)).tolist() == [2.0] * len(ATTEMPTS)
            if RANK == 1 and len(ATTEMPTS) == 1:
                raise RuntimeError("only the first time")
            all_reduce(cluster, elements=10 + len(ATTEMPTS))

        def test_always(cluster):
            stamp("always")
            assert RANK == 0
            all_reduce(cluster)

        def test_next(cluster):
            stamp("next")
            assert all_reduce(cluster, elements=99).tolist() == [2.0] * 99
    """
}


def test_reruns_stay_in_step(tmp_path):
    run = torchrun(tmp_path, RERUN, "--reruns=1", "-rR", deadline=20.0)
    for rank in (0, 1):
        assert [s.name for s in run.stamps[rank]] == ["flaky1", "flaky2", "always", "always", "next"], run.output
    assert run.verdicts == {
        "test_flaky": "passed",
        "test_always": "failure: rank 1 (node-a): AssertionError: assert 1 == 0",
        "test_next": "passed",
    }
    assert [(result.outcome, result.attempts) for result in run.journal.results] == [
        *(("passed", 2), ("failed", 2), ("passed", 1))
    ]
    assert "2 rerun" in run.output
    assert run.end == ("REJECTED", 1, "rank 0")


@pytest.mark.parametrize(
    ("option", "way_out"),
    [
        (["-n", "2"], "pytest -n <GPUs> --dist each --max-worker-restart=0 -m single_gpu"),
        (["--pdb"], "Run plain pytest on one GPU to debug"),
    ],
    ids=["-n", "--pdb"],
)
def test_what_cannot_work_under_torchrun_is_a_usage_error_with_the_way_out(tmp_path, option, way_out):
    run = start(tmp_path, SUITE, *option, ini=INI).wait()
    assert run.exits == [1]
    assert way_out in run.output
    assert [line[: len(option[0]) + 7] for line in run.output.splitlines() if line.startswith("ERROR: ")] == [
        f"ERROR: {option[0]}"
    ]
    assert run.stamps == {}
    assert run.end == ("BROKEN", 4, "rank 0")
    assert run.left_over == []
