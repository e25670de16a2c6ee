"""The kubectl that can render deploy/kubernetes: 1.27 at least, for its kustomize must be 5.

As a program it says which one is there, and ends with 1 where there is none, or one that is too old.
"""

import json
import re
import shutil
import subprocess
import sys

LEAST = (1, 27)
"""The first with kustomize 5. Source: https://github.com/kubernetes-sigs/kustomize#kubectl-integration."""
_NEEDED = f"{LEAST[0]}.{LEAST[1]} or newer is needed, as of https://dl.k8s.io or your site's mirror (CONTRIBUTING.md)"
_SECONDS = 60


def problem():
    """Return why manifests cannot be rendered here: what was found, and what is needed; nothing where they can."""
    path = shutil.which("kubectl")
    if path is None:
        return f"kubectl is not installed: {_NEEDED}"
    try:
        done = subprocess.run(
            [path, "version", "--client", "-o", "json"], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        version = str(json.loads(done.stdout)["clientVersion"]["gitVersion"])
        numbers = re.match(r"v(\d+)\.(\d+)\.", version)
    except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired):
        version, numbers = "of an unknown version", None
    if numbers is None or (int(numbers[1]), int(numbers[2])) < LEAST:
        return f"{path} is {version}: {_NEEDED}"
    return ""


def require_kubectl():
    """Return the path of a kubectl that is new enough; the test is skipped where there is none."""
    import programs  # only tests have it on their path

    path = programs.require_program("kubectl")
    if found := problem():
        programs.skip_without("kubectl", found)
    return path


if __name__ == "__main__":
    print(problem() or f"{shutil.which('kubectl')} is new enough")
    sys.exit(bool(problem()))
