"""The fixture ``progress``: what rank 0's terminal shows of a long test, and that nothing else shows it.

tests/acceptance/test_acceptance_links.py those of the ranks of torchrun.
"""

import pytest

from pytest_gpucluster.session.reporting import PLAIN_SECONDS, Progress, progress_of


class Steps:
    """A progress whose clock stands still until it is moved. Its lines that stay are kept."""

    def __init__(self):
        self.time = 0.0
        self.shown = []
        self.progress = Progress(self.shown.append, "test_it", now=lambda: self.time)

    def after(self, seconds, step, of=100, **figures):
        """Take a step, and return all that was shown by then."""
        self.time += seconds
        self.progress(step, of, **figures)
        return self.shown


def test_a_plain_line_comes_now_and_then_and_for_the_last_step():
    steps = Steps()
    assert steps.after(0, 1) == []
    assert steps.after(PLAIN_SECONDS - 0.1, 2) == []
    shown = steps.after(0.1, 11, loss=2.0, tokens_per_second=8573.4)
    assert shown == ["test_it: step 11 of 100, loss 2, 8,573 tokens/s, 1:29 left"]
    assert len(steps.after(PLAIN_SECONDS / 2, 20)) == 1
    assert steps.after(0.1, 100)[1:] == ["test_it: step 100 of 100"]


@pytest.mark.parametrize("odd", [(0, 0), (12, 10), (-3, 10)])
def test_odd_numbers_of_steps_fail_no_test(odd):
    steps = Steps()
    for _ in range(3):
        steps.after(11, *odd)


def test_ranks_above_0_show_nothing_at_no_cost(pytestconfig):
    def unread():
        raise AssertionError("a figure was read")

    progress_of(pytestconfig, "test_it", rank=1)(1, 1, loss=unread)


# In a session ----------------------------------------------------------------------------------------------------

SUITE = """
    import pytest

    def test_first(progress):
        print("printed")
        for step in range(1, 4):
            progress(step, 3, loss=1 / step)

    def test_second(progress):
        progress(1, 1)
        assert False

    def test_third():
        pass
    """


@pytest.mark.parametrize(
    ("options", "is_apart"),
    [((), True), (("--capture=no",), False), (("--capture=sys",), False), (("-v",), False)],
    ids=["usual", "uncaptured", "sys", "verbose"],
)
def test_the_last_step_is_a_plain_line_of_its_own_and_no_report_holds_it(project, options, is_apart):
    project.suite(SUITE)
    left = (project.run_apart if is_apart else project.run)(*options, "-o", "junit_logging=all")
    lines = left.stdout.splitlines()
    assert lines.count("test_first: step 3 of 3, loss 0.3333") == 1
    assert lines.count("test_second: step 1 of 1") == 1
    assert [name for name, verdict in left.verdicts.items() if verdict == "passed"] == ["test_first", "test_third"]
    assert "step 3" not in (project.path / "report.xml").read_text()
    assert "step 3" not in str(left.journal)


def test_quiet_is_silent_and_without_a_terminal_reporter_the_test_goes_on(project):
    project.suite("def test_it(progress): progress(1, 1)")
    assert "step" not in project.run("-q").output
    assert project.run("-p", "no:terminal").exit == 0
