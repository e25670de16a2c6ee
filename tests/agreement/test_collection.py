import pytest

from pytest_gpucluster.agreement.rendezvous import collection_difference

NAMES = {rank: f"rank {rank} (gpu-{rank:02d})" for rank in range(8)}
TESTS = ["test_a.py::test_one", "test_a.py::test_two", "test_b.py::test_three"]


def compare(found, *, subset=False, expected=TESTS):
    return collection_difference(expected, found, NAMES, subset=subset)


def message(found, *, expected=TESTS):
    told = compare(found, expected=expected)
    return told[0]


def test_ranks_with_the_same_tests_in_any_order_agree():
    assert compare({1: list(TESTS), 2: TESTS[::-1]}) is None
    assert compare({}) is None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(TESTS[:2], f"rank 1 (gpu-01) lacks 1 test ({TESTS[2]})", id="one is missing"),
        pytest.param(TESTS[:1], f"rank 1 (gpu-01) lacks 2 tests ({TESTS[1]}, …)", id="two are missing"),
        pytest.param([*TESTS, "x.py::t"], "rank 1 (gpu-01) alone has 1 test (x.py::t)", id="one is too many"),
        pytest.param([*TESTS, TESTS[0]], f"rank 1 (gpu-01) alone has 1 test ({TESTS[0]})", id="one comes twice"),
        pytest.param(
            [*TESTS[1:], "x.py::t"],
            f"rank 1 (gpu-01) lacks 1 test ({TESTS[0]}) and alone has 1 test (x.py::t)",
            id="both",
        ),
    ],
)
def test_the_message_says_who_lacks_or_alone_has_what(found, expected):
    assert message({1: found, 2: list(TESTS)}) == f"different tests collected: {expected}"


def test_a_test_that_rank_0_has_twice_and_another_once_is_missing_there():
    assert message({1: TESTS}, expected=[*TESTS, TESTS[0]]).endswith(f"lacks 1 test ({TESTS[0]})")
    assert len(message({1: []}, expected=["t.py::test[" + "x" * 500 + "]"])) == 200


def test_ranks_that_deviate_alike_are_told_together():
    told = compare({1: TESTS[:2], 2: TESTS[:2], 3: TESTS[:2], 4: list(TESTS), 5: [*TESTS, "x.py::t"]})
    message, diff = told
    assert message.endswith(f": ranks 1-3 lack 1 test ({TESTS[2]})")
    assert diff.split("\n\n") == [
        f"rank 0 against ranks 1-3:\n- {TESTS[2]}    (only on rank 0, missing on ranks 1-3)",
        "rank 0 against rank 5:\n+ x.py::t    (only on rank 5)",
    ]


def test_what_rank_0_left_out_by_its_cache_may_be_known_elsewhere():
    assert compare({1: [*TESTS, "x.py::t"]}, subset=True) is None
    assert compare({1: TESTS[:2]}, subset=True) is not None


# ---- workloads -------------------------------------------------------------------------------------------------------

FULL = ["profile = full", "matmul.sizes = 4096, 8192", "hbm.sizes = 8 GiB"]
OTHER = [*FULL[:2], "hbm.sizes = 8 GB"]


def test_a_different_value_of_the_workload_is_named_with_its_rank_and_host():
    assert collection_difference(FULL, {1: FULL}, NAMES, subset=False, kind="value") is None
    told = collection_difference(FULL, {0: FULL, 2: OTHER}, NAMES, subset=False, kind="value")
    message, text = told
    assert message == (
        "different workloads: rank 2 (gpu-02) lacks 1 value (hbm.sizes = 8 GiB) and alone has 1 value"
        " (hbm.sizes = 8 GB)"
    )
    assert "- hbm.sizes = 8 GiB " in text
    assert "+ hbm.sizes = 8 GB " in text
    assert "workloads.yaml" in text


def test_a_workload_that_only_some_ranks_have_is_a_difference_unless_rank_0_left_tests_out_by_its_cache():
    for first, other in ((FULL, []), ([], FULL)):
        assert collection_difference(first, {1: other}, NAMES, subset=False, kind="value") is not None
    assert collection_difference([], {1: FULL}, NAMES, subset=True, kind="value") is None
    assert collection_difference(FULL, {1: []}, NAMES, subset=True, kind="value") is not None
