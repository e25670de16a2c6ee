"""What is raised, and as what: on one rank. With more, tests/acceptance/test_acceptance_checkpoint.py."""

from __future__ import annotations

import pytest

from pytest_gpucluster.benchmarks.group import on_all_ranks, on_first_rank
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult


def failing(error):
    def act():
        raise error

    return act


def test_values_come_back(group):
    assert on_all_ranks(group, lambda: {"a": 1}) == [{"a": 1}]
    assert on_first_rank(group, lambda: "b") == "b"


@pytest.mark.parametrize("how", [on_all_ranks, on_first_rank])
def test_an_error_is_raised_as_one_that_says_which_rank_and_what_is_no_error_as_it_is(group, how):
    for error, kind, text in [
        (WrongResult("x is wrong"), WrongResult, "rank 0: x is wrong"),
        (ValueError("no"), ValueError, "rank 0: no"),
        (EnvironmentBroken("full"), EnvironmentBroken, "rank 0: full"),
        (OSError(28, "full"), EnvironmentBroken, "rank 0: OSError: [Errno 28] full"),
        (RuntimeError("lost"), EnvironmentBroken, "rank 0: RuntimeError: lost"),
    ]:
        with pytest.raises(kind) as caught:
            how(group, failing(error))
        assert (type(caught.value), str(caught.value)) == (kind, text)
        assert caught.value.__cause__ is error
    with pytest.raises(KeyboardInterrupt):
        how(group, failing(KeyboardInterrupt()))
