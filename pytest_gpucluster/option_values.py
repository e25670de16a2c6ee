"""How the value of an option is written: seconds, one of several words, yes or no, names, waiting times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import OptionError

_YES, _NO = ("yes", "true", "on", "1"), ("no", "false", "off", "0")


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long to wait, in seconds, before a silence means something.

    The defaults suit hosts that share a fast network. ``--gpucluster-timeouts grace=2,join=900`` changes some.
    """

    join: float = 300.0
    """Every rank must have reported to the store by then (imports over a slow file system are the usual delay)."""
    grace: float = 1.0
    """A rank that waits in a collective for this long after a peer's failure is released."""
    stuck: float = 10.0
    """A rank that has not come back this long after its release cannot be released: the run ends."""
    dead: float = 30.0
    """A rank on another host whose heartbeat has stood still this long is lost."""
    unresponsive: float = 60.0
    """A process that lives, but whose heartbeat has stood still this long, is treated as hung."""
    terminate: float = 20.0
    """After SIGTERM everything is over by then; torchrun sends SIGKILL after 30 s."""

    @classmethod
    def parse(cls, text: str) -> Timeouts:
        """Read ``name=seconds,...``.

        Raises:
            OptionError: an unknown name, or a value that is no positive number.
        """
        allowed = ", ".join(cls.__dataclass_fields__)
        values: dict[str, float] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, value = part.partition("=")
            if name not in cls.__dataclass_fields__:
                raise OptionError(f"unknown timeout {name!r}; allowed: {allowed}, each as name=seconds")
            if name in values:
                raise OptionError(f"timeout {name!r} is given twice")
            values[name] = positive_seconds(value)
        return cls(**values)


def positive_seconds(text: str) -> float:
    """Read a positive, finite number of seconds.

    Raises:
        OptionError: anything else.
    """
    try:
        value = float(text)
    except ValueError:
        raise OptionError(f"{text!r} is not a number of seconds") from None
    if not 0 < value < float("inf"):
        raise OptionError(f"{text!r} is not a positive number of seconds")
    return value


def one_of(*allowed: str) -> Callable[[str], str]:
    """Return a parser that takes one of these words and raises OptionError at any other."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise OptionError(f"{text!r} is not allowed; choose one of: {', '.join(allowed)}")
        return text

    return parse


def yes_or_no(text: str) -> bool:
    """Read the value of a flag.

    Raises:
        OptionError: neither yes nor no. A bare flag takes the next word for its value: a path, as a rule.
    """
    word = text.strip().lower()
    if word not in (*_YES, *_NO):
        raise OptionError(
            f"{text!r} is neither yes nor no; write =yes behind the option, or let it stand last or before another "
            "option"
        )
    return word in _YES


def names(text: str) -> tuple[str, ...]:
    """Read names separated by commas."""
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def shape(text: str) -> Any:
    """Read the declared shape of the cluster (``agreement.preflight.Expectation``).

    Raises:
        OptionError: it is no shape.
    """
    from pytest_gpucluster.agreement.preflight import Expectation  # a session without the option pays nothing

    return Expectation.parse(text)


def override(text: str, origin: str) -> Any:
    """Read one changed value of the workload (``workload_file.Override``).

    Raises:
        OptionError: no such key, or a value that it cannot have.
    """
    from pytest_gpucluster.config.workload_loader import (
        Override,  # it reads YAML: a session without the option pays nothing
    )

    return Override.parse(text, origin=origin)


def soak(text: str, origin: str) -> Any:
    """Read how long the burn-in lasts: one changed value of the workload (``workload_file.Override``).

    Raises:
        OptionError: no time, or one that the burn-in cannot have.
    """
    return override(f"burn_in.duration={text}", origin)


def sizes(text: str, origin: str) -> Any:
    """Read the sizes of all collectives: changed values of the workload (a tuple of ``workload_file.Override``).

    Raises:
        OptionError: as ``collective_sizes.read``.
    """
    from pytest_gpucluster.config.workload_loader import read_sizes  # as above

    return read_sizes(text, origin=origin)


def data(text: str, base: Path) -> Any:
    """Read what to train with (``training_inputs.Data``).

    Raises:
        OptionError: as ``training_inputs.read_data``.
    """
    from pytest_gpucluster.training_inputs import read_data  # as above

    return read_data(text, base)


def journal(text: str, base: Path) -> Path:
    """Read the place of an earlier run's journal.

    A link such as ``latest`` is followed now: this run is about to become the latest one. Whether there is a journal,
    only the rank that reads it needs to know.

    Raises:
        OptionError: no path.
    """
    from pytest_gpucluster.errors import JournalError  # as above
    from pytest_gpucluster.journal.journal import locate

    if not text.strip():
        raise OptionError("no path")
    path = base / Path(text.strip()).expanduser()
    try:
        return locate(path).resolve()
    except (JournalError, OSError):
        return path


class Percentage(float):
    """A ratio that people read and write in percent."""

    def __str__(self) -> str:
        return f"{100 * self:g} %"


def percentage(text: str) -> Percentage:
    """Read by how much something may be worse, as a ratio.

    Raises:
        OptionError: as ``allowance``.
    """
    from pytest_gpucluster.analysis.significance import allowance  # as above

    return Percentage(allowance(text))


def model(text: str, base: Path) -> Any:
    """Read a pretrained model's place (``training_inputs.Source``).

    Raises:
        OptionError: as ``training_inputs.read_model``.
    """
    from pytest_gpucluster.training_inputs import read_model  # as above

    return read_model(text, base)
