import re
import traceback
import weakref
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from pytest_gpucluster.session.reporting import let_go, line_of, skip_reason, summary_of, traceback_of

# Rank 0's report of a failed call, replaced as the plugin replaces it. What the ranks agreed on comes from the test.
CONFTEST = """
import pytest
from pytest_gpucluster.agreement.exchange import Merged
from pytest_gpucluster.session.reporting import MergedRepr, line_of

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    if report.failed:
        merged = Merged(outcome="failed", **MERGED)
        report.longrepr = MergedRepr(merged, report)
        print("LINE:", line_of(report))
        print("TEXT:", report.longreprtext.splitlines()[0])
"""
TEST = """
def test_it():
    value = 41
    assert value == 42
"""
QUICK = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")  # what takes time and plays no part here
OTHERS = {
    "message": "rank 3 (gpu-07): AssertionError: boom",
    "text": "rank 3 (gpu-07): failed\\ndef test_it():\\nE   AssertionError: boom",
    "culprits": [3],
    "released": [0],
}


@pytest.fixture
def printed(pytester, monkeypatch):
    """Run one failing test whose report says what the ranks agreed on; return what pytest prints."""

    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments, **merged):
        pytester.makeconftest(CONFTEST.replace("MERGED", repr(merged)).replace("\\\\n", "\\n"))
        pytester.makepyfile(test_it=TEST)
        result = pytester.runpytest_inprocess(*QUICK, "-s", *arguments)
        result.assert_outcomes(failed=1)
        return result

    return run


def test_a_failure_of_another_rank_is_shown_instead_of_rank_0s_own(printed):
    result = printed(**OTHERS)
    result.stdout.fnmatch_lines(
        [
            "*LINE: rank 3 (gpu-07): AssertionError: boom",
            "TEXT: rank 3 (gpu-07): failed",
            "*= FAILURES =*",
            "rank 3 (gpu-07): failed",
            "E   AssertionError: boom",
            "FAILED test_it.py::test_it - rank 3 (gpu-07): AssertionError: boom",
        ]
    )
    result.stdout.no_fnmatch_line("*value == 42*")


def test_where_rank_0_alone_failed_its_own_traceback_is_shown_with_the_name_of_the_rank(printed):
    result = printed(message="rank 0 (gpu-06): assert 41 == 42", text="unused", culprits=[0])
    result.stdout.fnmatch_lines(
        ["*= FAILURES =*", ">   *assert value == 42", "E   *assert 41 == 42", "rank 0 (gpu-06): assert 41 == 42"]
    )
    result.stdout.no_fnmatch_line("unused")


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"culprits": [0, 3]}, id="two culprits"),
        pytest.param({"culprits": [0], "released": [1]}, id="others were released"),
        pytest.param({"culprits": [0], "judged": True}, id="a limit was missed too"),
        pytest.param({"culprits": []}, id="no culprit"),
    ],
)
def test_where_more_is_to_be_told_the_merged_text_is_shown(printed, more):
    result = printed(message="m", text="the merged text", **more)
    result.stdout.fnmatch_lines(["*= FAILURES =*", "the merged text"])
    result.stdout.no_fnmatch_line("*assert value == 42*")


@pytest.mark.parametrize("style", ["long", "short", "native", "line"])
def test_every_style_of_traceback_names_the_rank(printed, style):
    result = printed(f"--tb={style}", **OTHERS)
    lines = [line for line in result.outlines if line.startswith("rank 3 (gpu-07)")]
    assert lines
    assert "object at 0x" not in result.stdout.str()


# ---- what a rank says of its failure -------------------------------------------------------------------------------


class BadText(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(ValueError("x"), "ValueError: x", id="an exception"),
        pytest.param(KeyError(), "KeyError: ", id="an exception without a text"),
        pytest.param(pytest.fail.Exception("told so"), "told so", id="pytest.fail"),
        pytest.param(BadText(), "BadText: (its text cannot be read: ValueError)", id="one that cannot say what it is"),
    ],
)
def test_a_failure_is_summed_up_by_its_kind_and_its_text(error, expected):
    assert summary_of(error) == expected


@pytest.mark.parametrize(("name", "hint"), [("gpu", "gpucluster_gpu"), ("no_such", "not found")])
def test_a_fixture_that_is_missing_is_named_with_what_to_ask_for(request, name, hint):
    text = summary_of(pytest.FixtureLookupError(name, request))
    assert f"'{name}'" in text
    assert hint in text
    assert "object at 0x" not in text


def test_an_item_that_cannot_show_its_failure_does_not_hide_it():
    item = SimpleNamespace(repr_failure=lambda excinfo: 1 // 0)
    with pytest.raises(KeyError) as raised:
        raise KeyError("x")
    assert re.match(r"KeyError \(.*: ZeroDivisionError\)$", traceback_of(item, "call", raised.value))
    assert re.match(r"KeyError \(.*: AssertionError\)$", traceback_of(item, "call", KeyError()))


def report(**fields):
    return SimpleNamespace(**{"skipped": False, "failed": True, "longrepr": None, "longreprtext": "", **fields})


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param(report(longrepr=SimpleNamespace(reprcrash=SimpleNamespace(message="a\nb"))), "a", id="a crash"),
        pytest.param(report(longreprtext="\n first\nsecond"), "first", id="only a text"),
        pytest.param(report(longrepr="x", longreprtext="x" * 300), "x" * 199 + "…", id="a long text"),
        pytest.param(
            report(skipped=True, longrepr=("a.py", 3, "Skipped: no GPU")), "no GPU", id="a skip with its place"
        ),
        pytest.param(report(skipped=True, wasxfail="reason: known"), "reason: known", id="an expected failure"),
        pytest.param(report(skipped=True, longreprtext="text"), "text", id="a skip of another kind"),
    ],
)
def test_a_report_is_summed_up_in_one_line(told, expected):
    assert line_of(told) == expected
    assert skip_reason(report(skipped=True, longrepr=("a.py", 3, "Skipped: one\ntwo"))) == "one\ntwo"


class Group:
    """Something that only frames hold."""


def test_a_failure_that_is_kept_lets_go_of_what_its_frames_hold():
    groups = []

    def waits():
        group = Group()
        groups.append(weakref.ref(group))
        raise RuntimeError("cut")

    def fails():
        other = Group()
        groups.append(weakref.ref(other))
        try:
            waits()
        except RuntimeError as cut:
            raise ValueError("released") from cut

    with pytest.raises(ValueError, match="released") as kept:
        fails()
    assert [group() is None for group in groups] == [False, False]
    # pytest looks at the locals of every frame that it may show; until Python 3.12 that leaves a copy of them.
    for error in (kept.value, kept.value.__cause__):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            assert isinstance(frame.f_locals, Mapping)
        del frame
    let_go(kept.value)
    assert [group() is None for group in groups] == [True, True]
    assert str(kept.value) == "released"


class Several(Exception):
    """As of a group of exceptions, which Python 3.10 has not."""

    exceptions: tuple[object, ...] = ()


@pytest.mark.parametrize("others", [(), ("no exception",)], ids=repr)
def test_a_group_of_failures_lets_go_of_what_their_frames_hold_too(others):
    groups = []

    def fails():
        group = Group()
        groups.append(weakref.ref(group))
        raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut") as kept:
        fails()
    several = Several("two of them")
    several.exceptions = (*others, kept.value)
    assert groups[0]() is not None
    let_go(several)
    assert groups[0]() is None
