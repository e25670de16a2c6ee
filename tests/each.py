"""A test over hundreds of cases, without an id for each: it tries all of them and lists every miss."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

_T = TypeVar("_T")
_SHOWN = 50


def of_each(
    argument: str, cases: Sequence[_T], name: Callable[[_T], str] = str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the decorated test once for each case, and fail it with every case that has failed.

    Args:
        argument: of the test, which takes the case. The others stay pytest's.
        cases: one at least, or the test fails.
        name: how a case is called in the failure.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def try_all(**given: Any) -> None:
            assert cases, "there is nothing to try"
            misses = []
            for case in cases:
                try:
                    test(**given, **{argument: case})
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # no case is left out
                    misses.append(f"{name(case)}: {type(error).__name__}: {error}")
            more = f"\nand {len(misses) - _SHOWN} more" if len(misses) > _SHOWN else ""
            assert not misses, f"{len(misses)} of {len(cases)}:\n" + "\n".join(misses[:_SHOWN]) + more

        signature = inspect.signature(test)
        kept = [given for given in signature.parameters.values() if given.name != argument]
        del try_all.__wrapped__  # type: ignore[attr-defined]  # pytest would take its signature
        try_all.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return try_all

    return decorate
