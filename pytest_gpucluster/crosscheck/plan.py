"""What nccl-tests is asked for, so that each of our figures gets one beside it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pytest_gpucluster.crosscheck.nccl_output import DTYPES, PROGRAMS
from pytest_gpucluster.crosscheck.ours import Point
from pytest_gpucluster.crosscheck.ranges import Range, ranges
from pytest_gpucluster.errors import OptionError

OUR_OPTIONS = ("-b", "-e", "-f", "-i", "-g", "-t", "-d", "-c", "-o", "-a", "-J", "-N", "-l", "-O", "-C", "-P")
"""What decides whether two figures are of the same thing: it is not for the operator to give again."""
_LONG = ("minbytes", "maxbytes", "stepfactor", "stepbytes", "ngpus", "nthreads", "datatype", "check", "op", "average")
_LONG_ALSO = ("output_file", "run_cycles", "replay", "out_of_place", "report_cputime", "split_comm")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One start of a program: a collective in one dtype at a range of sizes."""

    collective: str
    dtype: str
    range: Range

    @property
    def program(self) -> str:
        """Return the program's name."""
        return PROGRAMS[self.collective]

    def arguments(self, gpus: int, more: Sequence[str]) -> list[str]:
        """Return what it is told; with ``-c 1`` all data are looked at once."""
        own = ["-g", str(gpus), "-d", DTYPES.get(self.dtype, self.dtype), "-c", "1"]
        return [*self.range.arguments, *own, *more]

    def __str__(self) -> str:
        return f"{self.collective} {self.dtype}"


def asked(points: Collection[Point]) -> Iterator[Asked]:
    """Return the starts that it takes, by collective and dtype."""
    for collective, dtype in dict.fromkeys((point.collective, point.dtype) for point in points):
        sizes = {point.size_bytes for point in points if (point.collective, point.dtype) == (collective, dtype)}
        for each in ranges(sizes):
            yield Asked(collective=collective, dtype=dtype, range=each)


def require_others(words: Sequence[str]) -> None:
    """Make sure that the operator's own arguments leave alone what is decided here.

    Raises:
        OptionError: one does not.
    """
    for word in words:
        short, long = word[:2], word.removeprefix("--").partition("=")[0]
        is_long = word.startswith("--") and any(name.startswith(long) for name in (*_LONG, *_LONG_ALSO) if long)
        if is_long or (not word.startswith("--") and short in OUR_OPTIONS):
            raise OptionError(
                f"{word!r} after -- is decided here: sizes, GPUs, dtype and checks are those of the journal. What is "
                "yours is, for example, -n (iterations), -w (warm-up), -G (graphs)"
            )
