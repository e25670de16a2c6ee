"""What training takes from outside: data, a model, a scratch folder for checkpoints, a reference curve.

An option only says where each of them is. Whether it is there is looked up on every rank before the first test, since a
path may be missing on one node alone. ``os.path`` is asked, for which a path that cannot be looked at is not there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pytest_gpucluster.errors import CurveError, OptionError

DataName = Literal["images", "function_calls"]
DATA_NAMES: tuple[DataName, ...] = ("images", "function_calls")
_FILES = (".json", ".jsonl", ".safetensors")
_DATA_FORMS = (
    "images=FOLDER, function_calls=FILE[@sha256:HEX], function_calls=ORG/NAME[@REVISION] of the hub, or a bare path: a "
    "folder is images, a file is function_calls"
)
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

    key: DataName
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
            resume=settings.resume,
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
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        for key, source in self.data.items():
            option = f"--gpucluster-data {key}={source.name}"
            if source.path is None:
                continue
            if key == "images":
                yield from _folder(option, source.path)
            else:
                yield from _file(option, source.path)
        if self.model is not None and self.model.path is not None:
            option, path = f"--gpucluster-model {self.model.name}", self.model.path
            hub = "" if os.path.exists(path) else ", and that is no name on the hub (ORG/NAME[@REVISION])"
            wrong = [f"{problem}{hub}" for problem in _folder(option, path)]
            yield from wrong
            if not wrong and not os.path.isfile(path / "config.json"):
                yield f"{option}: the folder has no config.json; name one that save_pretrained or the hub has made"
        if self.scratch is not None:
            option = f"--gpucluster-scratch {self.scratch}"
            wrong = list(_folder(option, self.scratch))
            yield from wrong
            if not wrong and not os.access(self.scratch, os.W_OK | os.X_OK):
                yield f"{option}: nothing can be written into it"
        if self.reference_curve is not None:
            option = f"--gpucluster-reference-curve {self.reference_curve}"
            wrong = list(_file(option, self.reference_curve))
            yield from wrong or _no_reference_curve(option, self.reference_curve)


def read_data(text: str, base: Path = Path()) -> Data:
    """Read one value of ``--gpucluster-data``. A relative path is relative to ``base``.

    Raises:
        OptionError: an unknown name, no path, or a sha256 that is none.
    """
    before, equals, after = text.strip().partition("=")
    named = bool(equals) and re.fullmatch(r"\w+", before, re.ASCII) is not None
    if named and before not in DATA_NAMES:
        raise OptionError(f"unknown data {before!r}; allowed: {_DATA_FORMS}")
    written = after.strip() if named else text.strip()
    if not written:
        raise OptionError(f"no path; allowed: {_DATA_FORMS}")
    written, sha256 = _without_sha256(written)
    path = base / os.path.expanduser(written)
    if named:
        key: DataName = "images" if before == "images" else "function_calls"
    else:
        key = "function_calls" if _is_file(path) else "images"
    if sha256 is not None and key == "images":
        raise OptionError(f"@sha256 is for a file, and images are a folder; allowed: {_DATA_FORMS}")
    if named and key == "function_calls" and sha256 is None:
        found = _HUB.fullmatch(written)
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


def _is_file(path: Path) -> bool:
    # A path that is missing on this host still needs a name for the report: the suffix decides then.
    return os.path.isfile(path) if os.path.exists(path) else path.suffix in _FILES


def _is_path(written: str, path: Path) -> bool:
    return os.path.exists(path) or written.startswith((".", "/", "~"))


def _without_sha256(written: str) -> tuple[str, str | None]:
    found = _SHA256.fullmatch(written)
    if found is None:
        return written, None
    if not re.fullmatch(r"[0-9a-f]{64}", found["digest"]):
        raise OptionError(f"{found['digest']!r} is no sha256: write its 64 digits in lower case, as sha256sum does")
    return found["path"], found["digest"]


def _folder(option: str, path: Path) -> Iterator[str]:
    if not os.path.exists(path):
        yield f"{option}: no such folder"
    elif not os.path.isdir(path):
        yield f"{option}: is a file, and must be a folder"
    elif not os.access(path, os.R_OK | os.X_OK):
        yield f"{option}: cannot be read"


def _no_reference_curve(option: str, path: Path) -> Iterator[str]:
    from pytest_gpucluster.benchmarks.lora import reference_curve  # a run without one pays nothing

    try:
        reference_curve.read(path)
    except CurveError as error:
        yield f"{option}: {str(error).removeprefix(f'{path}: ')}"


def _file(option: str, path: Path) -> Iterator[str]:
    if not os.path.exists(path):
        yield f"{option}: no such file"
    elif os.path.isdir(path):
        yield f"{option}: is a folder, and must be a file"
    elif not os.path.isfile(path):
        # Each rank reads it, and reading a pipe would wait for who writes into it.
        yield f"{option}: is a pipe or a device, and must be a file"
    elif not os.access(path, os.R_OK):
        yield f"{option}: cannot be read"
