"""The one verdict of a sweep, from what became of every node alone and of the survivors together. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gpucluster.journal.verdict import (
    ACCEPTED,
    BROKEN,
    INCOMPLETE,
    PASSED_WITH_DEVIATIONS,
    REHEARSED,
    REJECTED,
    SELECTION_PASSED,
    Verdict,
)
from pytest_gpucluster.sweep.outcome import BROKE, NO_ANSWER, PASSES, Outcome

_NAMED = 8


def conclude(
    nodes: Sequence[str],
    alone: Sequence[Outcome],
    together: Outcome | None,
    *,
    why_not_together: str = "",
    interrupted: str = "",
    broke: str = "",
) -> Verdict:
    """Return the verdict of a sweep.

    Accepted (0) takes that every node has passed alone and that all survivors have passed together. A node or a joint
    run that is rejected makes the whole rejected (1). Else what broke or gave no answer makes it broken (11), and
    what is incomplete, or did not run together, incomplete (10).

    Args:
        nodes: all nodes of the sweep. One without an outcome has given no answer.
        alone: what became of them, each once.
        together: what became of the survivors; None where they did not run.
        why_not_together: why they did not.
        interrupted: by what the sweep was interrupted, if it was.
        broke: what went wrong with the sweep itself, if something did.
    """
    if interrupted:
        return Verdict(
            word=BROKEN, exit=2, reason=f"interrupted by {interrupted}: {len(alone)} of {len(nodes)} nodes ended"
        )
    told = {outcome.node: outcome for outcome in alone}
    everything = [*(told[node] for node in nodes if node in told), *([together] if together else [])]
    missing = [node for node in nodes if node not in told]
    rejected = [outcome for outcome in everything if outcome.verdict == REJECTED or outcome.exit == 1]
    if rejected:
        return Verdict(word=REJECTED, exit=1, reason=_reason("rejected", rejected))
    broken = [outcome for outcome in everything if not outcome.survived]
    if broke or broken or missing:
        reasons = [broke] if broke else []
        reasons += [_reason("without a verdict", broken)] if broken else []
        reasons += [f"{NO_ANSWER}: {_named(missing)}"] if missing else []
        return Verdict(word=BROKEN, exit=BROKE, reason="; ".join(reasons))
    deviating = [outcome for outcome in everything if outcome.exit == 12]
    incomplete = [outcome for outcome in everything if not outcome.passed and outcome.exit != 12]
    if incomplete or together is None:
        reasons = [_reason("incomplete", incomplete)] if incomplete else []
        reasons += [] if together else [f"not run together: {why_not_together or 'nobody said why'}"]
        return Verdict(word=INCOMPLETE, exit=10, reason="; ".join(reasons))
    if deviating:
        return Verdict(word=PASSED_WITH_DEVIATIONS, exit=12, reason=_reason("with deviations", deviating))
    words = {outcome.verdict for outcome in everything}
    # The weakest pass is the sweep's: a rehearsal accepts nothing.
    word = next(word for word in (REHEARSED, SELECTION_PASSED, ACCEPTED) if word in words and word in PASSES)
    return Verdict(word=word, exit=0, reason=f"{len(nodes)} nodes passed alone, and together")


def _reason(what: str, outcomes: Sequence[Outcome]) -> str:
    return f"{what}: {_named([outcome.node for outcome in outcomes])}; {outcomes[0].node}: {outcomes[0].failure}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
