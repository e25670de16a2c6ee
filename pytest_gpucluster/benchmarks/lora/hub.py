"""Files on the Hugging Face hub: from its cache, or fetched within a deadline."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_gpucluster.benchmarks.storage.shared_filesystem import start_call
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.text import first_line

_NAME = re.compile(r"(?P<repository>[\w][\w.-]*/[\w][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)

_OF_A_FILE = (".json", ".jsonl", ".safetensors")
"""No data set has such a name: it is a path, and the file is missing."""

ANSWER_SECONDS = 10.0
"""How long the hub may take to list its files. Source: huggingface_hub's own default for one request."""

DOWNLOAD_SECONDS = 1800.0
"""How long a download may take. Source: this suite's rule: the original's 271 MB at 150 kB/s."""

INSTALL = "python -m pip install -c constraints.txt -e '.[lora]'"


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A repository of a data set, at a revision. ``file`` and ``sha256`` are None where they are unknown."""

    repository: str
    revision: str
    file: str | None = None
    sha256: str | None = None

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"


PINNED = HubName(
    repository="glaiveai/glaive-function-calling-v2",
    revision="e7f4b6456019f5d8bcb991ef0dd67d8ff23221ac",
    file="glaive-function-calling-v2.json",
    sha256="e9b5d671812b5ca2fbd7b625a37d5c99a19576c37252cdc806defe256aea6dad",
)
"""The original: 112,960 rows. Source: revision and sha256 as public projects pin them that train on this file,
https://huggingface.co/datasets/glaiveai/glaive-function-calling-v2/tree/e7f4b6456019f5d8bcb991ef0dd67d8ff23221ac"""


def hub_name(text: str, revision: str | None = None) -> HubName | None:
    """Read ``owner/name`` or ``owner/name@revision``; None if the text is no such name.

    The original at its pinned revision, which is its default, comes with its file and sha256.
    """
    match = _NAME.fullmatch(text)
    if match is None or match["repository"].endswith(_OF_A_FILE):
        return None
    revision = match["revision"] or revision
    if match["repository"] == PINNED.repository:
        return PINNED if revision in (None, PINNED.revision) else replace(PINNED, revision=revision, sha256=None)
    return HubName(repository=match["repository"], revision=revision or "main")


def ask(kind: str, name: str, revision: str | None) -> list[str] | Exception:
    """Return the files of a repository as the hub lists them; or why it does not, as with HF_HUB_OFFLINE.

    It must answer within ``ANSWER_SECONDS``: huggingface_hub by itself would retry for minutes.

    Args:
        kind: ``dataset`` or ``model``.
        name, revision: of the repository.

    Raises: ImportError without huggingface_hub.
    """
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return ConnectionError("HF_HUB_OFFLINE is set")
    # The types of the errors depend on the version of huggingface_hub: its own, httpx, requests, the socket.
    try:
        info = getattr(huggingface_hub.HfApi(), f"{kind}_info")(name, revision=revision, timeout=ANSWER_SECONDS)
        return [sibling.rfilename for sibling in info.siblings or ()]
    except Exception as error:
        return error


def local_only(model: str | Path) -> bool:
    """Return whether to load a model without the hub: it is a path, or the hub does not answer.

    Raises: ImportError without huggingface_hub.
    """
    return Path(model).exists() or isinstance(ask("model", str(model), None), Exception)


def fetch(
    kind: str, name: str, revision: str, patterns: Callable[[list[str]], list[str]], *, seconds: float | None = None
) -> Path:
    """Return the folder with the files of a repository, from the hub, or from its cache where the hub does not answer.

    Args:
        kind: ``dataset`` or ``model``.
        name, revision: of the repository.
        patterns: returns which files are needed, of those that there are.
        seconds: how long the download may take.

    Raises: EnvironmentBroken, naming what is missing: the files in the cache, or an answer of the hub.
    """
    import huggingface_hub

    listed = ask(kind, name, revision)
    options: dict[str, Any] = {
        "repo_type": kind,
        "revision": revision,
        "etag_timeout": ANSWER_SECONDS,
        "local_files_only": isinstance(listed, Exception),
    }
    try:
        if isinstance(listed, Exception):
            folder = Path(huggingface_hub.snapshot_download(name, **options))
            patterns([path.relative_to(folder).as_posix() for path in folder.rglob("*")])
            return folder
        options["allow_patterns"] = patterns(listed)
        return Path(start_call(lambda: huggingface_hub.snapshot_download(name, **options))(seconds))
    except EnvironmentBroken:
        raise
    except Exception as error:  # of types as in ask; each becomes the error of what is not there
        why = first_line(str(listed if isinstance(listed, Exception) else error))
        raise EnvironmentBroken(
            f"{name}@{revision}: the hub does not provide it ({why}), and it is not in the hub's cache; give a local "
            "file or folder, or download it where there is a network"
        ) from error


def fetch_rows(name: HubName) -> Path:
    """Return the path of the data set's one JSON file.

    Raises: EnvironmentBroken, as :func:`fetch`; or there is no such file, or several.
    """
    chosen = ""

    def choose(files: list[str]) -> list[str]:
        nonlocal chosen
        candidates = [name.file] if name.file else sorted(file for file in files if file.endswith((".json", ".jsonl")))
        if len(candidates) != 1:
            found = ", ".join(candidates[:10]) or "none"
            raise EnvironmentBroken(
                f"{name}: one JSON or JSONL file is expected in it, found: {found}; give a path instead"
            )
        [chosen] = candidates
        return candidates

    return fetch("dataset", name.repository, name.revision, choose, seconds=DOWNLOAD_SECONDS) / chosen
