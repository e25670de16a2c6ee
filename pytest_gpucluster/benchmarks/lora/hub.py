"""Files of a data set on the Hugging Face hub: from its cache, or fetched within a deadline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_gpucluster.benchmarks.storage.shared_filesystem import start_call
from pytest_gpucluster.errors import EnvironmentBroken

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


def fetch(name: HubName) -> Path:
    """Return the path of the data set's one JSON file, from the cache or from the hub.

    The hub is asked once for its files, and must answer within ``ANSWER_SECONDS``. If it does not, or with
    HF_HUB_OFFLINE, only the cache is used. So nothing waits for a network that is unreachable: huggingface_hub by
    itself would retry for minutes. A download must be complete within ``DOWNLOAD_SECONDS``.

    Raises: EnvironmentBroken, naming what is missing: the package, the file in the cache, or an answer of the hub.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError:
        raise not_installed("huggingface_hub") from None
    offline = bool(constants.HF_HUB_OFFLINE)
    listed: list[str] | None = None
    hub_error: Exception | None = None
    # The types of the errors depend on the version of huggingface_hub: its own, httpx, requests, the socket.
    try:
        if not offline:
            hub = huggingface_hub.HfApi()
            info = hub.dataset_info(name.repository, revision=name.revision, timeout=ANSWER_SECONDS)
            listed = [sibling.rfilename for sibling in info.siblings or ()]
    except Exception as error:
        hub_error = error
    try:
        file = name.file or _only_json(name, listed if listed is not None else _cached(name))
        download = start_call(
            lambda: huggingface_hub.hf_hub_download(
                name.repository,
                file,
                repo_type="dataset",
                revision=name.revision,
                etag_timeout=ANSWER_SECONDS,
                local_files_only=listed is None,
            )
        )
        return Path(download(DOWNLOAD_SECONDS))
    except EnvironmentBroken:
        raise
    except Exception as error:
        raise unavailable(name, hub_error or error) from error


def local_only(model: str | Path, revision: str | None = None) -> bool:
    """Return whether to load a model without the hub: it is a path, HF_HUB_OFFLINE is set, or the hub does not answer.
    transformers by itself would retry for minutes.

    Raises: ImportError without huggingface_hub.
    """
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or Path(model).exists():
        return True
    try:
        huggingface_hub.HfApi().model_info(str(model), revision=revision, timeout=ANSWER_SECONDS)
    except Exception:  # of types as in fetch; the loader then names what is not in the cache
        return True
    return False


def _only_json(name: HubName, files: Sequence[str]) -> str:
    candidates = sorted(file for file in files if file.endswith((".json", ".jsonl")))
    if len(candidates) != 1:
        found = ", ".join(candidates[:10]) or "none"
        raise EnvironmentBroken(
            f"{name}: one JSON or JSONL file is expected in it, found: {found}; give a path instead"
        )
    return candidates[0]


def _cached(name: HubName) -> list[str]:
    """Return the files of a repository that are in the cache."""
    from huggingface_hub import snapshot_download

    folder = Path(
        snapshot_download(name.repository, repo_type="dataset", revision=name.revision, local_files_only=True)
    )
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, for a message."""
    return next((line.strip()[:300] for line in str(error).splitlines() if line.strip()), "no reason given")


def unavailable(name: object, error: Exception) -> EnvironmentBroken:
    """Return the error for what is neither on the hub nor in its cache."""
    from huggingface_hub import constants

    why = (
        "HF_HUB_OFFLINE is set, and it is not in the hub's cache; download it where there is a network, or"
        if constants.HF_HUB_OFFLINE
        else "the hub does not provide it, and it is not in the hub's cache;"
    )
    return EnvironmentBroken(f"{name}: {why} give a local file or folder ({type(error).__name__}: {first_line(error)})")


def not_installed(package: str) -> EnvironmentBroken:
    """Return the error for a package that is not installed."""
    return EnvironmentBroken(f"{package} is not installed; install it with {INSTALL}")
