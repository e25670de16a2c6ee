"""A test over hundreds of cases, without an id for each: it tries all of them and lists every miss."""

import functools
import inspect

import pytest

_SHOWN = 50


def of_each(argument, cases, name=str):
    """Call the decorated test once for each case, and fail it with every case that has failed.

    Args:
        argument: of the test, which takes the case. The others stay pytest's.
        cases: one at least, or the test fails.
        name: how a case is called in the failure.
    """

    def decorate(test):
        @functools.wraps(test)
        def try_all(**given):
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
        del try_all.__wrapped__
        try_all.__signature__ = signature.replace(parameters=kept)
        return try_all

    return decorate
