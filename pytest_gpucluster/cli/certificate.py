"""``gpucluster certificate``: made of an accepted run, verified, and two of them compared."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from pytest_gpucluster import __version__
from pytest_gpucluster.cli.command import (
    DONE,
    NO_JOURNAL,
    NO_OUTPUT,
    USAGE,
    Step,
    add_journal,
    add_steps,
    complain,
    explain,
    run_step,
    write_text,
)
from pytest_gpucluster.errors import CertificateError, JournalError
from pytest_gpucluster.journal.journal import locate
from pytest_gpucluster.text import one_line, printable

NOT_ACCEPTED = 1

EXIT_CODES = """\
exit codes:
  0  the certificate is written; it is intact and of an accepted run; the two have the same parts
  1  the run was not accepted (then no certificate is written without --even-though-not-accepted); the certificate was
     changed, is not of this journal, or is of a run that was not accepted; the parts differ
  2  wrong usage
  3  the journal or a certificate is missing, damaged, of another kind, or of a newer version
  4  the output cannot be written
"""

_EXAMPLES = """\
  gpucluster certificate create gpucluster-report/latest --out accepted.json --by "J. Doe" --note "order 4711"
  gpucluster certificate verify accepted.json --journal gpucluster-report/latest
  gpucluster certificate verify accepted.json --sha256 $DIGEST
  gpucluster certificate diff accepted.json accepted-after-repair.json
"""

_CREATE = """\
Write the certificate of an accepted run: what each node consists of (UUID, serial number, board part number, VBIOS,
InfoROM and GSP firmware of each GPU, network adapters, driver and versions), the verdict, every value with its limit
and where that comes from, and the digests of the journal and of the files of limits. It is sealed with the SHA-256
over its canonical JSON (RFC 8785): print the digest, sign it, or send it to the other side.
"""

_VERIFY = """\
Check whether a certificate was changed since it was made, and whether it belongs to a journal. A digest protects only
as far as it is kept elsewhere: compare it with the one that was kept.
"""

_DIFF = """\
Name the parts that were swapped, moved, replaced, added or removed between two certificates, and firmware that changed.
"""


def configure_create(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``certificate create``."""
    explain(parser, _CREATE, _EXAMPLES, EXIT_CODES)
    add_journal(parser)
    parser.add_argument("--out", metavar="FILE", help="write the certificate here (default: to the standard output)")
    parser.add_argument("--by", metavar="NAME", help="who accepts; it stands in the certificate")
    parser.add_argument("--note", metavar="TEXT", help="what else is to stand in it")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument(
        "--even-though-not-accepted",
        action="store_true",
        help="write one of any run, such as one of a rejected delivery; it says that it accepts nothing, and why",
    )


def configure_verify(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``certificate verify``."""
    explain(parser, _VERIFY, _EXAMPLES, EXIT_CODES)
    parser.add_argument("certificate", metavar="CERTIFICATE", type=Path, help="a file that `create` has written")
    parser.add_argument("--journal", metavar="JOURNAL", type=Path, help="the run that it must be of")
    parser.add_argument("--sha256", metavar="DIGEST", help="what its digest is known to be, from elsewhere")


def configure_diff(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``certificate diff``."""
    explain(parser, _DIFF, _EXAMPLES, EXIT_CODES)
    parser.add_argument("old", metavar="OLD", type=Path, help="a certificate")
    parser.add_argument("new", metavar="NEW", type=Path, help="a later one of the same nodes")


STEPS = {
    "create": Step(
        help="the certificate of an accepted run, sealed by a digest",
        configure=configure_create,
        run=lambda options: _accept(options.journal, options),
    ),
    "verify": Step(
        help="whether a certificate is intact",
        configure=configure_verify,
        run=lambda options: _verify(options.certificate, options.journal, options.sha256),
    ),
    "diff": Step(
        help="which parts differ between two certificates",
        configure=configure_diff,
        run=lambda options: _diff(options.old, options.new),
    ),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands of ``certificate``."""
    add_steps(parser, "Certify what was accepted: every part, value and limit, sealed by a digest.", STEPS)


def run(options: argparse.Namespace) -> int:
    """Make, verify or compare certificates, and return the exit code."""
    try:
        return run_step(options)
    except (JournalError, CertificateError) as error:
        return complain(str(error), NO_JOURNAL)


def _accept(place: Path, options: argparse.Namespace) -> int:
    from pytest_gpucluster.analysis.certificate import certificate_content, seal
    from pytest_gpucluster.analysis.certificate_audit import journal_digest

    path, out = locate(place), options.out or "-"
    if out != "-" and os.path.realpath(out) == os.path.realpath(path):
        return complain(f"--out {out}: that is the journal itself; name another file", USAGE)
    if out != "-" and os.path.lexists(out) and not options.force:
        return complain(f"--out {out}: there is such a file; name another one, or replace it with --force", NO_OUTPUT)
    sha256, journal = journal_digest(path)
    told = certificate_content(journal, sha256=sha256)
    against = told["not_accepted_because"]
    if against and not options.even_though_not_accepted:
        complain(f"{path}: not accepted, so there is no certificate of it:", NOT_ACCEPTED)
        _list(against, sys.stderr)
        print("gpucluster: --even-though-not-accepted writes one that says so", file=sys.stderr)
        return NOT_ACCEPTED
    now = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    text, digest = seal(told, at=now, by=options.by or "", note=options.note or "", version=__version__)
    try:
        write_text(out, text)
    except OSError as error:
        return complain(f"--out {out}: {error.strerror or error}", NO_OUTPUT)
    gpus = sum(len(node["gpus"]) for node in told["nodes"])
    words = "accepted" if not against else f"NOT ACCEPTED ({told['verdict']['word']})"
    where = "" if out == "-" else f": {out}"
    complain(f"{words}: {len(told['nodes'])} nodes, {gpus} GPUs, {len(told['tests'])} tests{where}", DONE)
    complain(f"sha256 {digest}", DONE)
    if told["missing"]:
        complain("unknown, and listed in the certificate:", DONE)
        _list(told["missing"], sys.stderr)
    return DONE


def _verify(place: Path, of: Path | None, known_digest: str | None) -> int:
    from pytest_gpucluster.analysis.certificate import read_certificate
    from pytest_gpucluster.analysis.certificate_audit import items, journal_digest, journal_mismatches, seal_problems

    if known_digest is not None and not re.fullmatch("[0-9A-Fa-f]{64}", known_digest):
        return complain(f"--sha256 {known_digest}: a SHA-256 is 64 hexadecimal digits", USAGE)
    document = read_certificate(place)
    found = seal_problems(document, known_digest=known_digest)
    if of is not None:
        sha256, journal = journal_digest(locate(of))
        found += journal_mismatches(document, journal, sha256)
    record = document.record
    if found:
        print(f"NOT INTACT: {printable(str(place))}")
        _list(found, sys.stdout)
        return NOT_ACCEPTED
    made = record["made"]
    by = f" by {made.get('by')}" if made.get("by") else ""
    run = record["run"]
    lines = [
        f"sha256 {document.digest}",
        f"run {run.get('run_id')} of {run.get('started_at')}, {run.get('nnodes')} nodes, {run.get('world_size')} ranks",
        f"made {made.get('at')}{by}",
    ]
    if made.get("note"):
        lines.append(f"note: {made.get('note')}")
    merged = items(run, "merged_from")
    if merged:
        lines.append(f"the run is merged of {len(merged)}: {', '.join(str(one.get('verdict')) for one in merged)}")
    if of is not None:
        lines.append("it matches its journal; author and note are not in the journal")
    if known_digest is None:
        kept = "an intact certificate may have been changed and sealed again: compare the digest with the one"
        lines.append(f"{kept} that was kept elsewhere (--sha256)")
    if document.is_accepted:
        print(f"intact, ACCEPTED: {printable(str(place))}")
        _list(lines, sys.stdout)
        return DONE
    print(f"intact, but of a run that was NOT ACCEPTED: {printable(str(place))}")
    _list([*lines, *map(str, record["not_accepted_because"])], sys.stdout)
    return NOT_ACCEPTED


def _diff(first: Path, second: Path) -> int:
    from pytest_gpucluster.analysis.certificate import read_certificate
    from pytest_gpucluster.analysis.certificate_diff import differences, judging_differences

    old, new = read_certificate(first), read_certificate(second)
    for document in (old, new):
        if not document.is_intact:
            raise CertificateError(
                f"{document.path}: it was changed after it was sealed, so it proves nothing; see "
                "`gpucluster certificate verify`"
            )
    found = differences(old, new)
    for difference in found:
        _entry(f"{difference.kind:<13}", f"{difference.where}: {difference.what}")
    print(f"{len(found)} {'difference' if len(found) == 1 else 'differences'}" if found else "the same parts")
    for line in judging_differences(old, new):
        _entry("note", f"judged differently: {line}")
    return NOT_ACCEPTED if found else DONE


_DIGITS = 64
"""Of a SHA-256."""
_TEXT = 2000
"""Characters of one entry, at most: what stands in a file that somebody sent may be of any length."""


def _list(lines: Sequence[str], stream: object) -> None:
    for line in lines:
        _entry("-", line, stream)


def _entry(word: str, text: str, stream: object = None) -> None:
    """Print an entry within the width of the terminal; 80 columns where there is none."""
    width = max(40, shutil.get_terminal_size((80, 24)).columns)
    wrapped = textwrap.wrap(
        printable(one_line(text, _TEXT)),
        width - len(word) - 1,
        break_on_hyphens=False,
        # A digest is copied as one word; what is longer is nobody's word.
        break_long_words=any(len(each) > _DIGITS for each in text.split()),
    )
    for index, line in enumerate(wrapped or [""]):
        print(f"{word if index == 0 else ' ' * len(word)} {line}", file=stream)  # type: ignore[call-overload]  # a stream
