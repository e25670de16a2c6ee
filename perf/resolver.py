"""How long ranks take to connect to the store, by what the resolver does with the addresses that connect.

    python perf/resolver.py                    # 64 ranks: the resolver of this machine, and three that are made up
    python perf/resolver.py --ranks 64,256,1024
    python perf/resolver.py --only slow --ranks 1024

torch's store looks up the name of every address that connects, on its only thread and one after the other; each client
looks up the store's. So the time grows with the ranks where an answer takes time. A look-up that fails is the last one
of its process (torch 2.13; pytorch pull request 159596), so a resolver that never answers costs the same at any number
of ranks.

The made-up resolvers: `slow` answers after 100 ms; `silent` never answers; `late` stands second in resolv.conf, after
one that never answers. They need root, and `unshare` for a resolv.conf that only the measured processes see. Each is
taken

* plainly;
* with RES_OPTIONS="timeout:1 attempts:1" for all processes;
* with a line for the address in /etc/hosts, in the form in which it is looked up: `::ffff:127.0.0.1 NAME`;
* with RES_OPTIONS=attempts:0 for the store alone, as this project starts it where the launcher brings none.

All ranks are threads of one process here, each with its two connections.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMPATIENT = "timeout:1 attempts:1"
NO_DNS = "attempts:0"
_SLOW_SECONDS = 0.1
_LATE_RANKS = 2
"""Of `late`: each connection takes 5 s, so that more ranks would take for ever."""
_SILENT, _ANSWERS = "127.0.0.77", "127.0.0.78"
_DEADLINE_SECONDS = 580

_STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("ready", flush=True)
sys.stdin.read()
"""

_CLIENTS = """
import os, sys, threading, time
from datetime import timedelta
import torch.distributed
from torch.distributed import TCPStore

threading.stack_size(512 * 1024)
port, ranks = int(sys.argv[1]), int(sys.argv[2])
kept, begin = [], time.perf_counter()


def connect():
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=570))
    kept.append((store, store.clone()))


threads = [threading.Thread(target=connect) for _ in range(ranks)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if len(kept) < ranks:
    sys.exit(f"{ranks - len(kept)} of {ranks} have not connected")
print(time.perf_counter() - begin, flush=True)
os._exit(0)  # the stores' threads need no farewell
"""


@dataclass(frozen=True, kw_only=True)
class Way:
    """What is done about the look-ups."""

    name: str
    everywhere: str = ""
    """RES_OPTIONS of all processes."""
    of_store: str = ""
    """RES_OPTIONS of the store alone."""
    hosts: str = ""
    """A further line of /etc/hosts."""


WAYS = (
    Way(name="plain"),
    Way(name=f"RES_OPTIONS={IMPATIENT!r}", everywhere=IMPATIENT),
    Way(name="a line in /etc/hosts", hosts="::ffff:127.0.0.1 gpu-001"),
    Way(name=f"RES_OPTIONS={NO_DNS} for the store", of_store=NO_DNS),
)
RESOLVERS: Mapping[str, tuple[str, Sequence[str]]] = {
    "as it is": ("this machine's own", ()),
    "slow": (f"answers after {1e3 * _SLOW_SECONDS:.0f} ms", (_ANSWERS,)),
    "silent": ("never answers", (_SILENT,)),
    "late": ("answers, after one that never does", (_SILENT, _ANSWERS)),
}
"""Resolver -> what it does, and the nameservers of its resolv.conf; none for this machine's own."""


def answer(query: bytes) -> bytes:
    """Return DNS's answer to a query for the name of an address: node.example. Source: RFC 1035, section 4."""
    end = query.index(b"\0", 12) + 5
    name = b"\x04node\x07example\0"
    header = query[:2] + b"\x81\x80" + query[4:6] + struct.pack("!HHH", 1, 0, 0)
    return header + query[12:end] + b"\xc0\x0c" + struct.pack("!HHIH", 12, 1, 0, len(name)) + name


@contextmanager
def nameservers(*, answer_seconds: float) -> Iterator[None]:
    """Let one nameserver answer after a time, and another one never.

    Raises:
        OSError: their ports cannot be taken: that needs root, and nobody else there.
    """
    with ExitStack() as stack:
        silent, answers = (stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(2))
        silent.bind((_SILENT, 53))
        answers.bind((_ANSWERS, 53))
        answers.settimeout(0.1)
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                try:
                    query, asker = answers.recvfrom(4096)
                except TimeoutError:
                    continue
                timer = threading.Timer(answer_seconds, lambda to=asker, of=query: answers.sendto(answer(of), to))
                timer.daemon = True
                timer.start()

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        try:
            yield
        finally:
            over.set()
            serving.join()
            time.sleep(answer_seconds)  # for the last answer, before its socket is closed


def seen_by(command: Sequence[str], folder: Path, servers: Sequence[str], hosts: str) -> list[str]:
    """Return a command that sees another resolv.conf and /etc/hosts than this process, where that is asked for."""
    mounts = []
    if servers:
        (folder / "resolv.conf").write_text("".join(f"nameserver {server}\n" for server in servers))
        mounts.append(f"mount --bind {folder / 'resolv.conf'} /etc/resolv.conf")
    if hosts:
        (folder / "hosts").write_text(Path("/etc/hosts").read_text().rstrip("\n") + f"\n{hosts}\n")
        mounts.append(f"mount --bind {folder / 'hosts'} /etc/hosts")
    if not mounts:
        return list(command)
    return ["unshare", "--mount", "sh", "-c", " && ".join([*mounts, 'exec "$0" "$@"']), *command]


def connect_seconds(ranks: int, way: Way, *, servers: Sequence[str] = ()) -> float:
    """Return how long it takes until all ranks have connected to a new store, twice each.

    Raises:
        RuntimeError: some have not.
    """
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port = str(tried.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="gpucluster-perf-") as name:
        folder = Path(name)
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        clients_environ = environ | ({"RES_OPTIONS": way.everywhere} if way.everywhere else {})
        options = way.of_store or way.everywhere
        command = seen_by([sys.executable, "-c", _STORE, port], folder, servers, way.hosts)
        store = subprocess.Popen(
            command,
            env=environ | ({"RES_OPTIONS": options} if options else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # torch warns of each look-up that fails
            text=True,
        )
        try:
            assert store.stdout is not None
            if store.stdout.readline().strip() != "ready":
                raise RuntimeError(f"the store did not come up: {' '.join(command[:4])} ended with {store.wait()}")
            done = subprocess.run(
                seen_by([sys.executable, "-c", _CLIENTS, port, str(ranks)], folder, servers, way.hosts),
                env=clients_environ,
                capture_output=True,
                text=True,
                timeout=_DEADLINE_SECONDS,
                check=False,
            )
        finally:
            store.kill()
            store.communicate()
    if done.returncode != 0:
        raise RuntimeError(f"{ranks} ranks, {way.name}: {done.stderr[-2000:]}")
    return float(done.stdout)


def why_not_made_up() -> str:
    """Return why this machine cannot have made-up resolvers; nothing where it can."""
    if shutil.which("unshare") is None:
        return "there is no unshare (util-linux)"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return tried.stderr.strip() or f"unshare ended with {tried.returncode}"
    try:
        with nameservers(answer_seconds=0.0):
            return ""
    except OSError as error:
        return f"no nameserver can listen on {_SILENT} and {_ANSWERS}: {error}"


def table(asked: Sequence[str], sizes: Sequence[int], why_not: str) -> list[dict[str, Any]]:
    """Measure and print a row for each resolver and number of ranks; return what was measured."""
    print(f"| resolver | ranks | {' | '.join(way.name for way in WAYS)} |")
    print("|---|---:|" + "---:|" * len(WAYS), flush=True)
    found = []
    for name in asked:
        what, servers = RESOLVERS[name]
        if servers and why_not:
            print(f"| {name}: {what} | | not measured: {why_not} |" + " |" * (len(WAYS) - 1))
            continue
        for ranks in [_LATE_RANKS] if name == "late" else sizes:
            seconds = [
                connect_seconds(ranks, way, servers=servers) if not (way.hosts and why_not) else None for way in WAYS
            ]
            found.append({"resolver": name, "ranks": ranks, "seconds": seconds})
            cells = ["not measured" if taken is None else f"{taken:.1f} s" for taken in seconds]
            print(f"| {name}: {what} | {ranks} | {' | '.join(cells)} |", flush=True)
    return found


def _numbers(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers of ranks, such as 64,256")
    return [int(word) for word in words]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=_numbers, default="64", help="separated by commas (default: 64)")
    parser.add_argument("--only", choices=[*RESOLVERS], action="append", help="(default: all)")
    arguments = parser.parse_args()
    load = [os.getloadavg()[0]]
    why_not = why_not_made_up()
    with ExitStack() as stack:
        if not why_not:
            stack.enter_context(nameservers(answer_seconds=_SLOW_SECONDS))
        table(arguments.only or list(RESOLVERS), arguments.ranks, why_not)
    load.append(os.getloadavg()[0])
    import torch

    print(
        f"\nseconds until every rank has its two connections; {os.cpu_count()} cores, load average {min(load):.1f} to "
        f"{max(load):.1f}; Python {platform.python_version()}, torch {torch.__version__}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
