"""The shell that stands inside of workflows, GitLab's jobs and Jenkins' pipelines, so that shellcheck can look at it.

What the CI system puts in before the shell sees it (``${{ ... }}``) is replaced by a word.
"""

import re

import yaml

_EXPRESSION = re.compile(r"\$\{\{.*?\}\}", re.DOTALL)
_JENKINS = re.compile(r"'''(.*?)'''", re.DOTALL)
_GITLAB = ("before_script", "script", "after_script")


def of_workflow(path):
    """Return each ``run`` of a workflow with the place where it stands. GitHub runs it by ``bash -e``."""
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    for name, job in jobs.items():
        for number, step in enumerate(job.get("steps", ())):
            if "run" in step:
                yield f"{path}: {name}, step {number + 1}", _EXPRESSION.sub("word", str(step["run"]))


def of_gitlab(path):
    """Return each script of GitLab's jobs with the place where it stands: its lines run one after the other."""
    for name, job in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        if isinstance(job, dict):
            for key in _GITLAB:
                lines = job.get(key, [])
                if lines:
                    yield f"{path}: {name}, {key}", "\n".join([lines] if isinstance(lines, str) else lines)


def of_jenkins(path):
    """Return each text between three quotes of a pipeline: Jenkins runs them by ``sh -xe``, and puts nothing in."""
    for number, found in enumerate(_JENKINS.finditer(path.read_text(encoding="utf-8"))):
        yield f"{path}: sh {number + 1}", found[1]
