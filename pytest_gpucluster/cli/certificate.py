"""``gpucluster certificate``: create the certificate of an accepted run, verify it, compare two of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TextIO

from pytest_gpucluster import __version__
from pytest_gpucluster.analysis import certificate
from pytest_gpucluster.analysis.certificate_diff import differences
from pytest_gpucluster.cli import command as cli
from pytest_gpucluster.errors import CertificateError
from pytest_gpucluster.journal.journal import locate
from pytest_gpucluster.text import plural, printable

_EXAMPLES = """\
    gpucluster certificate create gpucluster-report/latest --out accepted.json --by "J. Doe" --note "order 4711"
    gpucluster certificate verify accepted.json --journal gpucluster-report/latest
    gpucluster certificate verify accepted.json --sha256 $DIGEST
    gpucluster certificate diff accepted.json accepted-after-repair.json
    """
_EXIT_CODES = {
    cli.DONE: "the certificate is written; it is intact and of an accepted run; the two have the same parts",
    cli.NEGATIVE: "the run was not accepted (then no certificate is written without --even-though-not-accepted); "
    "the certificate was changed, is not of this journal, or is of a run that was not accepted; the parts differ",
    cli.NO_INPUT: "the journal or a certificate is missing, damaged, of another kind, or of a newer version",
}


@cli.command(
    cli.JOURNAL,
    cli.option("--out FILE", "write the certificate here (default: standard output)"),
    cli.option("--by NAME", "author, for the certificate"),
    cli.option("--note TEXT", "a note, for the certificate"),
    cli.option("--force", "replace an existing file"),
    cli.option(
        "--even-though-not-accepted",
        "write one of any run, such as a rejected delivery; it states that it accepts nothing, and why",
    ),
    help="create the certificate of an accepted run, sealed by a digest",
)
def _create(options: argparse.Namespace) -> int:
    """Write the certificate of an accepted run: the parts of each node (UUID, serial number, board part number, VBIOS,
    InfoROM and GSP firmware of each GPU, network adapters, driver and versions), the verdict, every value with its
    limit and the limit's source, and the digests of the journal and of the files of limits. It is sealed with the
    SHA-256 over its JSON with sorted keys: print the digest, sign it, or send it to the other side.
    """
    path, out = locate(options.journal), options.out or "-"
    cli.require_distinct([("--out", out)], [path], "the journal itself")
    cli.require_new_file(out, force=options.force)
    sha256, journal = certificate.journal_digest(path)
    content = certificate.certificate_content(journal, sha256=sha256)
    blockers = content["not_accepted_because"]
    if blockers and not options.even_though_not_accepted:
        cli.complain(f"{path}: not accepted, so there is no certificate of it:", cli.NEGATIVE)
        _print_list(blockers, sys.stderr)
        return cli.complain("--even-though-not-accepted writes one that states so", cli.NEGATIVE)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    text, digest = certificate.seal(content, at=now, by=options.by or "", note=options.note or "", version=__version__)
    cli.write_text(out, text)
    gpus = sum(len(node["gpus"]) for node in content["nodes"])
    verdict = "accepted" if not blockers else f"NOT ACCEPTED ({content['verdict']['word']})"
    where = "" if out in cli.STDOUT else f": {out}"
    cli.complain(
        f"{verdict}: {len(content['nodes'])} nodes, {gpus} GPUs, {len(content['tests'])} tests{where}", cli.DONE
    )
    cli.complain(f"sha256 {digest}", cli.DONE)
    if content["missing"]:
        cli.complain("unknown, and listed in the certificate:", cli.DONE)
        _print_list(content["missing"], sys.stderr)
    return cli.DONE


@cli.command(
    cli.argument("certificate", metavar="CERTIFICATE", type=Path, help="a file written by `create`"),
    cli.option("--journal JOURNAL", "the run that it must match", type=Path),
    cli.option("--sha256 DIGEST", "its digest, as kept elsewhere"),
    help="check whether a certificate is intact",
)
def _verify(options: argparse.Namespace) -> int:
    """Check whether a certificate was changed since it was made, and whether it belongs to a journal.

    A digest protects only if it is kept elsewhere, too: compare the two.
    """
    known_digest = options.sha256
    document = certificate.read_certificate(options.certificate)
    name = printable(str(options.certificate))
    problems = certificate.seal_problems(document, known_digest=known_digest)
    if options.journal is not None:
        sha256, journal = certificate.journal_digest(locate(options.journal))
        problems += certificate.journal_mismatches(document, journal, sha256)
    if problems:
        print(f"NOT INTACT: {name}")
        _print_list(problems)
        return cli.NEGATIVE
    content = document.content
    made, run = content.made, content.run
    by = f" by {made.get('by')}" if made.get("by") else ""
    lines = [
        f"run {run.get('run_id')} of {run.get('started_at')}, {run.get('nnodes')} nodes, {run.get('world_size')} ranks"
        + (f", merged of {len(run['merged_from'])} runs" if run.get("merged_from") else ""),
        f"made {made.get('at')}{by}",
    ]
    if made.get("note"):
        lines.append(f"note: {made.get('note')}")
    if options.journal is not None:
        lines.append("it matches its journal; author and note are not in the journal")
    if known_digest is None:
        lines.append(
            "an intact certificate may have been changed and sealed again: compare the digest with the one that was "
            "kept elsewhere (--sha256)"
        )
    state = "intact, ACCEPTED" if document.is_accepted else "intact, but of a run that was NOT ACCEPTED"
    print(f"{state}: {name}\nsha256 {document.digest}")  # not wrapped: for copying
    _print_list(lines if document.is_accepted else [*lines, *content.not_accepted_because])
    return cli.DONE if document.is_accepted else cli.NEGATIVE


@cli.command(
    cli.argument("old", metavar="OLD", type=Path, help="a certificate"),
    cli.argument("new", metavar="NEW", type=Path, help="a later one of the same nodes"),
    help="compare the parts in two certificates",
)
def _diff(options: argparse.Namespace) -> int:
    """Name the parts that were moved, replaced, added or removed between two certificates, and firmware that
    changed.
    """
    old, new = certificate.read_certificate(options.old), certificate.read_certificate(options.new)
    for document in (old, new):
        if not document.is_intact:
            raise CertificateError(
                f"{document.path}: it was changed after it was sealed, so it proves nothing; see "
                "`gpucluster certificate verify`"
            )
    found = differences(old, new)
    for difference in found:
        cli.print_paragraph(f"{difference.where}: {difference.what}", f"{difference.kind:<13} ")
    print(plural(len(found), "difference") if found else "the same parts")
    return cli.NEGATIVE if found else cli.DONE


def _print_list(lines: Sequence[str], stream: TextIO | None = None) -> None:
    for line in lines:
        cli.print_paragraph(line, "- ", stream)


COMMAND = cli.Group(
    description="Certify what was accepted: every part, value and limit, sealed by a digest.",
    commands={"create": _create, "verify": _verify, "diff": _diff},
    examples=_EXAMPLES,
    codes=_EXIT_CODES,
)
