import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict

import pytest
from ranks import DEADLINE_SECONDS, facts_of
from recordings import wait_until
from torch.distributed import HashStore

from pytest_gpucluster.agreement import liveness, watchdog
from pytest_gpucluster.agreement.exchange import AbortReason, Exchange, key_of, verdict_key
from pytest_gpucluster.agreement.hang_diagnosis import MAKING_GROUP, Where
from pytest_gpucluster.agreement.liveness import start_time
from pytest_gpucluster.agreement.release import RELEASE_SIGNAL, Released
from pytest_gpucluster.agreement.store import EventLog, Stores, post_event
from pytest_gpucluster.agreement.watchdog import Watch
from pytest_gpucluster.metrics.codec import read, to_json
from pytest_gpucluster.session.options import Timeouts

TICK = 0.01
NAMES = {0: "rank 0 (gpu-06)", 1: "rank 1 (gpu-07)"}
ENDING = AbortReason(name="rank lost", message="rank 1 (gpu-07) is lost", exit=11, culprits=[1])


def hang(after=lambda: None):
    """Do something that leads to a release, and hang. In one call: the release may come at once."""
    after()
    time.sleep(DEADLINE_SECONDS)


class Blocked:
    """A releaser of a call that never returns by itself, such as the making of a group."""

    def __init__(self, *, making_group):
        self.making_group = making_group
        self.releases = 0

    def release(self):
        self.releases += 1


class Place:
    """One rank's watch over a store in memory. What the other rank does, the test does in its place."""

    def __init__(self, rank, fault_file, *, timeouts, store, peer):
        self.store = store
        self.endings = []
        self.overtimes = []
        self.beats = 0
        self.beat_error = None
        facts = facts_of(rank=rank, node_rank=rank, hostname=f"gpu-0{6 + rank}")
        mine = {"host": facts.hostname, "pid": os.getpid(), "start_time": start_time(os.getpid()), "fault_file": "/no"}
        theirs = {"host": f"gpu-0{7 - rank}", "pid": 1, "start_time": 1, "fault_file": "/no", **peer}
        store.set("hb/0", "0")
        store.set("hb/1", "0")
        self.watch = Watch(
            facts=facts,
            side=store,
            numbers=Exchange(Stores(main=store, side=store, for_group=lambda name: None), rank, 2),
            who={rank: mine, 1 - rank: theirs},
            names=NAMES,
            timeouts=timeouts,
            fault_file=fault_file,
            on_abort=self.endings.append,
            on_beat=self._beat,
            on_overtime=self.overtimes.append,
        )

    def _beat(self):
        self.beats += 1
        if self.beat_error is not None:
            raise self.beat_error

    def posted(self, kind):
        return [event for event in EventLog(self.store).unread() if event["kind"] == kind]

    def enter(self, seconds=DEADLINE_SECONDS, phase="call of t", *, leave=False):
        number = self.watch.enter(phase, seconds)
        if leave:
            self.watch.leave()
        return number

    def settle(self):
        """Let the watcher look around a few times."""
        time.sleep(10 * TICK)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Make and start a watch, and take back what it does to this process."""
    monkeypatch.setattr(watchdog, "_TICK_SECONDS", TICK)
    monkeypatch.setattr(watchdog, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(liveness, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "_SILENT_SECONDS", 0.2)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, RELEASE_SIGNAL)}
    wakeup = signal.set_wakeup_fd(-1)
    made = []
    with (tmp_path / "fault").open("w") as fault_file:

        def make(rank, store=None, peer=None, **timeouts):
            chosen = Timeouts(**{"grace": 0.05, "stuck": 0.2, "terminate": 10.0, **timeouts})
            made.append(Place(rank, fault_file, timeouts=chosen, store=store or HashStore(), peer=peer or {}))
            made[-1].watch.start()
            return made[-1]

        try:
            yield make
        finally:
            for each in made:
                each.watch.close()
            faulthandler.cancel_dump_traceback_later()
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)


def answer_where(place, rank, number, *operations):
    """In the place of a peer: say where it is, once rank 0 asks."""

    def answer():
        wait_until(lambda: place.posted("overdue"))
        where = Where(stack='  File "/s/test_x.py", line 3, in test_it', operations=operations)
        place.store.set(f"where/{number}/{rank}", json.dumps(to_json(where)))

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


# ---- deadlines -----------------------------------------------------------------------------------------------------


def test_a_rank_0_that_hangs_is_found_named_and_released(place):
    here = place(0)
    number = here.watch.enter("call of test_x.py::test_it", 0.1)
    here.store.set(key_of(number, 1), "{}")
    peer = answer_where(here, 1, number)
    with pytest.raises(Released) as caught:
        hang()
    peer.join()
    here.watch.leave()
    reason = str(caught.value)
    assert re.fullmatch(r"rank 0 \(gpu-06\) hangs at test_watch\.py:\d+ in hang", reason)
    assert here.watch.diagnosis(number).late == "not finished within 0.1 s"
    assert here.watch.released(number) == reason
    assert list(here.watch.diagnosis(number).culprits) == [0]
    assert "time.sleep(DEADLINE_SECONDS)" in here.watch.diagnosis(number).culprits[0].text
    assert not here.watch.diagnosis(number).stuck
    assert here.endings == []


def test_a_peer_that_hangs_is_named_and_every_rank_is_told_to_release(place):
    here = place(0, stuck=DEADLINE_SECONDS)
    number = here.enter(0.05, leave=True)
    answer_where(here, 1, number).join()
    wait_until(lambda: here.posted("release"))
    (event,) = here.posted("release")
    assert event["number"] == number
    assert event["reason"] == "rank 1 (gpu-07) hangs at test_x.py:3 in test_it"
    assert list(event["culprits"]) == ["1"]
    assert list(here.watch.diagnosis(number).culprits) == [1]
    assert here.watch.released(number) is None, "this rank came back by itself"
    here.store.set(key_of(number, 1), "{}")
    following = here.enter(phase="teardown of t")
    assert here.watch.diagnosis(following).culprits == here.watch.diagnosis(number).culprits == {}
    assert here.watch.released(following) is None


def test_nobody_is_asked_or_released_before_the_deadline_or_when_all_have_arrived(place):
    here = place(0)
    number = here.enter(leave=True)
    here.settle()
    assert here.posted("overdue") == here.posted("release") == []
    here.store.set(key_of(number, 1), "{}")
    here.store.set(key_of(here.enter(0.01, "teardown of t", leave=True), 1), "{}")
    here.settle()
    here.settle()
    assert here.posted("overdue") == here.posted("release") == here.endings == []


def test_a_peer_that_neither_answers_nor_comes_back_ends_the_run_and_is_answered_for(place):
    here = place(0)
    number = here.enter(0.05, leave=True)
    wait_until(lambda: here.endings)
    assert here.watch.diagnosis(number).stuck
    (ending,) = here.endings
    assert (ending.name, ending.exit, list(ending.culprits)) == ("rank stuck", 11, [1])
    assert re.match(r"rank 1 \(gpu-07\) .* call of t: .* \(on gpu-07, no heartbeat for ", ending.message)
    answered = json.loads(here.store.get(key_of(number, 1)))
    assert answered["outcome"] == "hung"
    assert answered["message"].startswith("does not answer (on gpu-07")


def test_a_rank_says_where_it_is_when_rank_0_asks(place):
    here = place(1)
    here.watch.guard(Blocked(making_group=True))
    number = here.enter()
    post_event(here.store, "overdue", number=number)
    wait_until(lambda: here.store.check([f"where/{number}/1"]))
    where = read(Where, json.loads(here.store.get(f"where/{number}/1")), "rank 1")
    assert "in test_a_rank_says_where_it_is_when_rank_0_asks" in where.stack
    assert list(where.pending) == [MAKING_GROUP]


def test_a_release_by_rank_0_frees_whatever_blocks_this_rank(place, monkeypatch):
    monkeypatch.setattr(watchdog, "_LEAVES_WITHIN_SECONDS", DEADLINE_SECONDS)
    here = place(1)
    blocked = Blocked(making_group=False)
    here.watch.guard(blocked)
    number = here.enter()
    with pytest.raises(Released, match=r"^not finished within 3 s$"):
        hang(lambda: post_event(here.store, "release", number=number, reason="not finished within 3 s", culprits={}))
    # Its groups come second: a gloo collective that begins while its connections are shut down may never return.
    assert blocked.releases == 0
    here.watch.leave()
    wait_until(lambda: blocked.releases)


def test_no_release_comes_for_another_phase_or_after_the_body_has_been_left(place):
    here = place(1)
    number = here.enter()
    post_event(here.store, "release", number=number - 1, reason="old", culprits={})
    post_event(here.store, "release", number=number + 1, reason="early", culprits={})
    here.settle()
    assert here.watch.released(number) is None
    here.watch.leave()
    post_event(here.store, "release", number=number, reason="late", culprits={})
    here.settle()
    assert here.watch.released(number) is None


# ---- a peer's failure ----------------------------------------------------------------------------------------------


def test_a_rank_that_waits_in_a_collective_for_a_failed_peer_is_released_after_a_grace(place):
    here = place(1, grace=0.2)
    here.watch.guard(Blocked(making_group=True))
    number = here.enter()
    begin = time.monotonic()
    with pytest.raises(Released, match=r"^rank 0 \(gpu-06\) failed: ValueError: boom$"):
        hang(lambda: post_event(here.store, "absent", rank=0, number=number, message="failed: ValueError: boom"))
    assert time.monotonic() - begin >= 0.15
    here.watch.leave()
    assert here.watch.explanation(number, 0) == "rank 0 (gpu-06) failed: ValueError: boom"


def test_a_failure_in_a_phase_that_this_rank_has_not_entered_yet_is_not_forgotten(place):
    here = place(1, grace=0.1)
    here.watch.guard(Blocked(making_group=True))
    number = here.watch.enter("setup of t", DEADLINE_SECONDS)
    here.watch.leave()
    post_event(here.store, "absent", rank=0, number=number + 1, message="failed: ValueError: boom")
    here.settle()
    here.enter()
    with pytest.raises(Released, match="boom"):
        hang()
    here.watch.leave()


def test_a_rank_that_is_still_busy_is_left_alone_after_a_peers_failure(place):
    here = place(1, grace=0.02)
    here.watch.guard(Blocked(making_group=False))
    number = here.enter()
    post_event(here.store, "absent", rank=0, number=number, message="failed: boom")
    wait_until(lambda: here.watch.explanation(number, 0))
    here.settle()
    assert here.watch.released(number) is None


def test_the_first_failure_of_a_phase_is_told_and_no_other(place):
    here = place(1)
    first = here.enter()
    here.watch.report_absence(here.store, first, "failed: one")
    second = here.watch.enter("teardown of t", DEADLINE_SECONDS)
    here.store.set(f"absent/{second}", "0")  # rank 0 was faster
    here.watch.report_absence(here.store, second, "failed: two")
    assert [event["message"] for event in here.posted("absent")] == ["failed: one"]


def test_what_explains_a_cut_connection_is_waited_for_but_not_for_ever(place):
    here = place(1)
    number = here.enter(leave=True)
    assert here.watch.explanation(number, 0.02) is None
    timer = threading.Timer(0.05, post_event, (here.store, "absent"), {"rank": 0, "number": number, "message": "died"})
    timer.start()
    assert here.watch.explanation(number, DEADLINE_SECONDS) == "rank 0 (gpu-06) died"
    timer.join()


# ---- losses --------------------------------------------------------------------------------------------------------


def test_a_loss_that_another_rank_saw_ends_the_run_here_and_frees_this_rank(place):
    here = place(1)
    number = here.enter()
    with pytest.raises(Released):
        hang(lambda: post_event(here.store, "lost", rank=0, message="process 7"))
    here.watch.leave()
    ending = here.watch.abort_reason
    assert (ending.name, ending.exit, list(ending.culprits)) == ("rank lost", 11, [0])
    assert re.match(r"rank 0 \(gpu-06\) is lost .* of t: process 7$", ending.message)
    assert here.endings == [here.watch.abort_reason]
    wait_until(lambda: here.store.check([verdict_key(number)]))
    assert json.loads(here.store.get(verdict_key(number))) == {"ended": asdict(here.watch.abort_reason)}


def test_rank_0_answers_for_a_lost_rank_so_that_it_does_not_wait_for_it(place):
    here = place(0)
    number = here.enter(leave=True)
    post_event(here.store, "lost", rank=1, message="gone")
    wait_until(lambda: here.store.check([key_of(number, 1)]))
    assert json.loads(here.store.get(key_of(number, 1)))["outcome"] == "lost"


@pytest.mark.parametrize(
    "says_bye", [pytest.param(False, id="without a word"), pytest.param(True, id="with a goodbye")]
)
def test_a_frozen_heartbeat_on_another_host_is_a_loss_unless_the_rank_said_goodbye(place, says_bye):
    store = HashStore()
    if says_bye:
        store.set("bye/1", "finished")
    here = place(0, store, dead=0.2)
    here.enter(leave=True)
    if says_bye:
        wait_until(lambda: here.beats > 8)
        assert here.endings == []
    else:
        wait_until(lambda: here.endings)
        assert here.endings[0].name == "rank lost"
        assert re.match(r"rank 1 \(gpu-07\) is lost .* of t: no heartbeat ", here.endings[0].message)
        assert here.posted("lost")[0]["rank"] == 1


def test_a_heartbeat_that_goes_on_is_no_loss(place):
    here = place(0, dead=0.3)
    while here.beats <= 12:
        here.store.set("hb/1", str(time.monotonic()))
        time.sleep(0.005)
    assert here.endings == []
    assert here.store.get("hb/0") != b"0"


@pytest.fixture
def sibling():
    """The process of rank 1, on the host of rank 0."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def on_this_host(process, **more):
    """What is known of a rank 1 beside rank 0."""
    return {"host": "gpu-06", "pid": process.pid, "start_time": start_time(process.pid), **more}


@pytest.mark.parametrize(
    ("left", "told"),
    [
        pytest.param("", "(killed, or ended by os._exit)", id="nothing"),
        pytest.param(
            "Fatal Python error: Segmentation fault\n", "(Fatal Python error: Segmentation fault)", id="stacks"
        ),
        pytest.param(None, "has exited without a message", id="no file at all"),
    ],
)
def test_a_sibling_that_dies_is_lost_at_once_and_its_last_words_are_told(place, sibling, tmp_path, left, told):
    path = tmp_path / "sibling"
    if left is not None:
        path.write_text(left)
    here = place(0, peer=on_this_host(sibling, fault_file=str(path)))
    here.enter(leave=True)
    sibling.kill()
    wait_until(lambda: here.endings)
    message = here.endings[0].message
    assert re.match(rf"rank 1 \(gpu-07\) is lost .* of t: process {sibling.pid} ", message)
    assert message.endswith(told)


def test_survivors_take_away_what_a_dead_sibling_left_and_nothing_of_the_living(place, sibling, tmp_path):
    left = tmp_path / "gpucluster-fault-1-a.txt"
    left.touch()
    here = place(0, peer=on_this_host(sibling, fault_file=str(left)))
    here.watch.remove_left()
    assert left.exists()
    sibling.kill()
    sibling.wait()
    here.watch.remove_left()
    assert not left.exists()


def test_a_sibling_that_cannot_be_released_is_killed_and_after_a_goodbye_it_is_not_lost(place, sibling):
    here = place(0, peer=on_this_host(sibling))
    here.store.set("bye/1", "")
    here.watch.kill_stuck([], wait_seconds=DEADLINE_SECONDS)
    assert sibling.poll() is None
    here.watch.kill_stuck([1], wait_seconds=0)
    assert sibling.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    here.settle()
    assert here.endings == []


# ---- the end -------------------------------------------------------------------------------------------------------


def test_an_ending_is_told_once_however_often_it_is_found(place):
    here = place(0)
    here.watch.end(ENDING)
    here.watch.end(AbortReason(name="other", message="later", exit=2))
    post_event(here.store, "lost", rank=1, message="later")
    here.settle()
    assert here.watch.abort_reason == ENDING
    assert here.endings == [ENDING]
    assert [event["message"] for event in here.posted("end")] == [ENDING.message]


def test_an_ending_that_a_peer_told_is_taken_over_and_not_told_again(place):
    here = place(1)
    body = {"name": "interrupted", "message": "interrupted (Ctrl-C) on rank 0", "exit": 2, "culprits": [], "text": ""}
    post_event(here.store, "end", **body)
    wait_until(lambda: here.endings)
    here.settle()
    assert here.endings == [AbortReason(**body)]
    assert len(here.posted("end")) == 1


def test_an_ending_of_all_ranks_by_an_exchange_needs_no_telling_and_has_its_time(place):
    here = place(1, terminate=0.3)
    begin = time.monotonic()
    here.watch.agreed_to_end(ENDING)
    here.watch.agreed_to_end(AbortReason(name="other", message="later", exit=2))
    here.settle()
    assert here.watch.abort_reason == ENDING
    assert here.endings == here.posted("end") == []
    wait_until(lambda: here.overtimes)
    assert time.monotonic() - begin >= 0.3


def test_a_main_thread_that_does_not_come_back_in_time_is_ended_in_its_place(place):
    here = place(0, terminate=0.3)
    here.watch.end(ENDING)
    begin = time.monotonic()
    wait_until(lambda: here.overtimes)
    assert time.monotonic() - begin >= 0.2
    assert here.overtimes[0] == ENDING


def test_after_the_end_the_main_thread_is_freed_from_every_further_body(place):
    here = place(0)
    here.watch.end(ENDING)
    with pytest.raises(Released, match=r"^rank 1 \(gpu-07\) is lost$"):
        hang(lambda: here.watch.enter("teardown of t", DEADLINE_SECONDS))
    here.watch.leave()


def test_an_orderly_close_ends_the_watcher_and_calls_no_overtime(place):
    here = place(0, terminate=0.05)
    here.watch.end(ENDING)
    here.watch.close()
    seen = len(here.overtimes)
    time.sleep(0.1)
    assert len(here.overtimes) == seen
    assert "gpucluster-watch" not in [thread.name for thread in threading.enumerate()]


def test_sigterm_is_a_goodbye_and_ends_the_run_once_no_death_explains_it(place, monkeypatch):
    monkeypatch.setattr(watchdog, "_LOST_BEFORE_TERM_SECONDS", 0.1)
    here = place(0)
    here.enter(leave=True)
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: here.endings)
    ending = here.endings[0]
    assert (ending.name, ending.exit) == ("terminated", 2)
    assert re.search("SIGTERM on gpu-06 .* of t$", ending.message)
    assert here.store.get("bye/0") == b"SIGTERM"


def test_a_death_that_explains_a_sigterm_is_what_is_told(place, sibling, monkeypatch):
    monkeypatch.setattr(watchdog, "_LOST_BEFORE_TERM_SECONDS", 5.0)
    here = place(0, peer=on_this_host(sibling))
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: here.store.check(["bye/0"]))
    here.settle()
    assert here.endings == []
    sibling.kill()
    wait_until(lambda: here.endings)
    assert here.endings[0].name == "rank lost"


class Breaking(HashStore):
    """A store whose connection can break."""

    broken = False
    WHY = "Connection reset by peer"

    def add(self, key, amount):
        if self.broken:
            raise RuntimeError(self.WHY)
        return super().add(key, amount)

    def compare_set(self, key, expected, desired):
        if self.broken:
            raise RuntimeError("Broken pipe")
        return super().compare_set(key, expected, desired)


def test_a_store_that_is_gone_ends_the_run_and_frees_this_rank(place):
    store = Breaking()
    here = place(1, store)
    here.enter()
    with pytest.raises(Released):
        hang(lambda: setattr(store, "broken", True))
    here.watch.leave()
    (ending,) = here.endings
    assert (ending.name, ending.exit) == ("store lost", 11)
    assert "gpu-06:29500" in ending.message
    assert ending.text == Breaking.WHY


def test_a_watcher_that_breaks_ends_the_run_instead_of_watching_no_more(place):
    here = place(1)
    here.enter()
    with pytest.raises(Released):
        hang(lambda: setattr(here, "beat_error", KeyError("x")))
    here.watch.leave()
    (ending,) = here.endings
    assert (ending.name, ending.exit) == ("internal error", 3)
    assert re.search(r"rank 1 \(gpu-07\) broke: KeyError: 'x'$", ending.message)
    assert "Traceback" in ending.text
    assert [event["name"] for event in here.posted("end")] == ["internal error"]


def test_a_silent_rank_0_is_lost_once_its_deadline_has_passed_and_one_that_beats_is_not(place):
    here = place(1, stuck=DEADLINE_SECONDS)
    here.enter(0.05, leave=True)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        here.store.set("hb/0", str(time.monotonic()))
        time.sleep(0.02)
    assert here.endings == []
    wait_until(lambda: here.endings)
    assert (here.endings[0].name, list(here.endings[0].culprits)) == ("rank lost", [0])
    assert "(on gpu-06, no heartbeat for " in here.endings[0].message
