"""The result of a finished run as a site's hook gets it: the argument of ``pytest_gpucluster_verdict``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.isolation.finding import EXCLUDE_FILE as EXCLUDE
from pytest_gpucluster.isolation.finding import excluded_hosts
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.verdict import ACCEPTED


@dataclass(frozen=True, kw_only=True)
class VerdictRecord:
    """A finished run. A hook cannot change its verdict or its exit code."""

    verdict: str
    """ACCEPTED, SELECTION PASSED, PASSED WITH DEVIATIONS, REHEARSED, REJECTED, INCOMPLETE or BROKEN."""
    exit: int
    """The exit code of pytest on this rank (``gpucluster verdict --help`` has the table)."""
    reason: str
    """Why, in one line. It quotes names and messages of any origin: treat it as text, never as a command."""
    rehearsal: bool
    """True on cpu: the result states nothing about hardware, so no action on hardware is due."""
    selection: bool
    """True where only a part of the suite was selected."""
    directory: Path
    """Absolute, the run's folder: journal, report.html, results.json, metrics.prom, maybe the JUnit file."""
    journal: Journal
    """The whole journal (``pytest_gpucluster.journal.journal``), without samples."""
    hosts: tuple[str, ...] = ()
    """The hosts of the run in the order of their first rank; empty where no rank has reported."""
    excluded: tuple[str, ...] = ()
    """The hosts that the isolation confirmed as bad and listed in exclude.txt, by their Slurm names."""
    job_id: str = ""
    """The Slurm job's id, else the launcher's id of the run; may be empty."""
    problems: tuple[str, ...] = ()
    """Why a field of this record is unknown, such as an exclude.txt that cannot be read."""

    @property
    def is_accepted(self) -> bool:
        """Return whether the whole suite passed on GPUs: exit code 0 alone does not state that."""
        return self.verdict == ACCEPTED and self.exit == 0 and not self.rehearsal

    @classmethod
    def of(cls, journal: Journal, directory: Path, *, verdict: str, exit: int, reason: str) -> VerdictRecord:
        """Return the record of a run.

        Args:
            journal: of the run.
            directory: of the run, with exclude.txt if there is one.
            verdict: the word that pytest ends with.
            exit: its exit code.
            reason: why, in one line.
        """
        variables = journal.environment.variables if journal.environment is not None else {}
        excluded, problems = _excluded(directory / EXCLUDE)
        return cls(
            verdict=verdict,
            exit=exit,
            reason=reason,
            rehearsal=journal.run.rehearsal,
            selection=journal.run.selection,
            directory=directory,
            journal=journal,
            hosts=journal.hosts,
            excluded=excluded,
            job_id=variables.get("SLURM_JOB_ID") or journal.run.run_id,
            problems=problems,
        )


def _excluded(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the hosts of exclude.txt, and why they are unknown where the file cannot be read."""
    try:
        return excluded_hosts(path.read_text(encoding="utf-8")), ()
    except FileNotFoundError:
        return (), ()
    except (OSError, UnicodeDecodeError, LaunchError) as error:
        return (), (f"{path}: cannot be read, so no host is excluded here: {error}",)
