"""The command line of torchrun, made of what the operator said. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_gpucluster.errors import OptionError

_RANKS = "--nproc-per-node"
_RANKS_VARIABLE = "PET_NPROC_PER_NODE"
"""torchrun reads each of its options from such a variable, too. Source: torch, distributed/argparse_util.py."""
_DEVICE, _DEVICE_VARIABLE = "--gpucluster-device", "GPUCLUSTER_DEVICE"
_PYTEST_VARIABLE = "PYTEST_ADDOPTS"
"""pytest takes more arguments from it, and before its own. Source: pytest's reference, "Environment Variables"."""
_MEETING_PLACES = ("--rdzv-endpoint", "--master-addr")
_OURS = ("-m", "--module", "--no-python", "--run-path")
"""Options of torchrun that say what is run, which is pytest here."""
REHEARSING_RANKS = 2
"""The least with which ranks have something to tell each other."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """torchrun's arguments, and a remark on what was chosen for the operator; "" if nothing was."""

    arguments: tuple[str, ...]
    remark: str = ""


def command_line(launch: Sequence[str], pytest: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Return how to start torchrun over pytest.

    Without a number of ranks it is one for each GPU that torch sees, and two where the device is cpu: torchrun's own
    default is one, and one rank alone has nobody to talk to.

    Args:
        launch: options for torchrun.
        pytest: arguments of pytest.
        environ: the environment, in which either may have defaults.

    Raises:
        OptionError: pytest is told nothing or what cannot be read, or torchrun is told to run something else.
    """
    for word in launch:
        option = word.partition("=")[0].replace("_", "-")
        if option in _OURS:
            raise OptionError(f"{word}: what is run is pytest; leave this option of torchrun out")
    if not pytest:
        raise OptionError(
            "nothing says what pytest is to run: write it after two dashes, such as `gpucluster run -- acceptance/` or "
            "`gpucluster run --nproc-per-node=8 -- acceptance/ -k nccl`"
        )
    ranks, remark = _ranks(launch, pytest, environ)
    return CommandLine(arguments=(*ranks, *launch, "-m", "pytest", *pytest), remark=remark)


def meeting_place(launch: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the option by which torchrun is told where its agents meet, and the host in it; None where none is.

    ``--rdzv-endpoint`` takes the place of ``--master-addr``, and ``--standalone`` of both. An endpoint that is no host,
    such as a file or a list of servers, is left to torchrun.

    Args:
        launch: options for torchrun.
        environ: the environment, in which each may have a default.

    Source: torch, distributed/run.py (config_from_args) and distributed/argparse_util.py.
    """
    if "--standalone" in launch or environ.get("PET_STANDALONE") == "1":
        return None
    for option in _MEETING_PLACES:
        given = environ.get(f"PET_{option.removeprefix('--').replace('-', '_').upper()}", "")
        for word, following in zip(launch, [*launch, ""][1:], strict=True):
            key, equals, value = word.partition("=")
            if key.replace("_", "-") == option:
                given = value if equals else following
        if given:
            # host, host:port or [address of IPv6]:port
            bracketed = re.fullmatch(r"\[([^]]*)\](:\d+)?", given)
            host = bracketed[1] if bracketed else given.rpartition(":")[0] if given.count(":") == 1 else given
            return None if re.search("[/,]", host) or not host else (option, host)
    return None


def _ranks(launch: Sequence[str], pytest: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], str]:
    if environ.get(_RANKS_VARIABLE) or any(word.partition("=")[0].replace("_", "-") == _RANKS for word in launch):
        return [], ""
    if _device(pytest, environ) == "cpu":
        return [f"{_RANKS}={REHEARSING_RANKS}"], f"{REHEARSING_RANKS} ranks on this node, to rehearse ({_RANKS})"
    return [f"{_RANKS}=gpu"], f"a rank for each GPU of this node ({_RANKS})"


def _device(pytest: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the device that pytest is told; the last one counts, as everywhere in pytest."""
    device = environ.get(_DEVICE_VARIABLE, "")
    words = [*_from_environment(environ), *pytest]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option == _DEVICE:
            device = value if equals else following
    return device


def _from_environment(environ: Mapping[str, str]) -> list[str]:
    try:
        return shlex.split(environ.get(_PYTEST_VARIABLE, ""))
    except ValueError as error:
        raise OptionError(f"{_PYTEST_VARIABLE} cannot be read: {error}") from None
