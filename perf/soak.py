"""Soak of the suite itself: many short rehearsals, each with another fault in it, and one long session.

    python perf/soak.py                                 # 200 rounds and 300 tests; about an hour on 2 cores
    python perf/soak.py --rounds 10 --session 0         # the short version, as in `make test`
    python perf/soak.py --seed 4711 --round 17          # that round again, as it was drawn
    python perf/soak.py --only kill,stop --session 0

A round is torchrun, or `gpucluster run`, with 2 CPU ranks over a plain test, two criteria and a meeting of all ranks.
Its fault is drawn from the seed: which one (soak_faults.py), on which rank, in which test and at which moment. It is
good if it has ended within its deadline; has left a valid JUnit file, a readable journal and the other reports, with
the verdict of the table of exit codes; has named the planted culprit in the struck test, and no rank in the others; and
has left no process, socket, shared memory or temporary file.

The long session is one run with faults that it survives, in which descriptors, threads and memory of the ranks and of
the recorder must not grow (soak_session.py).

Nothing is run a second time. The folder of a bad round is kept, and the command that repeats it is printed. The exit
code is 1 where anything is bad.
"""

from __future__ import annotations

import functools
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# The tests' way to start real runs with deadlines.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import fork_server
import soak_round
import soak_session
from comparison import Conditions, parser_of, some_of
from soak_faults import KINDS, Plan, draw
from soak_round import Round

_CELLS = "| {:>5} | {:48} | {:>4} | {:>7} | {:3} | {}"


def soak(
    numbers: Sequence[int],
    *,
    seed: int,
    kinds: Sequence[str],
    folder: Path,
    at_once: int = 1,
    run: Callable[[int, Plan, Path], Round] = soak_round.run,
) -> list[Round]:
    """Run rounds, print a line for each as it ends, and keep the folders of bad ones.

    Args:
        numbers: of the rounds.
        kinds: names of KINDS, of which faults are drawn.
        folder: of the rounds' folders.
        at_once: rounds at the same time. Most of a round is waiting.
        run: runs one round.
    """

    def one(number: int) -> Round:
        directory = folder / f"round-{number}"
        directory.mkdir()
        found = run(number, draw(seed, number, kinds), directory)
        print(line_of(found), flush=True)
        if found.is_good:
            shutil.rmtree(directory)
        else:
            print(f"  kept: {directory}\n  again: {again(seed, number, kinds)}", flush=True)
        return found

    print(_CELLS.format("round", "fault", "rank", "seconds", "", "the struck test in the report"))
    print("| ----: | :---- | ---: | ----: | :-- | :----", flush=True)
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        return list(pool.map(one, numbers))


def line_of(found: Round) -> str:
    """Return the line of a round."""
    rank = "" if found.plan.kind == "none" else str(found.plan.victim)
    good = "ok" if found.is_good else "BAD"
    line = _CELLS.format(found.number, found.plan.name, rank, f"{found.seconds:.1f}", good, printable(found.reported))
    return line if found.is_good else f"{line}\n  {printable(found.complaint)}"


def printable(text: str) -> str:
    """Return a text for any terminal."""
    return text.encode("ascii", "backslashreplace").decode()


def again(seed: int, number: int, kinds: Sequence[str]) -> str:
    """Return the command that repeats a round."""
    only = "" if tuple(kinds) == tuple(KINDS) else f" --only {','.join(kinds)}"
    return f"python perf/soak.py --seed {seed} --round {number}{only}"


def table(rounds: Sequence[Round]) -> list[str]:
    """Return the final table: the number of good rounds for each kind of fault."""
    lines = ["| fault | rounds | ended in time | culprit named | nothing left behind | good |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    by_kind = {kind: [found for found in rounds if found.plan.kind == kind] for kind in KINDS}
    for name, found in {**by_kind, "total": list(rounds)}.items():
        if found:
            counts = [
                len(found),
                sum(each.in_time for each in found),
                sum(each.is_named for each in found),
                sum(not each.left_behind for each in found),
                sum(each.is_good for each in found),
            ]
            lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak; return 1 if anything is bad."""
    parser = parser_of(__doc__)
    conditions = Conditions()
    parser.add_argument("--rounds", type=int, default=200, help="(default: 200)")
    parser.add_argument("--seed", type=int, help="(default: another one each time, which is printed)")
    parser.add_argument("--round", type=int, help="only the round of this number, as the seed has it")
    parser.add_argument("--only", type=some_of(KINDS), default=list(KINDS), help="kinds of faults (default: all)")
    parser.add_argument("--first", type=int, default=1, help="number of the first round (default: 1)")
    parser.add_argument("--session", type=int, default=300, help="tests of the long session; 0: none (default: 300)")
    parser.add_argument("--at-once", type=int, default=1, help="rounds at the same time (default: 1)")
    parser.add_argument("--forked", action="store_true", help="ranks are forks of one process: a third of the CPU time")
    parser.add_argument("--keep", type=Path, help="folder for bad rounds (default: TMPDIR)")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=options.keep)).resolve()
    numbers = [options.round] if options.round else range(options.first, options.first + options.rounds)
    begin = time.monotonic()
    if options.forked:
        fork_server.turn_on()
    run = functools.partial(soak_round.run, forked=options.forked)
    rounds = soak(numbers, seed=seed, kinds=options.only, folder=folder, at_once=options.at_once, run=run)
    fork_server.turn_off()
    print("", *table(rounds), sep="\n", flush=True)
    is_good = all(found.is_good for found in rounds)
    if options.session and not options.round:
        (folder / "session").mkdir()
        session = soak_session.run(options.session, folder / "session")
        print("", *soak_session.table(session), sep="\n", flush=True)
        is_good = is_good and not session.problems
    if is_good:
        shutil.rmtree(folder)
    taken = time.monotonic() - begin
    print(
        f"\nseed {seed}, {taken:.0f} s, {conditions.line()}; {'all good' if is_good else f'MISSED; kept in {folder}'}"
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
