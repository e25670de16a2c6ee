"""Every file that `make check-deploy` looks at, by what it is: found by name and first line, never listed by hand."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_SKIPPED = {".git", "build", "dist", "node_modules", "gpucluster-report", "__pycache__", ".hypothesis"}
_SHELL = re.compile(r"#!\s*/(?:usr/)?bin/(?:env\s+)?(?:ba|da)?sh\b")

SHELL, DOCKERFILE, WORKFLOW, GITLAB, JENKINS, YAML = "shell", "Dockerfile", "workflow", "GitLab", "Jenkins", "YAML"
KINDS = (SHELL, DOCKERFILE, WORKFLOW, GITLAB, JENKINS, YAML)


def files(root=ROOT):
    """Return every file below a folder but what was built or installed there."""
    for folder, names, found in os.walk(root):
        names[:] = sorted(
            name
            for name in names
            if name not in _SKIPPED and not name.startswith(".venv") and not name.endswith("_cache")
        )
        yield from (Path(folder, name) for name in sorted(found))


def kinds(path, root=ROOT):
    """Return as what a file is to be looked at; nothing where no linter is for it."""
    place = path.relative_to(root)
    is_yaml = path.suffix in (".yml", ".yaml")
    folders = place.parts[:2]
    of_ci = is_yaml and folders[0] in ("deploy", ".github")
    found = {
        SHELL: path.suffix in (".sh", ".sbatch", ".bash") or (not path.suffix and _is_shell(path)),
        DOCKERFILE: path.name.startswith("Dockerfile") or path.suffix == ".Dockerfile",
        WORKFLOW: is_yaml and folders in ((".github", "workflows"), ("deploy", "github")),
        GITLAB: is_yaml and folders == ("deploy", "gitlab"),
        JENKINS: path.name.startswith("Jenkinsfile"),
        YAML: of_ci,
    }
    return tuple(kind for kind in KINDS if found[kind])


def by_kind(root=ROOT):
    """Return the files of each kind."""
    found = {kind: [] for kind in KINDS}
    for path in files(root):
        for kind in kinds(path, root):
            found[kind].append(path)
    return found


def _is_shell(path):
    """Tell whether the first line of a file without an ending calls a shell."""
    try:
        with path.open("rb") as file:
            return _SHELL.match(file.readline(200).decode("utf-8", "replace")) is not None
    except OSError:  # a link to nowhere, or a socket that some tool left
        return False
