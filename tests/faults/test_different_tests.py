"""Ranks that collect different tests: nothing is run, and the difference is shown."""

import re

from torchrun import torchrun

SAME = """
from stamps import meet

def test_same(cluster):
    meet(cluster, "nothing")
"""


def nothing_ran(run, exit_code=11):
    assert run.find_stamp("after_nothing", 0) is None
    assert run.find_stamp("after_nothing", 1) is None
    assert run.end == ("BROKEN", exit_code, "rank 0")
    assert run.exits == [1]
    assert run.left_over == []


def test_a_test_that_only_rank_1_has_is_named_with_a_diff(tmp_path):
    files = {
        "test_same.py": SAME,
        "test_sizes.py": """
            import pytest
            from stamps import RANK

            @pytest.mark.parametrize("size", [1, 2] if RANK == 0 else [1, 2, 4])
            def test_size(size):
                pass
        """,
    }
    run = torchrun(tmp_path, files)
    expected = "different tests collected: rank 1 (node-a) alone has 1 test (test_sizes.py::test_size[4])"
    assert run.verdicts["collection"] == f"error: {expected}", run.output
    assert "+ test_sizes.py::test_size[4]    (only on rank 1)" in run.body("collection")
    assert "+ test_sizes.py::test_size[4]    (only on rank 1)" in run.output
    for name in ("test_same", "test_size[1]", "test_size[2]"):
        assert run.verdicts[name] == f"skipped: not run: {expected}"
    nothing_ran(run)


def test_a_module_that_only_rank_1_cannot_import_is_named(tmp_path):
    files = {
        "test_same.py": SAME,
        "test_import.py": """
            from stamps import RANK

            if RANK == 1:
                import no_such_module

            def test_imported():
                pass
        """,
    }
    run = torchrun(tmp_path, files)
    expected = (
        "different tests collected: rank 1 (node-a) cannot collect test_import.py: "
        "ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert run.verdicts["collection"] == f"error: {expected}", run.output
    assert "import no_such_module" in run.body("collection")
    nothing_ran(run)


def test_a_module_that_no_rank_can_import_is_an_error_as_in_plain_pytest(tmp_path):
    files = {"test_same.py": SAME, "test_import.py": "import no_such_module\n"}
    run = torchrun(tmp_path, files)
    assert "ERROR test_import.py" in run.output
    assert "No module named 'no_such_module'" in "".join(run.body(name) for name in run.verdicts), run.verdicts
    nothing_ran(run, exit_code=2)


def test_rank_0_s_order_is_everybodys(tmp_path):
    files = {
        "conftest.py": """
            from stamps import RANK

            def pytest_collection_modifyitems(items):
                if RANK == 1:
                    items.reverse()
        """,
        "test_order.py": """
            import pytest
            from stamps import all_reduce, stamp

            @pytest.mark.parametrize("number", range(5))
            def test_order(cluster, number):
                assert all_reduce(cluster, elements=number + 1).tolist() == [2.0] * (number + 1)
                stamp(f"order{number}")
        """,
    }
    run = torchrun(tmp_path, files)
    assert run.end == ("REHEARSED", 0, "rank 0"), run.output
    for rank in (0, 1):
        assert [stamp.name for stamp in run.stamps[rank]] == [f"order{number}" for number in range(5)]
    assert run.left_over == []


def test_a_rank_that_hangs_while_it_collects_is_named_with_its_stack(tmp_path):
    files = {
        "test_same.py": SAME,
        "test_slow.py": """
            import time
            from stamps import RANK

            if RANK == 1:
                time.sleep(600)
        """,
    }
    run = torchrun(tmp_path, files, timeouts="join=10,stuck=1")
    named = re.compile(r"error: rank 1 \(node-a\) .* collection: .* test_slow\.py:6 in ")
    assert any(map(named.match, run.verdicts.values())), run.verdicts
    nothing_ran(run)
