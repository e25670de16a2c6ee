"""What the commands have in common that reach nodes over ssh: which nodes there are, and how they are reached."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpucluster.errors import OptionError, UnitError
from pytest_gpucluster.metrics import units

if TYPE_CHECKING:
    from pytest_gpucluster.runners.hosts import Host
    from pytest_gpucluster.runners.ssh import Access


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add what says which nodes there are, and how they are reached."""
    parser.add_argument("hosts", metavar="HOSTS", type=Path, help="the hosts file")
    parser.add_argument("--nodes", metavar="HOSTLIST", help="only these of the file, such as 'gpu-[003,007]'")
    parser.add_argument(
        "--exclude", metavar="HOSTLIST", help="not these; or the path of an exclude.txt that a sweep or a run has left"
    )
    parser.add_argument(
        "--directory", metavar="DIR", help="the folder of the suite on the nodes (default: the path of this one)"
    )
    parser.add_argument(
        "--node-report-dir",
        metavar="DIR",
        default="gpucluster-report",
        help="where the nodes keep the reports until they are brought (default: %(default)s)",
    )
    if not any("--python" in action.option_strings for action in parser._actions):
        parser.add_argument("--python", metavar="PATH", help="the python on the nodes (default: the path of this one)")
    parser.add_argument(
        "--env",
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        help="a variable for the nodes; as often as needed. GPUCLUSTER_* and PYTEST_ADDOPTS are handed on anyway",
    )
    parser.add_argument(
        "--ssh",
        metavar="OPTION",
        action="append",
        default=[],
        help="one more option for every ssh, such as --ssh=-oStrictHostKeyChecking=accept-new; as often as needed",
    )
    parser.add_argument(
        "--connect-within",
        metavar="TIME",
        type=seconds,
        default="10 s",
        help="the longest that a node may take to let us in (default: %(default)s)",
    )
    parser.add_argument(
        "--answer-within",
        metavar="TIME",
        type=seconds,
        default="60 s",
        help="the longest that a node may take to answer the first questions (default: %(default)s)",
    )


def hosts_and_access(options: argparse.Namespace) -> tuple[tuple[Host, ...], Access]:
    """Return the nodes that are meant, and how they are reached.

    Raises:
        OptionError: the hosts file or a list of nodes is wrong.
        EnvironmentBroken: they are more than this process may have open files for.
    """
    from pytest_gpucluster.runners.hosts import chosen, read_hosts
    from pytest_gpucluster.runners.ssh import Access, make_room

    for option in options.ssh:
        if not option.startswith("-"):
            raise OptionError(f"--ssh {option}: not an option of ssh; write it as one word: --ssh=-oProxyJump=bastion")
    hosts = chosen(read_hosts(options.hosts), options.nodes, options.exclude)
    make_room(len(hosts))
    return (
        hosts,
        Access(
            python=options.python or sys.executable,
            options=tuple(options.ssh),
            connect_seconds=max(1, round(options.connect_within)),
        ),
    )


def directory_of(options: argparse.Namespace) -> str:
    """Return where to work on the nodes."""
    return str(options.directory or Path.cwd())


def run_id_of(directory: Path) -> str:
    """Return a name for a run that no other operator's has, beginning as its folder here."""
    return f"{directory.name}-{secrets.token_hex(3)}"


def seconds(text: str) -> float:
    """Read a time of an option, such as ``90 s`` or ``2h``, as seconds.

    Raises:
        argparse.ArgumentTypeError: it is none, or out of range.
    """
    try:
        found = units.parse(text, like="s").to("s")
    except UnitError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 1 <= found <= 30 * 24 * 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 1 s and 30 days")
    return found
