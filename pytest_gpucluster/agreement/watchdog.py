"""The watcher of a rank: a thread that reacts to deaths, deadlines and signals, and frees a hung main thread.

It polls the store's event log a few times a second and never blocks on the store. Decisions about the run are made by
rank 0's watcher only; every watcher acts on its own process only.

A Python signal handler runs in the main thread, which may be blocked inside ``store.get`` or a collective. The wakeup
file descriptor is written by the C-level handler, so a thread that polls it (:class:`WakeupPipe`) notices at once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import IO, Any

from pytest_gpucluster.agreement import exchange, hang_diagnosis
from pytest_gpucluster.agreement.exchange import AbortReason
from pytest_gpucluster.agreement.hang_diagnosis import Culprit, Where, remove_left
from pytest_gpucluster.agreement.liveness import ANSWER_SECONDS, Deadline, Liveness, WatchedPhase, computes
from pytest_gpucluster.agreement.release import PythonReleaser, Releaser
from pytest_gpucluster.agreement.store import EventLog, Store, post_event
from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.launch.launchers import RankFacts
from pytest_gpucluster.metrics.codec import to_json

_HEARD = (signal.SIGTERM, signal.SIGINT)


class WakeupPipe:
    """Brings SIGTERM and SIGINT to the watcher's poll loop.

    SIGINT keeps its handler (pytest's KeyboardInterrupt); SIGTERM's becomes harmless, because the watcher acts on it.
    """

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._installed = False
        self._before: object = None

    def install(self) -> None:
        """Take the wakeup descriptor and SIGTERM. Main thread; again at each phase, since asyncio resets both."""
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        # Its handler only lets the interpreter go on: the watcher reads the signal's number from the pipe.
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        if not self._installed:
            self._before, self._installed = before, True
            # A forked child shares the pipe: its SIGTERM would be read as ours, and it would survive terminate().
            os.register_at_fork(after_in_child=self._forget_in_child)

    def ignore_sigterm(self) -> None:
        """From now on SIGTERM changes nothing: all reports are written and the process is about to end."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)

    def restore(self) -> None:
        """Give SIGTERM and the wakeup descriptor back, for a session inside another program."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)  # type: ignore[arg-type]  # what signal.signal returned
        self._installed = False

    def close(self) -> None:
        """Close both ends, once neither signals nor the watcher use them."""
        for descriptor in (self.read_fd, self._write_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.read_fd = self._write_fd = -1

    def heard(self) -> set[int]:
        """Return the signals that have arrived since the last call."""
        try:
            return {number for number in os.read(self.read_fd, 512) if number in _HEARD}
        except BlockingIOError:
            return set()

    def _forget_in_child(self) -> None:
        if self._installed:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_TICK_SECONDS = 0.1
_RANKS_PER_TICK = 256
"""Above this many ranks each looks less often, so that the store's load stays what it is at this many."""
_BEAT_SECONDS = 1.0
_KILLED_SECONDS = 1.0
"""How long the end of a killed sibling is waited for, so that what it leaves can be taken away."""
_LOOK_SECONDS = 0.01
_RELEASE_SECONDS = 2.0
"""How long a look of the watcher may wait for an abort to return."""
_LEAVES_WITHIN_SECONDS = 0.25
"""A main thread that runs Python code leaves it so soon, before its groups are released."""
_GIL_DUMP_SECONDS = 2.5
"""A process that holds the GIL this long has its stacks written by faulthandler, which needs no GIL."""
_LOST_BEFORE_TERM_SECONDS = 0.4
"""torchrun sends SIGTERM about 0.1 s after another rank's death: look that long for a death that explains it."""
_SILENT_SECONDS = 4.0
"""A rank 0 that is past a deadline and has sent no heartbeat for this long is stopped or holds the GIL."""
_BACKSTOP_SECONDS = 10.0
"""Whatever else goes wrong with rank 0: this long after it should have given up, the others go on without it."""


def tick_seconds(world_size: int) -> float:
    """Return how long a watcher waits between two looks at the events."""
    return _TICK_SECONDS * max(1.0, world_size / _RANKS_PER_TICK)


class Watch:
    """Watches over one rank. Methods without a leading underscore are the main thread's."""

    def __init__(
        self,
        *,
        facts: RankFacts,
        side: Store,
        numbers: exchange.Exchange,
        who: Mapping[int, Mapping[str, Any]],
        names: Mapping[int, str],
        timeouts: Any,
        fault_file: IO[str],
        on_abort: Callable[[AbortReason], None],
        on_beat: Callable[[], None],
        on_overtime: Callable[[AbortReason], None],
        rehearsal: bool = False,
    ) -> None:
        self.abort_reason: AbortReason | None = None
        self.python = PythonReleaser()
        self._facts = facts
        self._store = side
        self._exchange = numbers
        self._names = names
        self._timeouts = timeouts
        self._fault_file = fault_file
        self._on_abort, self._on_beat, self._on_overtime = on_abort, on_beat, on_overtime
        self._releasers: list[Releaser] = []
        self._lock = threading.RLock()
        self._phase = WatchedPhase(number=0, label="start", deadline_seconds=float("inf"), in_body=False)
        self._released: dict[int, str] = {}
        self._events = EventLog(side)
        self._early: list[Mapping[str, Any]] = []
        self._pipe = WakeupPipe()
        self._who = who
        self._liveness = Liveness(who, facts.rank)
        self._siblings, self._heartbeats = self._liveness.siblings, self._liveness.heartbeats
        self._deadline = Deadline(
            store=side,
            liveness=self._liveness,
            names=names,
            stuck_seconds=timeouts.stuck,
            end_at_once=self._end_at_once,
            rehearsal=rehearsal,
        )
        self._rehearsal = rehearsal
        self._parent = os.getppid()
        self._lost: set[int] = set()
        self._aborted_at = 0.0
        self._terminated_at: float | None = None
        self._tick = tick_seconds(facts.world_size)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpucluster-watch", daemon=True)

    # ---- the main thread's side ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start watching. Main thread."""
        self._pipe.install()
        self.python.install()
        self._arm_dump()  # here too: the first test may take the GIL before the watcher's first look
        self._thread.start()

    def guard(self, *releasers: Releaser) -> None:
        """Use one more way to free the main thread: that of a process group just made."""
        with self._lock:
            self._releasers = list(releasers)

    def enter(self, label: str, deadline_seconds: float) -> int:
        """Open a phase: from now on the main thread may be released. Return the number of its exchange."""
        self._pipe.install()
        self.python.install()
        with self._lock:
            self.python.reason = None
            number = self._exchange.begin(label)
            self._phase = WatchedPhase(number=number, label=label, deadline_seconds=deadline_seconds)
        return number

    def leave(self) -> None:
        """The main thread has come back from the phase's body."""
        self.python.reason = None
        with self._lock:
            self._phase.in_body = False

    def released(self, number: int) -> str | None:
        """Return why this rank was released in a phase, or None if it came back by itself."""
        return self._released.get(number)

    def explanation(self, number: int, wait_seconds: float) -> str | None:
        """Return why a peer may be gone from a collective of a phase; wait a moment for the news of it.

        A closed connection is often known before what closed it: a death, or a peer's release.
        """
        until = time.monotonic() + wait_seconds
        while True:
            with self._lock:
                phase = self._phase
                reason = self.abort_reason.message if self.abort_reason else phase.release_reason or phase.peer_message
            if reason or phase.number != number or time.monotonic() >= until:
                return reason or None
            time.sleep(_LOOK_SECONDS)

    def diagnosis(self, number: int) -> WatchedPhase:
        """Return what is known of a phase: its culprits, and whether it is slow, late or stuck. Rank 0's watcher knows.

        Nothing is known of any but the last one.
        """
        with self._lock:
            if self._phase.number == number:
                return replace(self._phase, culprits=dict(self._phase.culprits))
        return WatchedPhase(number=number, label="", deadline_seconds=0.0)

    def report_absence(self, store: Store, number: int, message: str) -> None:
        """Report to the peers that this rank has failed or skipped, so that those who wait for it are released.

        The first of them does: a thousand ranks that fail alike need no thousand events.
        """
        if self._facts.world_size == 1 or self.abort_reason is not None:
            return
        first = store.compare_set(f"absent/{number}", "", str(self._facts.rank))
        if first.decode() == str(self._facts.rank):
            post_event(store, "absent", rank=self._facts.rank, number=number, message=message)

    def agreed_to_end(self, abort: AbortReason) -> None:
        """Take over the reason that the verdict of an exchange has given to every rank."""
        with self._lock:
            if self.abort_reason is None:
                self.abort_reason = abort
                self._aborted_at = time.monotonic()

    def goodbye(self, reason: str) -> None:
        """Announce that this rank leaves on purpose, so that none calls it lost later."""
        with contextlib.suppress(RuntimeError):  # the store may be what has gone
            self._store.set(f"bye/{self._facts.rank}", reason)

    def close(self) -> None:
        """Stop watching, and let no late signal spoil the exit."""
        self._stop.set()
        self._thread.join(5.0)
        faulthandler.cancel_dump_traceback_later()
        if self._facts.world_size > 1:
            self._pipe.ignore_sigterm()
        else:
            self._pipe.restore()
        if not self._thread.is_alive():
            self._pipe.close()
            self._siblings.close()

    def remove_left(self) -> None:
        """End the processes that dead siblings have started, and take away what is on this host's disk of them."""
        ended = [str(self._who[rank]["fault_file"]) for rank in self._siblings.ended()]
        detached_process.end_stale_processes(ended)
        for file in ended:
            remove_left(file)

    def kill_stuck(self, ranks: Sequence[int], wait_seconds: float = 0.5) -> None:
        """End siblings that cannot be released: torchrun would wait 30 s for them."""
        if not ranks:
            return
        time.sleep(wait_seconds)
        gone = set(self._siblings.ended())
        for rank in ranks:
            if rank not in gone:
                self._siblings.signal(rank, signal.SIGKILL)
        self._siblings.wait_for_end(ranks, _KILLED_SECONDS)

    # ---- the watcher's loop ----------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._pipe.read_fd, select.POLLIN)
        self._siblings.watch(poller)
        next_beat = 0.0
        while not self._stop.is_set():
            ready = [fd for fd, _ in poller.poll(self._tick * 1000)]
            try:
                heard = self._pipe.heard()
                for fd in ready:
                    rank = self._siblings.rank_of(fd, poller)
                    if rank is not None:
                        self._process_ended(rank)
                if heard:
                    self._signalled(heard)
                early, self._early = self._early, []
                for event in [*early, *self._events.unread()]:
                    self._event(event)
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + _BEAT_SECONDS
                    self._beat()
                self._look_at_phase()
            except RuntimeError as error:  # torch's DistError family: the store's connection is gone
                self._store_gone(error)
                return self._without_store()
            except Exception as error:  # no other rank would learn that this one is watched no more
                self._broken(error)
                return self._without_store()

    def _without_store(self) -> None:
        while not self._stop.wait(self._tick):
            self._act_on_abort()

    def _store_gone(self, error: Exception) -> None:
        where = f"{self._facts.master_addr}:{self._facts.master_port}"
        self.end(
            AbortReason(
                name="store lost",
                message=f"the rendezvous store at {where} is gone: the launcher's agent on the first node has ended",
                text=str(error),
                exit=11,
            ),
            broadcast=False,
        )

    def _broken(self, error: Exception) -> None:
        message = f"the watcher of {self._names[self._facts.rank]} broke: {type(error).__name__}: {error}"
        text = "".join(traceback.format_exception(error))
        self.end(AbortReason(name="internal error", message=message, exit=3, text=text))

    # ---- what can happen -------------------------------------------------------------------------------------

    def _process_ended(self, rank: int) -> None:
        if self._store.check([f"bye/{rank}"]) or rank in self._lost:
            return
        process = f"process {self._who[rank]['pid']} has exited without a message"
        self._lose(rank, f"{process}{self._liveness.last_words(rank)}")

    def _lose(self, rank: int, why: str) -> None:
        if rank in self._lost:
            return
        self._lost.add(rank)
        won = self._store.compare_set(f"lost/{rank}", "", str(self._facts.rank))
        if won.decode() == str(self._facts.rank):
            post_event(self._store, "lost", rank=rank, message=why)
        self.end(self._loss(rank, why), broadcast=False)

    def _loss(self, rank: int, why: str) -> AbortReason:
        during = self._phase.label
        message = f"{self._names[rank]} is lost during {during}: {why}"
        return AbortReason(name="rank lost", message=message, exit=11, culprits=[rank])

    def _signalled(self, heard: set[int]) -> None:
        self.goodbye(signal.Signals(max(heard)).name)
        if signal.SIGINT in heard:
            who = self._names[self._facts.rank]
            message = f"interrupted (Ctrl-C) on {who} during {self._phase.label}"
            self.end(AbortReason(name="interrupted", message=message, exit=2))
        elif self._terminated_at is None:
            self._terminated_at = time.monotonic()

    def _event(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        phase = self._phase
        if kind == "lost":
            self._lost.add(event["rank"])
            self.end(self._loss(event["rank"], event["message"]), broadcast=False)
        elif kind == "end":
            stuck = self._facts.rank in event["culprits"] and event["name"] == "rank stuck"
            self.end(AbortReason.from_json(event), broadcast=False)
            if stuck:
                self._aborted_at -= self._timeouts.terminate - 2.0
        elif kind == "overdue":
            self._say_where(event["number"], phase)
        elif event["number"] < phase.number:
            return  # of a phase that is over here
        elif event["number"] > phase.number:
            self._early.append(event)  # a peer is ahead: it has failed in a phase that this rank is about to enter
        elif kind == "absent" and phase.peer_failed is None:
            phase.peer_failed = time.monotonic()
            phase.peer_message = f"{self._names[event['rank']]} {event['message']}"
        elif kind == "release":
            phase.culprits = {int(rank): Culprit(**culprit) for rank, culprit in event["culprits"].items()}
            self._release(phase, event["reason"])

    def _say_where(self, number: int, phase: WatchedPhase) -> None:
        operations = self._operations(phase)
        where = Where(
            stack=hang_diagnosis.main_thread_stack(),
            operations=tuple(operations),
            waits_seconds=hang_diagnosis.waits_seconds(operations, time.time_ns()),
            computes=self._rehearsal and phase.in_body and computes(),
        )
        self._store.set(f"where/{number}/{self._facts.rank}", json.dumps(to_json(where)))

    def _operations(self, phase: WatchedPhase) -> list[hang_diagnosis.Operation]:
        making = [hang_diagnosis.MAKING_GROUP for releaser in self._releasers if releaser.making_group]
        found = hang_diagnosis.recorded_operations(phase.started_ns) + making
        if phase.in_body and not any(operation.pending for operation in found):
            found += hang_diagnosis.unrecorded_operations()
        return found

    def _beat(self) -> None:
        self._store.set(f"hb/{self._facts.rank}", str(time.monotonic_ns()))
        self._arm_dump()
        self._on_beat()
        if self._facts.agent_store and os.getppid() != self._parent:
            message = f"the launcher's agent on {self._facts.hostname} (node_rank {self._facts.node_rank}) is gone"
            self.end(AbortReason(name="agent lost", message=message, exit=11))
        ranks = self._heartbeats.ranks
        if not ranks:
            return
        beats = self._store.multi_get([f"hb/{rank}" for rank in ranks])
        self._heartbeats.update(dict(zip(ranks, beats, strict=True)))
        for rank in ranks:
            silent = self._heartbeats.silent_for(rank)
            here = rank in self._siblings.rank_fds
            if rank in self._lost or (silent > 2 * _BEAT_SECONDS and self._store.check([f"bye/{rank}"])):
                continue
            if not here and silent > self._timeouts.dead:
                self._lose(rank, f"no heartbeat for {silent:.0f} s: its host {self._who[rank]['host']} may be down")
            elif here and silent > self._timeouts.unresponsive and self._facts.rank == 0:
                self._phase.deadline_seconds = 0.0

    def _arm_dump(self) -> None:
        faulthandler.dump_traceback_later(_GIL_DUMP_SECONDS, file=self._fault_file, exit=False)

    # ---- the phase -------------------------------------------------------------------------------------------

    def _look_at_phase(self) -> None:
        self._look_for_termination()
        if self._act_on_abort():
            return
        phase = self._phase
        now = time.monotonic()
        if (
            phase.in_body
            and phase.peer_failed is not None
            and now - phase.peer_failed > self._timeouts.grace
            and any(operation.pending for operation in self._operations(phase))
        ):
            self._release(phase, phase.peer_message)
        if phase.released_since is not None and phase.in_body:
            self._free_main(phase)
        if self._facts.rank == 0:
            self._deadline.hold(phase)
        else:
            self._watch_rank_0(phase)

    def _watch_rank_0(self, phase: WatchedPhase) -> None:
        """Ranks above 0: only they can see that rank 0, which holds all to the deadline, is itself stuck."""
        silent = self._heartbeats.silent_for(0)
        latest = self._timeouts.grace + self._timeouts.stuck + _BACKSTOP_SECONDS
        if (
            phase.overdue > latest
            or (phase.overdue > ANSWER_SECONDS and silent > _SILENT_SECONDS)
            or (0 in self._siblings.rank_fds and silent > self._timeouts.unresponsive)
        ):
            self._lose(0, f"it does not answer ({self._liveness.describe_silence(0)})")

    def _look_for_termination(self) -> None:
        if self._terminated_at is None or self.abort_reason is not None:
            return
        for rank in self._siblings.ended():
            self._process_ended(rank)
        if self.abort_reason is None and time.monotonic() - self._terminated_at > _LOST_BEFORE_TERM_SECONDS:
            message = f"ended by SIGTERM on {self._facts.hostname} during {self._phase.label}"
            self.end(AbortReason(name="terminated", message=message, exit=2))

    def _release(self, phase: WatchedPhase, reason: str) -> None:
        phase.release_reason = phase.release_reason or reason
        phase.released_since = phase.released_since or time.monotonic()
        self._free_main(phase, reason)

    def _free_main(self, phase: WatchedPhase, reason: str | None = None) -> None:
        with self._lock:
            if not phase.in_body or phase is not self._phase:
                return
            is_first = phase.number not in self._released
            reason = self._released.setdefault(phase.number, reason or phase.peer_message or phase.label)
            self.python.reason = reason
            releasers = list(self._releasers)
        self.python.release()
        if is_first:
            # A gloo collective that begins while its connections are being shut down may never return.
            until = time.monotonic() + _LEAVES_WITHIN_SECONDS
            while phase.in_body and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
        self._release_all(releasers)

    def _release_all(self, releasers: Sequence[Releaser]) -> None:
        """Try every way, each in a thread of its own: an abort that hangs or fails must not take the watcher along."""
        for releaser in releasers:
            attempt = threading.Thread(target=self._attempt, args=(releaser,), daemon=True)
            attempt.start()
            attempt.join(_RELEASE_SECONDS)

    def _attempt(self, releaser: Releaser) -> None:
        try:
            releaser.release()
        except Exception as error:  # the rank is found stuck then, and this says why
            self._fault_file.write(f"{type(releaser).__name__}: {type(error).__name__}: {error}\n")
            self._fault_file.flush()

    # ---- the end ---------------------------------------------------------------------------------------------

    def end(self, abort: AbortReason, *, broadcast: bool = True) -> None:
        """End the run, from any thread. ``broadcast``: also on the other ranks, which do not know it yet."""
        with self._lock:
            if self.abort_reason is not None:
                return
            self.abort_reason = abort
            self._aborted_at = time.monotonic()
        self._on_abort(abort)
        with contextlib.suppress(Exception):  # the store, or what reads it, may be what broke; the report matters more
            if broadcast and self._facts.world_size > 1:
                post_event(self._store, "end", **asdict(abort))
            self._answer_waits(abort)
        if abort.name != "interrupted":  # pytest raises KeyboardInterrupt by itself
            self._release(self._phase, abort.message)
        else:
            self._release_all(self._releasers)

    def _end_at_once(self, abort: AbortReason) -> None:
        """Rank 0's own main thread is stuck: the watcher ends the run in its place."""
        self.end(abort)
        self._aborted_at -= self._timeouts.terminate

    def _answer_waits(self, abort: AbortReason) -> None:
        number = self._phase.number
        if self._facts.rank != 0:
            exchange.answer_verdict(self._store, number, {"ended": asdict(abort)})
            return
        for rank in self._who.keys() - {0}:
            outcome = "lost" if rank in abort.culprits else "released"
            body = {"outcome": outcome, "message": abort.message, "text": abort.text or abort.message}
            exchange.answer_for(self._store, number, rank, body)

    def _act_on_abort(self) -> bool:
        """Keep at freeing the main thread; when time is up, end the process in its place."""
        abort = self.abort_reason
        if abort is None:
            return False
        if self._phase.in_body and abort.name != "interrupted":
            self._free_main(self._phase, abort.message)
        if time.monotonic() - self._aborted_at > self._timeouts.terminate and not self._stop.is_set():
            self._on_overtime(abort)
        return True
