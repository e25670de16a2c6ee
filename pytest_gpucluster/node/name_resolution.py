"""Name resolution: forward and reverse lookups of all nodes' names and addresses, and their duration.

The store through which ranks meet looks up the name of each address that connects, on its only thread: where reverse
lookups wait for a server that does not answer, the start of a job takes minutes. An IPv4 address reaches it in IPv6's
form, ::ffff:10.0.0.1, for which the C library ignores a line "10.0.0.1 gpu-001" of /etc/hosts and queries DNS. So
that form is looked up here.

Source: torch/csrc/distributed/c10d/socket.cpp, which prefers IPv6, connects with AI_V4MAPPED, and names every socket by
``formatSockAddr``; docs/performance.md has the measurements.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.finding import finding, require_nothing
from pytest_gpucluster.node.interfaces import Board, Chosen, Nodes

SLOW_SECONDS = 1.0
"""Lookups from here on are listed. Source: this suite's rule; a resolver retries after 5 s (resolv.conf(5))."""
_EXCHANGE_SECONDS = 60.0
_CONCURRENT = 4

Kind = Literal["forward", "reverse"]


class SystemResolver:
    """The resolver of this host, as configured in nsswitch.conf."""

    def forward(self, name: str) -> str:
        """Return the addresses of a name. Raises: OSError if it has none."""
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return ", ".join(dict.fromkeys(str(one[4][0]) for one in found))

    def reverse(self, address: str) -> str:
        """Return the name of an address, in the form that the store sees. Raises: OSError if it has none."""
        if ":" not in address and socket.has_dualstack_ipv6():
            address = f"::ffff:{address}"
        return socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]


SYSTEM = SystemResolver()
"""The resolver that is asked. The simulation and tests replace it."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A lookup: the name or the address of a node."""

    kind: Kind
    node: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a lookup.

    Attributes:
        found: the answer; "" if there is none.
        error: why there is none; "" if there is one.
        seconds: until the answer or the timeout.
        timed_out: whether there was no answer at all in time.
    """

    question: Question
    seconds: float
    found: str = ""
    error: str = ""
    timed_out: bool = False

    def __str__(self) -> str:
        return f"{self.question.name} -> {self.found or self.error} ({self.seconds:.3g} s)"


def look_up(questions: Sequence[Question], *, deadline_seconds: float) -> tuple[Answer, ...]:
    """Look up all questions, a few concurrently, and return the answers in their order.

    A resolver cannot be interrupted. So each lookup runs in a thread, which is abandoned after the deadline.
    """
    answers: list[Answer] = []
    for first in range(0, len(questions), _CONCURRENT):
        group = questions[first : first + _CONCURRENT]
        found: dict[Question, Answer] = {}
        lookups = [threading.Thread(target=_run, args=(one, found), daemon=True) for one in group]
        begin = time.monotonic()
        for lookup in lookups:
            lookup.start()
        for lookup in lookups:
            lookup.join(max(0.0, begin + deadline_seconds - time.monotonic()))
        seconds = time.monotonic() - begin
        error = f"no answer within {deadline_seconds:g} s"
        answered = dict(found)  # a late answer does not count
        for one in group:
            answers.append(answered.get(one) or Answer(question=one, seconds=seconds, error=error, timed_out=True))
    return tuple(answers)


def _run(question: Question, answers: dict[Question, Answer]) -> None:
    begin = time.monotonic()
    found, error = "", ""
    try:
        found = SYSTEM.forward(question.name) if question.kind == "forward" else SYSTEM.reverse(question.name)
    except (OSError, UnicodeError) as raised:  # UnicodeError: not a valid host name
        error = str(raised)
    answers[question] = Answer(question=question, seconds=time.monotonic() - begin, found=found, error=error)


def longest_seconds(count: int, deadline_seconds: float) -> float:
    """Return how long :func:`look_up` can take with ``count`` questions."""
    return deadline_seconds * math.ceil(count / _CONCURRENT)


def all_questions(
    board: Board, nodes: Nodes, choose: Callable[[], Chosen], *, deadline_seconds: float
) -> tuple[Question, ...]:
    """Return a question for the name and one for the address of every node.

    The name is the host's own, and not ``GPUCLUSTER_HOSTNAME``; the address is the one that the backend will use.
    Collective: exactly the ranks that represent a node must call this.

    Raises: EnvironmentBroken where this node has no address, or another one did not answer in time.
    """
    mine: dict[str, str] = {"name": socket.gethostname()}
    problem: EnvironmentBroken | None = None
    try:
        mine["address"] = choose().address
    except EnvironmentBroken as error:  # raised below: the others must not wait for this node
        problem = error
    answers = nodes.gather(board, "names", mine, within_seconds=deadline_seconds + _EXCHANGE_SECONDS)
    if problem is not None:
        raise problem
    silent = [host for node, host in nodes.hosts.items() if node not in answers]
    if silent:
        raise EnvironmentBroken(f"{', '.join(silent)} did not answer in time, so not every name can be looked up")
    forward = [Question(kind="forward", node=node, name=one["name"]) for node, one in answers.items()]
    addresses = {node: one["address"] for node, one in answers.items() if "address" in one}
    return (*forward, *(Question(kind="reverse", node=node, name=address) for node, address in addresses.items()))


def require_known(answers: Iterable[Answer], hosts: Mapping[int, str], *, me: int, in_pods: bool) -> None:
    """Require an address for every name, and print slow and failed lookups.

    ``answers`` are those of the node ``me``. Pods have no names for each other without a headless service: there an
    unknown one is a note.

    Raises: EnvironmentBroken where a name has no address.
    """
    findings = []
    for answer in answers:
        slow = answer.seconds >= SLOW_SECONDS or answer.timed_out
        if slow:
            print(f"slow lookup on {hosts[me]}: {answer}")
        if answer.error and not answer.timed_out and answer.question.kind == "reverse":
            if not slow:
                print(f"no name on {hosts[me]} for an address of {hosts[answer.question.node]}: {answer}")
        elif answer.error and not answer.timed_out:  # a timeout misses the limit
            findings.append(
                finding(
                    "note" if in_pods else "environment",
                    "dns.unknown",
                    hosts[me],
                    f"{answer.question.name}, the name of {hosts[answer.question.node]}, has no address "
                    f"({answer.error})",
                    allowed="every node can resolve the name of every node",
                    remedy="add it to DNS, or list all nodes in /etc/hosts on every node",
                )
            )
    require_nothing(findings)
