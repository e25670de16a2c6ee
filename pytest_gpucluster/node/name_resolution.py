"""Names of hosts: what a host finds for the names and addresses of the others, and how long that takes.

The store through which ranks meet looks up the name of each address that connects, on its only thread: where reverse
lookups wait for a server that does not answer, the start of a job takes minutes. An IPv4 address reaches it in IPv6's
form, ::ffff:10.0.0.1, for which the C library does not take a line "10.0.0.1 gpu-001" of /etc/hosts: it asks DNS all
the same. So that form is looked up here too.

Source: torch/csrc/distributed/c10d/socket.cpp, which prefers IPv6, connects with AI_V4MAPPED, and names every socket by
``formatSockAddr``; docs/scale.md has what was measured.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal, Protocol

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.finding import notice, require_nothing
from pytest_gpucluster.node.interfaces import Board, Chosen, Nodes

SLOW_SECONDS = 1.0
"""From here on a lookup is listed. Source: this suite's rule; a resolver asks again after 5 s (resolv.conf(5))."""
_TOLD_SECONDS = 60.0
_AT_ONCE = 4

Kind = Literal["forward", "reverse"]


class Resolver(Protocol):
    """Looks names up."""

    def forward(self, name: str) -> str:
        """Return the addresses of a name. Raises: OSError if it has none."""

    def reverse(self, address: str) -> str:
        """Return the name of an address. Raises: OSError if it has none."""


class SystemResolver:
    """Asks as every program on this host does: /etc/hosts, DNS and what else nsswitch.conf names."""

    def forward(self, name: str) -> str:
        """Return the addresses of a name. Raises: OSError if it has none."""
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return ", ".join(dict.fromkeys(str(one[4][0]) for one in found))

    def reverse(self, address: str) -> str:
        """Return the name of an address, in the form that the store sees. Raises: OSError if it has none."""
        return socket.getnameinfo((as_the_store_sees(address), 0), socket.NI_NAMEREQD)[0]


SYSTEM: Resolver = SystemResolver()


def as_the_store_sees(address: str) -> str:
    """Return an address as the store's socket tells it: of IPv4 in IPv6's form, where this host has IPv6 at all."""
    if ":" in address or not socket.has_dualstack_ipv6():
        return address
    return f"::ffff:{address}"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to look up: the name or the address of a node."""

    kind: Kind
    node: int
    asked: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of a question.

    Attributes:
        found: the answer; "" if there is none.
        error: why there is none; "" if there is one.
        seconds: until the answer, or until it was given up.
        came: False where the time was up before any answer, good or bad.
    """

    question: Question
    seconds: float
    found: str = ""
    error: str = ""
    came: bool = True

    def __str__(self) -> str:
        return f"{self.question.asked} -> {self.found or self.error} ({self.seconds:.3g} s)"


def look_up(
    questions: Sequence[Question], *, deadline_seconds: float, resolver: Resolver | None = None
) -> tuple[Answer, ...]:
    """Look everything up, a few at once, and return the answers in the order of the questions.

    A resolver cannot be interrupted. So each question is put in a thread that nobody waits for after the deadline.

    Args:
        questions: what to look up.
        deadline_seconds: how long to wait for one answer.
        resolver: by default ``SYSTEM`` of this module.
    """
    asked = resolver or SYSTEM
    answers: dict[int, Answer] = {}
    came: SimpleQueue[tuple[int, Answer]] = SimpleQueue()

    def ask(index: int, question: Question) -> None:
        begin = time.monotonic()
        found, error = "", ""
        try:
            found = asked.forward(question.asked) if question.kind == "forward" else asked.reverse(question.asked)
        except (OSError, UnicodeError) as raised:  # UnicodeError: what is no host name at all
            error = str(raised)
        answer = Answer(question=question, seconds=time.monotonic() - begin, found=found, error=error)
        came.put((index, answer))

    waiting = list(enumerate(questions))
    started: dict[int, float] = {}
    while waiting or started:
        while waiting and len(started) < _AT_ONCE:
            index, question = waiting.pop(0)
            started[index] = time.monotonic()
            threading.Thread(target=ask, args=(index, question), name="gpucluster-lookup", daemon=True).start()
        first = min(started.values()) + deadline_seconds
        try:
            index, answer = came.get(timeout=max(0.0, first - time.monotonic()))
        except Empty:
            late = [index for index, begin in started.items() if begin + deadline_seconds <= time.monotonic()]
            for index in late:
                seconds = time.monotonic() - started.pop(index)
                error = f"no answer within {deadline_seconds:g} s"
                answers[index] = Answer(question=questions[index], seconds=seconds, error=error, came=False)
            continue
        if started.pop(index, None) is not None:  # else it was given up before
            answers[index] = answer
    return tuple(answers[index] for index in range(len(questions)))


def longest_seconds(count: int, deadline_seconds: float) -> float:
    """Return how long :func:`look_up` can take with so many questions."""
    return deadline_seconds * (1 + count / _AT_ONCE)


def all_questions(
    board: Board, nodes: Nodes, choose: Callable[[], Chosen], *, deadline_seconds: float
) -> tuple[Question, ...]:
    """Return a question for the name and one for the address of every node.

    The name is what each host calls itself, and not what ``GPUCLUSTER_HOSTNAME`` calls it in reports; the address is
    the one that the backend will use. The rank that speaks for each node must call this, and no other one.

    Raises: EnvironmentBroken where this node has no address, or another one has told nothing in time.
    """
    mine: dict[str, str] = {"name": socket.gethostname()}
    without: EnvironmentBroken | None = None
    try:
        mine["address"] = choose().address
    except EnvironmentBroken as error:  # raised below: the others must not wait for this node
        without = error
    told = nodes.gather(board, "names", mine, within_seconds=deadline_seconds + _TOLD_SECONDS)
    if without is not None:
        raise without
    silent = [host for node, host in nodes.hosts.items() if node not in told]
    if silent:
        raise EnvironmentBroken(f"{', '.join(silent)} gave no word in time, so not every name can be looked up")
    forward = [Question(kind="forward", node=node, asked=one["name"]) for node, one in told.items()]
    addresses = {node: one["address"] for node, one in told.items() if "address" in one}
    return (*forward, *(Question(kind="reverse", node=node, asked=address) for node, address in addresses.items()))


def require_known(answers: Iterable[Answer], hosts: Mapping[int, str], *, me: int, in_pods: bool) -> None:
    """Make sure that every name has an address, and list what was slow or has no answer.

    Args:
        answers: of this node.
        hosts: node -> its name.
        me: this node.
        in_pods: names may be unknown, as those of pods are without a headless service.

    Raises: EnvironmentBroken where a name has no address.
    """
    findings = []
    for answer in answers:
        slow = answer.seconds >= SLOW_SECONDS or not answer.came
        if slow:
            print(f"slow lookup on {hosts[me]}: {answer}")
        if answer.error and answer.came and answer.question.kind == "reverse":
            if not slow:
                print(f"no name on {hosts[me]} for an address of {hosts[answer.question.node]}: {answer}")
        elif answer.error and answer.came:  # one that has not come in time misses the limit
            findings.append(
                notice(
                    "dns.unknown",
                    "note" if in_pods else "environment",
                    hosts[me],
                    f"{answer.question.asked}, as {hosts[answer.question.node]} calls itself, has no address "
                    f"({answer.error})",
                    allowed="every node knows the name of every node",
                    remedy="add it to DNS, or list all nodes in /etc/hosts on every node",
                )
            )
    require_nothing(findings)
