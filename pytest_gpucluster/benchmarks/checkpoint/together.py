"""Failing together: what goes wrong on one rank is raised on every rank of the group, so that none waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

T = TypeVar("T")

_KINDS: dict[str, type[Exception]] = {"wrong": WrongResult, "value": ValueError, "broken": EnvironmentBroken}


def together(group: dist.ProcessGroup, act: Callable[[], T]) -> list[T]:
    """Let each rank do something that no other rank waits for; return what all got, in the order of the group's ranks.

    Collective: every rank of the group must call this. Inside of ``act`` nothing collective may happen. The values
    are pickled on their way.

    Raises: on every rank what was raised on the first rank that failed, named: ``WrongResult`` and ``ValueError`` as
        they are, another ``Exception`` as ``EnvironmentBroken``. What is no ``Exception`` ends its own rank only.
    """
    mine, error = _outcome(act)
    told: list[tuple[str, Any]] = [("", None)] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    for place, (kind, text) in enumerate(told):
        if kind:
            raise _KINDS[kind](f"rank {dist.get_global_rank(group, place)}: {text}") from error
    return [value for _, value in told]


def first(group: dist.ProcessGroup, act: Callable[[], T]) -> T:
    """Let the first rank of the group do something, and return on every rank what it got.

    Collective: every rank of the group must call this. Inside of ``act`` nothing collective may happen. The first rank
    waits for nobody: what others may still use it must not remove before a :func:`together`.

    Raises: as :func:`together`.
    """
    error: Exception | None = None
    told: list[tuple[str, Any]] = [("", None)]
    if dist.get_rank(group) == 0:
        told[0], error = _outcome(act)
    dist.broadcast_object_list(told, group=group, group_src=0)
    kind, value = told[0]
    if kind:
        raise _KINDS[kind](f"rank {dist.get_global_rank(group, 0)}: {value}") from error
    result: T = value
    return result


def _outcome(act: Callable[[], T]) -> tuple[tuple[str, Any], Exception | None]:
    """Return ("", the value) or (which kind of error, its text), and the error."""
    try:
        return ("", act()), None
    except Exception as error:  # it is raised again, on every rank
        kind = next((name for name, one in _KINDS.items() if isinstance(error, one)), "broken")
        known = isinstance(error, tuple(_KINDS.values()))
        return (kind, str(error) if known else f"{type(error).__name__}: {error}"), error
