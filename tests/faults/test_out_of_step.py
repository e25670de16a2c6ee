"""A rank that is at another point of the session than the others: the run ends with its name, and nothing hangs."""

import pytest
from torchrun import torchrun

SUITE = {
    "conftest.py": """
        import os
        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_protocol(item):
            astray = os.environ["RANK"] == os.environ["ASTRAY"]
            return True if astray and item.name == os.environ["LEFT_OUT"] else None
    """,
    "test_it.py": """
        from stamps import all_reduce

        def test_first(cluster):
            all_reduce(cluster)

        def test_second():
            assert True

        def test_last():
            assert True
    """,
}


@pytest.mark.parametrize(
    ("ranks", "astray", "left_out", "culprit", "passed"),
    [
        pytest.param(2, 1, "test_second", "rank 1", {"test_first"}, id="rank 1, in the middle"),
        pytest.param(2, 1, "test_last", "rank 1", {"test_first", "test_second"}, id="rank 1, at the end"),
        pytest.param(3, 0, "test_second", "rank 0", {"test_first"}, id="rank 0, which most are not with"),
    ],
)
def test_a_rank_that_is_out_of_step_ends_the_run_with_its_name(tmp_path, ranks, astray, left_out, culprit, passed):
    environment = {"ASTRAY": str(astray), "LEFT_OUT": left_out}
    run = torchrun(tmp_path, SUITE, ranks=ranks, environment=environment, deadline=5)
    verdict, code, by = run.end
    assert (verdict, code, by) == ("BROKEN", 11, "rank 0")
    assert "out of step" in run.journal.reason
    assert f"{culprit} at " in run.journal.reason
    assert {name for name, outcome in run.verdicts.items() if outcome == "passed"} == passed
    assert run.left_over == []
