"""Which tests run and with what: the workload file, the inputs of training, the part of the suite asked for, markers.

The workload is read from the file next to the collected tests before the first one runs. A test runs only where there
is room for it: ranks, nodes, a GPU, its dtypes, data. A marker of this plugin without a usable value is a usage error:
it must not be overlooked.

Inputs of training are data, a model, a scratch folder for checkpoints, a reference curve. An option only says where
each of them is. Whether it is there is looked up on every rank before the first test, since a path may be missing on
one node alone. ``os.path`` is asked, for which a path that cannot be looked at is not there.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from pytest_gpucluster.config.workload_loader import FILE_NAME, Loaded, Override, find, load
from pytest_gpucluster.errors import CurveError, OptionError, ThresholdsError
from pytest_gpucluster.launch.suite import place_of, suite_of
from pytest_gpucluster.metrics.datasheets import PEAK_UNITS, Sku
from pytest_gpucluster.metrics.units import did_you_mean

FIXTURE = "gpucluster_workload"


def read_workload(
    items: Sequence[pytest.Item],
    *,
    root: Path,
    profile: str,
    overrides: Sequence[Override] = (),
    small_training: bool = False,
) -> Loaded | None:
    """Return the workload of these tests, or None if none of them uses the fixture ``workload``.

    Args:
        items: the collected tests.
        root: pytest's root directory. The file lies next to the tests, or in a folder above them up to this one.
        profile: the one in force.
        overrides: what the operator has changed.
        small_training: as on a simulated cluster.

    Raises:
        ThresholdsError: there is no file, or more than one, or it is malformed, or does not go with the overrides.
    """
    files: dict[Path, str] = {}
    for item in items:
        known: Any = getattr(item, "_fixtureinfo", None)  # of functions only
        definitions: Sequence[Any] = known.name2fixturedefs.get(FIXTURE) or () if known is not None else ()
        if not definitions or definitions[-1].func.__module__ != "pytest_gpucluster.session.fixtures":
            continue  # without the fixture, or with one of the same name from its conftest
        found = find(item.path.parent, root)
        if found is None:
            raise ThresholdsError(
                f"{item.nodeid} uses the fixture {FIXTURE}, and there is no {FILE_NAME} next to it or in a folder above"
                f" it up to {root}; write one as acceptance/{FILE_NAME} of pytest-gpucluster is written"
            )
        files.setdefault(found, item.nodeid)
    if len(files) > 1:
        listed = " and ".join(f"{_shown(path, root)} (for {nodeid})" for path, nodeid in list(files.items())[:2])
        raise ThresholdsError(
            f"two workloads in one run: {listed}; run these tests apart, or keep one {FILE_NAME} above both"
        )
    for path in files:
        return load(path, profile=profile, overrides=overrides, name=_shown(path, root), small_training=small_training)
    return None


def _shown(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


DATA_NAMES = ("images", "function_calls")
_FILES = (".json", ".jsonl", ".safetensors")
_DATA_FORMS = "images=FOLDER, function_calls=FILE[@sha256:HEX], function_calls=ORG/NAME[@REVISION] of the hub"
# Letters, digits, "-", "_" and "." in each part: https://huggingface.co/docs/huggingface_hub/package_reference/utilities
# (validate_repo_id). A revision is a branch, a tag or a commit.
_HUB = re.compile(r"(?P<name>(?:\w[\w.-]*/)?\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_SHA256 = re.compile(r"(?P<path>.+)@sha256:(?P<digest>.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where data or a model comes from: a local path, or a name on the Hugging Face hub."""

    name: str
    """As it was written, without revision or sha256."""
    path: Path | None
    """The local file or folder; None for a name on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub; None where none was written, and for a local path."""
    sha256: str | None = None
    """What the local file must hash to, in hexadecimal; None where nothing is demanded."""

    def __str__(self) -> str:
        suffix = f"@{self.revision}" if self.revision else f"@sha256:{self.sha256}" if self.sha256 else ""
        return f"{self.path}{suffix}" if self.path is not None else f"{self.name}{suffix} on the hub"


@dataclass(frozen=True, kw_only=True)
class Data:
    """One value of ``--gpucluster-data``."""

    key: str
    """One of DATA_NAMES."""
    source: Source

    def __str__(self) -> str:
        return f"{self.key}={self.source}"


@dataclass(frozen=True, kw_only=True)
class TrainingInputs:
    """The type of the ``settings`` fixture."""

    data: Mapping[str, Source] = field(default_factory=lambda: MappingProxyType({}))
    """"images" and "function_calls", as far as they were given."""
    model: Source | None = None
    """The pretrained model; None: none was given."""
    resume: bool = False
    """Go on from the newest checkpoint in the scratch folder."""
    scratch: Path | None = None
    """Where checkpoints go, on a file system that all ranks share; None: the test's artifacts folder."""
    reference_curve: Path | None = None
    """The reference curve to compare with; None: none."""

    @classmethod
    def of(cls, settings: Any) -> TrainingInputs:
        """Take them from the resolved options (``options.Settings``)."""
        return cls(
            data=MappingProxyType({data.key: data.source for data in settings.data}),
            model=settings.model,
            resume=settings.resume == "yes",
            scratch=settings.scratch,
            reference_curve=settings.reference_curve,
        )

    def values(self) -> dict[str, str]:
        """Return option -> value as text, of what was given. It must be the same on all ranks."""
        found = {f"--gpucluster-data {key}": str(source) for key, source in self.data.items()}
        found |= {
            f"--gpucluster-{name}": str(value)
            for name, value in (
                ("model", self.model),
                ("scratch", self.scratch),
                ("reference-curve", self.reference_curve),
            )
            if value is not None
        }
        return found | ({"--gpucluster-resume": "yes"} if self.resume else {})

    def problems(self) -> list[str]:
        """Look up what was given on this host. Return what is wrong, a line each; empty if nothing is."""
        found = [
            _problem(f"--gpucluster-data {key}={source.name}", source.path, key == "images")
            for key, source in self.data.items()
            if source.path is not None
        ]
        if self.model is not None and self.model.path is not None:
            option, path = f"--gpucluster-model {self.model.name}", self.model.path
            wrong = _problem(option, path, True)
            if wrong and not os.path.exists(path):
                wrong += ", and that is no name on the hub (ORG/NAME[@REVISION])"
            elif not wrong and not os.path.isfile(path / "config.json"):
                wrong = f"{option}: the folder has no config.json; name one that save_pretrained or the hub has made"
            found.append(wrong)
        if self.scratch is not None:
            option = f"--gpucluster-scratch {self.scratch}"
            wrong = _problem(option, self.scratch, True)
            if not wrong and not os.access(self.scratch, os.W_OK | os.X_OK):
                wrong = f"{option}: nothing can be written into it"
            found.append(wrong)
        if self.reference_curve is not None:
            option = f"--gpucluster-reference-curve {self.reference_curve}"
            wrong = _problem(option, self.reference_curve, False)
            if not wrong:
                from pytest_gpucluster.benchmarks.lora import reference_curve  # a run without one pays nothing

                try:
                    reference_curve.read(self.reference_curve)
                except CurveError as error:
                    wrong = f"{option}: {str(error).removeprefix(f'{self.reference_curve}: ')}"
            found.append(wrong)
        return [problem for problem in found if problem]


def read_data(text: str, base: Path = Path()) -> Data:
    """Read one value of ``--gpucluster-data``. A relative path is relative to ``base``.

    Raises:
        OptionError: an unknown name, no path, or a sha256 that is none.
    """
    key, _, written = (part.strip() for part in text.partition("="))
    if key not in DATA_NAMES:
        raise OptionError(f"unknown data {key!r}; allowed: {_DATA_FORMS}")
    if not written:
        raise OptionError(f"no path; allowed: {_DATA_FORMS}")
    sha256 = None
    if found := _SHA256.fullmatch(written):
        written, sha256 = found["path"], found["digest"]
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise OptionError(f"{sha256!r} is no sha256: write its 64 digits in lower case, as sha256sum does")
    path = base / os.path.expanduser(written)
    if sha256 is not None and key == "images":
        raise OptionError(f"@sha256 is for a file, and images are a folder; allowed: {_DATA_FORMS}")
    found = _HUB.fullmatch(written) if key == "function_calls" and sha256 is None else None
    if found and "/" in found["name"] and not _is_path(found["name"], path) and path.suffix not in _FILES:
        return Data(key=key, source=Source(name=found["name"], path=None, revision=found["revision"]))
    return Data(key=key, source=Source(name=written, path=path, sha256=sha256))


def read_model(text: str, base: Path = Path()) -> Source:
    """Read ``--gpucluster-model``: a folder, or else a name on the hub. A relative path is relative to ``base``.

    Raises:
        OptionError: nothing was written.
    """
    written = text.strip()
    if not written:
        raise OptionError("no model; write a folder, or ORG/NAME[@REVISION] of the hub")
    path = base / os.path.expanduser(written)
    found = _HUB.fullmatch(written)
    if found and not _is_path(written, path):
        return Source(name=found["name"], path=None, revision=found["revision"])
    return Source(name=written, path=path)


def _is_path(written: str, path: Path) -> bool:
    return os.path.exists(path) or written.startswith((".", "/", "~"))


def _problem(option: str, path: Path, is_folder: bool) -> str:
    """Return why a path cannot be read as a folder or as a file; "" if it can."""
    if not os.path.exists(path):
        return f"{option}: no such {'folder' if is_folder else 'file'}"
    if is_folder and not os.path.isdir(path):
        return f"{option}: is a file, and must be a folder"
    if not is_folder and os.path.isdir(path):
        return f"{option}: is a folder, and must be a file"
    if not is_folder and not os.path.isfile(path):
        # Each rank reads it, and reading a pipe would wait for its writer.
        return f"{option}: is a pipe or a device, and must be a file"
    return "" if os.access(path, os.R_OK | (os.X_OK if is_folder else 0)) else f"{option}: cannot be read"


SCHEDULERS = ("slurm", "kubernetes")
LISTING = ("collectonly", "showfixtures", "show_fixtures_per_test")
"""Options of pytest by which it lists something and runs nothing."""
_CHOOSING = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise")


def only_lists(config: pytest.Config) -> bool:
    """Return whether pytest was asked to list something and to run nothing: that needs no GPU and leaves no report."""
    return any(getattr(config.option, name, False) for name in LISTING)


def root_of(config: pytest.Config) -> Path:
    """Return the folder to which node ids are relative: that above the acceptance suite, else pytest's root."""
    suite = suite_of(config.args, config.invocation_params.dir)
    root = config.rootpath
    return root if suite is None or suite.parent == root.resolve() else suite.parent


def is_selection(config: pytest.Config) -> bool:
    """Return whether only a part of the suite was asked for: by ``-k``, ``-m``, the cache, a file or a single test.

    The whole suite is ``testpaths``, unless another suite was named; without any, what lies below the root directory.
    A directory that holds all of it is no selection.
    """
    if any(getattr(config.option, name, None) for name in _CHOOSING):
        return True
    overridden = getattr(config.option, "override_ini", None) or []
    if any(setting.startswith(("python_", "testpaths", "norecursedirs")) for setting in overridden):
        return True
    patterns = [str(config.rootpath / path) for path in config.getini("testpaths")]
    whole = [Path(path).resolve() for pattern in patterns for path in glob.glob(pattern, recursive=True)]
    suite = suite_of(config.args, config.invocation_params.dir)
    if not whole or (suite is not None and not any(suite.is_relative_to(path) for path in whole)):
        whole = [suite or config.rootpath]
    asked = [place_of(argument, config.invocation_params.dir) for argument in config.args]
    covered = all(any(part.is_relative_to(path) for path in asked) for part in whole)
    return bool(asked) and (not covered or any("::" in argument for argument in config.args))


@dataclass(frozen=True, kw_only=True)
class Room:
    """What there is to run a test on."""

    ranks: int
    nodes: int
    ranks_per_node: int
    on_cpu: bool = False
    is_simulated: bool = False
    data_sheet: Callable[[], Sku | None] = lambda: None
    """What is known of the GPUs, asked for where a test depends on it. None on cpu, and for an unknown GPU."""
    data: frozenset[str] = frozenset()
    """Names of what ``--gpucluster-data`` gives."""
    scheduler: str | None = None
    """Whose job this is: "slurm", "kubernetes", or None."""


_NAMES = {"needs_peak": tuple(PEAK_UNITS), "needs_data": DATA_NAMES, "needs_scheduler": SCHEDULERS}
"""Marker -> the names that it can have."""


def why_not_applicable(item: pytest.Item, room: Room) -> str | None:
    """Return why a test cannot run here, or None if it can.

    Raises:
        pytest.UsageError: a marker that says nothing usable, such as one without a number, must not be taken for
            "always".
    """
    for marker, have, what in (
        ("needs_ranks", room.ranks, "ranks"),
        ("needs_nodes", room.nodes, "nodes"),
        ("needs_local_ranks", room.ranks_per_node, "ranks on each node"),
    ):
        found, need = _value(item, marker, "n")
        if found and (isinstance(need, bool) or not isinstance(need, int)):
            raise pytest.UsageError(f"{item.nodeid}: the marker {marker}(n) needs a whole number, not {need!r}")
        if found and have < need:
            return f"needs {need} {what}, and there {'is' if have == 1 else 'are'} {have}"
    here = "a rehearsal on cpu" if room.on_cpu else "a simulated cluster" if room.is_simulated else ""
    for marker, lacks in ("needs_gpu", room.on_cpu), ("needs_hardware", bool(here)):
        found, value = _value(item, marker, "")
        if value is not None:
            raise pytest.UsageError(f"{item.nodeid}: the marker {marker} takes no value, and has {value!r}")
        if found and lacks:
            return f"needs a GPU, and this is {here}"
    for marker, allowed in _NAMES.items():
        found, name = _value(item, marker, "name")
        if found and name not in allowed:
            hint = did_you_mean(name, allowed) if isinstance(name, str) else ""
            raise pytest.UsageError(
                f"{item.nodeid}: the marker {marker}(name) needs one of {', '.join(allowed)}, not {name!r}{hint}"
            )
        why = _lack(marker, name, room) if found else None
        if why is not None:
            return why
    return None


def _lack(marker: str, name: str, room: Room) -> str | None:
    if marker == "needs_data":
        return None if name in room.data else f"needs --gpucluster-data {name}=PATH, and it was not given"
    if marker == "needs_scheduler":
        return None if room.scheduler == name else f"needs a job of {name}, and this is none"
    sku = room.data_sheet()
    if sku is None or sku.peaks is None or getattr(sku.peaks, name) is not None:
        return None
    return f"needs {name}, and the data sheet of {sku.name} has none"


def criterion_of(item: pytest.Item) -> str | None:
    """Return the name in the test's ``criterion`` marker, or None for a test that is no criterion.

    Raises:
        pytest.UsageError: a criterion without a name.
    """
    found, name = _value(item, "criterion", "name")
    if not found:
        return None
    if not isinstance(name, str) or not name.strip():
        raise pytest.UsageError(f"{item.nodeid}: the marker criterion(name) needs a name, not {name!r}")
    return name


def deadline_of(item: pytest.Item, default: float) -> float:
    """Return how many seconds each phase of the test may take.

    Raises:
        pytest.UsageError: a deadline that is no positive number.
    """
    found, seconds = _value(item, "deadline", "seconds")
    if not found:
        return default
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise pytest.UsageError(
            f"{item.nodeid}: the marker deadline(seconds) needs a positive number of seconds, not {seconds!r}"
        )
    return float(seconds)


def turn_of(item: pytest.Item) -> tuple[int, float]:
    """Return the sort key of the order in which tests run.

    First those with the marker ``first``, by its number, without one after those that have one; then the tests without
    a marker of the order; then ``soak``; then ``last``.

    Raises:
        pytest.UsageError: a place in the order that is no number.
    """
    found, place = _value(item, "first", "place")
    if found:
        if isinstance(place, bool) or not isinstance(place, (int, float, type(None))):
            raise pytest.UsageError(f"{item.nodeid}: the marker first(place) needs a number, not {place!r}")
        return 0, math.inf if place is None else float(place)
    if item.get_closest_marker("last") is not None:
        return 3, 0.0
    return (1, 0.0) if item.get_closest_marker("soak") is None else (2, 0.0)


def require_usable(items: list[pytest.Item]) -> None:
    """Look at the markers of all tests before the first one runs.

    Raises:
        pytest.UsageError: as the functions above.
    """
    for item in items:
        criterion_of(item)
        deadline_of(item, 1.0)
        turn_of(item)


def _value(item: pytest.Item, marker_name: str, parameter: str) -> tuple[bool, Any]:
    marker = item.get_closest_marker(marker_name)
    if marker is None:
        return False, None
    return True, marker.args[0] if marker.args else marker.kwargs.get(parameter)
