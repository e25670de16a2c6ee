"""``gpucluster thresholds calibrate``: floors proposed from accepted runs."""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from pytest_gpucluster import __version__
from pytest_gpucluster.analysis.calibration import (
    NoFloor,
    Proposal,
    Series,
    Source,
    conditions_of,
    conflicting_series,
    name_of,
    other_limit_files,
    overlay,
    propose,
    series,
    source_problems,
)
from pytest_gpucluster.analysis.certificate import journal_digest
from pytest_gpucluster.cli.command import (
    DONE,
    NEGATIVE,
    NO_INPUT,
    CommandError,
    complain,
    load_limits,
    require_new_file,
    require_other_file,
    write_text,
)
from pytest_gpucluster.errors import ThresholdsError
from pytest_gpucluster.journal.journal import locate
from pytest_gpucluster.judge.limits import peak_of
from pytest_gpucluster.metrics import datasheets, measurement
from pytest_gpucluster.text import printable


def calibrate(options: argparse.Namespace) -> int:
    """Write proposed floors and return the exit code."""
    from pytest_gpucluster.judge.loader import shipped_path

    spreads, out = options.spreads, options.out
    paths = [locate(path) for path in options.journals]
    require_other_file("--out", out, [*paths, shipped_path()], "a journal or the shipped limits")
    require_new_file("--out", out, force=options.force)
    sources = [_source(path) for path in paths]
    problems = source_problems(sources, sku=options.sku)
    if problems:
        raise CommandError(NO_INPUT, "\n".join(problems))
    sku = str(sources[0].sku)
    measured = series(sources)
    wanted = [one for one in measured if one.is_judged or options.recorded]
    found = [_floor(one, sku, measured, spreads=spreads) for one in wanted]
    proposals = [one for one in found if isinstance(one, Proposal)]
    kept = [one for one in found if not isinstance(one, Proposal)]
    if not proposals:
        complain("no floor can be proposed:", NEGATIVE)
        _print_kept(kept)
        return NEGATIVE
    now = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    shipped = hashlib.sha256(shipped_path().read_bytes()).hexdigest()
    text = overlay(
        sku,
        proposals,
        kept,
        sources,
        recorded=[one for one in measured if one not in wanted],
        at=now,
        version=__version__,
        spreads=spreads,
        shipped=shipped,
    )
    _require_loadable(text)
    write_text(out, text, "--out")
    counted = "1 floor" if len(proposals) == 1 else f"{len(proposals)} floors"
    complain(f"{counted} proposed for {sku}, {len(kept)} left as they are: {out}", DONE)
    others = other_limit_files(sources, shipped)
    if others:
        named = ", ".join(path for path, _ in others[:3])
        complain(f"these runs were judged by {named}, which is not shipped: see the head of the file", DONE)
    below = sum(bool(proposal.below) for proposal in proposals)
    if below:
        complain(f"{below} of them are above an accepted value; the file lists these: check them first", DONE)
    return DONE


def _source(path: Path) -> Source:
    sha256, journal = journal_digest(path)
    return Source(path=str(path), sha256=sha256, journal=journal)


def _floor(one: Series, sku: str, measured: Sequence[Series], *, spreads: float) -> Proposal | NoFloor:
    metric = measurement.known(one.metric)
    facts = {**one.topology, **one.labels}
    # As the judge does: across nodes the rate is the fabric's, which no link within a node bounds.
    has_peak = metric.peak not in datasheets.LINK_PEAKS or facts.get("nnodes") == "1"
    try:
        conditions_of(one)
    except ThresholdsError as error:
        return NoFloor(series=one, why=str(error))
    judged = conflicting_series(one, measured)
    if judged is not None:
        return NoFloor(series=one, why=f"it is recorded only, and {name_of(judged)} carries the floor")
    return propose(one, spreads=spreads, peak=peak_of(metric, datasheets.SKUS.get(sku)) if has_peak else None)


def _require_loadable(text: str) -> None:
    """Read the file as a run would, before it is written.

    Raises:
        ThresholdsError: it is malformed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "proposed.yaml")
        path.write_text(text, encoding="utf-8")
        load_limits([path])


def _print_kept(kept: Sequence[NoFloor]) -> None:
    for one in kept:
        print(f"- {name_of(one.series)}: {printable(one.why)}", file=sys.stderr)
    if not kept:
        print("- no rate was judged in these runs", file=sys.stderr)
