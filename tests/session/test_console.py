"""What rank 0 says on pytest's terminal: a header, a line for each criterion beside pytest's own word, a summary."""

import re

import pytest

from pytest_gpucluster.judge import loader

SUITE = """
    import pytest

    @pytest.mark.criterion("speed")
    @pytest.mark.parametrize("dtype", ["bf16", "fp32"])
    def test_speed(dtype, measure):
        measure(f"matmul.{dtype}.tflops", 2.0, unit="TFLOPS", samples=[2.0] * 8, n=256)

    @pytest.mark.criterion("slow")
    def test_slow(measure):
        measure("matmul.fp32.tflops", 1.0, unit="MFLOPS", n=256)

    def test_plain():
        pass

    def test_also_plain():
        pass

    @pytest.mark.criterion("fabric")
    @pytest.mark.needs_ranks(2)
    def test_fabric(measure):
        pass
    """


@pytest.fixture(autouse=True)
def at_80_columns(project, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("GPUCLUSTER_HOSTNAME", "node-a")


def between(left, first, last):
    """The lines of the terminal from one that begins so to one that begins so."""
    lines = left.stdout.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(first))
    end = next(number for number, line in enumerate(lines) if number > begin and line.startswith(last))
    return lines[begin:end]


def test_a_criterion_has_a_line_of_its_own(project):
    project.suite(SUITE)
    left = project.run()
    told = between(left, "test_it.py", "===")
    assert [line.rstrip() for line in told if line] == [
        "test_it.py",
        "  PASSED  speed[bf16]               2 >= 0.0001 TFLOPS, 20000 x",
        "  PASSED  speed[fp32]               2 >= 0.0005 TFLOPS, 4000 x",
        "  FAILED  slow                      node-a (rank 0): 0.000001 < 0.0005",
        "          TFLOPS, -99.8 %",
        "..",
        "  SKIPPED fabric                    needs 2 ranks, and there is 1        [100%]",
    ]


def test_verbose_has_the_number_under_the_word_and_the_short_summary_begins_with_the_culprit(project, monkeypatch):
    project.suite(SUITE)
    monkeypatch.setenv("COLUMNS", "100")
    left = project.run("-v", "-rA")
    told = "\n".join(line.rstrip() for line in between(left, "test_it.py::", "==="))
    value = r"2 >= 0\.0001 TFLOPS, 20000 x, rank 0 \(\S+\)"
    passed = rf"^test_it\.py::test_speed\[bf16\] PASSED +\[ 16%\]\n    {value}$"
    assert re.search(passed, told, re.MULTILINE), told
    failed = r"^test_it\.py::test_slow FAILED +\[ 50%\]\n    node-a \(rank 0\): 0\.000001 < 0\.0005 "
    assert re.search(failed, told, re.MULTILINE), told
    assert "test_it.py::test_plain PASSED" in told
    assert "\n\ntest_it" not in told
    assert "matmul.bf16.tflops{n=256}: 2 TFLOPS" in " ".join(left.stdout.partition("Criteria:")[2].split())
    summary = left.stdout.partition("short test summary info")[2]
    assert "PASSED test_it.py::test_speed[bf16]\n" in summary
    named = r"^FAILED test_it\.py::test_slow - node-a \(rank 0\): 0\.000001 < "
    assert re.search(named, summary, re.MULTILINE), summary
    # On record it stays as it was judged.
    assert left.verdicts["test_slow"].startswith("failure: matmul.fp32.tflops 0.000001 TFLOPS < 0.0005 TFLOPS")


def test_the_summary_tells_what_the_journal_cannot(project):
    # The recorder is stopped, as it is on a disk that takes nothing: what rank 0 has sent it knows by itself.
    project.suite(
        """
        import os, pytest, signal

        @pytest.mark.criterion("speed")
        def test_speed(measure):
            measure("matmul.fp32.tflops", 2, unit="GFLOPS", samples=[2] * 8)

        @pytest.mark.criterion("last")
        def test_last(measure, request):
            from pytest_gpucluster.session.run import RUN
            os.kill(request.config.stash[RUN].recorder.pid, signal.SIGKILL)
            measure("matmul.fp32.tflops", 2, unit="GFLOPS", samples=[2] * 8)
        """
    )
    left = project.run()
    assert left.exit == 11
    assert re.search(r"^other +2 OK  0\.002 >= ", left.stdout, re.MULTILINE), left.stdout
    assert left.stdout.splitlines()[-1].startswith("REHEARSAL, BROKEN (")


def test_a_name_cannot_act_on_the_terminal(project):
    project.suite(
        """
        import pytest

        @pytest.mark.criterion("speed")
        @pytest.mark.parametrize("size", [pytest.param(1, id="\\x1b[2J\\u202e"), pytest.param(2, id="x" * 3000)])
        def test_speed(size, measure):
            measure("matmul.fp32.tflops", 2, unit="GFLOPS", samples=[2] * 8, label="\\x1b[2J")
        """
    )
    left = project.run("-v")
    assert left.exit == 0, left.output
    assert "\x1b" not in left.stdout
    assert "\u202e" not in left.stdout.partition("Criteria:")[2]
    assert "Criteria:" in left.stdout


def test_local_workers_are_told_once_for_all(project):
    project.suite(SUITE)
    left = project.run_apart(
        "-n", "2", "--dist", "each", "--max-worker-restart=0", "-p", "no:randomly", more={"COLUMNS": "80"}
    )
    assert left.exit == 1, left.output
    lines = left.stdout.splitlines()
    assert len([line for line in lines if line.startswith("  PASSED  speed[bf16]")]) == 1, left.output
    assert len([line for line in lines if line.startswith("  FAILED  slow")]) == 1
    # Both workers have told who they are before the first test is judged.
    assert re.search(r"^FAILED test_it\.py::test_slow - all 2 ranks: ", left.stdout, re.MULTILINE), left.output
    assert lines.count("gpucluster limits: cpu-rehearsal, from " + str(loader.shipped_path())) == 1, left.output
    assert len([line for line in lines if line.startswith("gpucluster cluster: 1 node x 2 CPU ranks")]) == 1
    assert "1 FAILED: slow" in left.stdout
    # pytest 8 writes how far it is behind whatever stands there.
    own = [re.sub(r"(\s*\[ *\d+%\]\.?)+$", "", line) for line in lines if line.startswith("  ")]
    assert max(map(len, own)) <= 80, [x for x in own if len(x) > 80]
