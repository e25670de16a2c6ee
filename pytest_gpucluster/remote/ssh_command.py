"""The command line of ssh for one node. Pure.

Source of all options: ssh(1) and ssh_config(5) of OpenSSH.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from pytest_gpucluster.remote.hosts import Host

MODULE = "pytest_gpucluster.remote.node"
"""What is started on a node. It takes its request from the standard input, so nothing but its own name is quoted."""
_OPTIONS = (
    # Nobody is there to be asked for a password or whether a host key is right: then it fails, and says so.
    "BatchMode=yes",
    # A connection that is dead is noticed after a minute, and not after the two hours of TCP.
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
    # What a user's configuration may ask for, and what would stand in the way here.
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
    "RequestTTY=no",
    # A connection that is shared already may be used. To become a shared one would leave a process behind.
    "ControlMaster=no",
)


@dataclass(frozen=True, kw_only=True)
class Access:
    """How nodes are reached.

    Attributes:
        python: the interpreter on the nodes, in which this package is installed.
        options: more options of ssh. They come first, because ssh takes the first value that it is told.
        connect_seconds: how long a node may take until it has let us in, the handshake included.
        program: ssh itself.
    """

    python: str
    options: tuple[str, ...] = ()
    connect_seconds: int = 10
    program: str = "ssh"


def ssh_command(host: Host, access: Access) -> list[str]:
    """Return the command that starts our side on a node.

    >>> ssh_command(Host(name="gpu-1", address="10.0.0.1", port=2222), Access(python="/opt/my env/python"))[-3:]
    ['--', '10.0.0.1', "exec '/opt/my env/python' -m pytest_gpucluster.remote.node"]
    """
    command = [access.program, "-a", "-x", *access.options]
    for option in (*_OPTIONS, f"ConnectTimeout={access.connect_seconds}"):
        command += ["-o", option]
    command += ["-p", str(host.port)] if host.port is not None else []
    command += ["-l", host.user] if host.user is not None else []
    return [*command, "--", host.address, remote_command(access.python)]


def remote_command(python: str) -> str:
    """Return what the login shell of a node gets: plain enough for sh, csh and fish."""
    return f"exec {shlex.quote(python)} -m {MODULE}"
