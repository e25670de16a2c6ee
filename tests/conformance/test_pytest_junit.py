"""pytest's own JUnit tests pass with this plugin installed.

They are in pytest's sdist only, which comes from the package registry once for each version of pytest and stays in the
cache directory of these tests. Without the registry this fails, and says so: it is not skipped.
"""

import re
import subprocess
import sys
import tarfile

import pytest
from sessions import Process, environment

_DOWNLOAD_SECONDS = 120


@pytest.fixture(scope="module")
def sdist(request, tmp_path_factory):
    """The unpacked source of the pytest that runs here."""
    cache = request.config.cache
    archive = cache.mkdir("pytest-sdist") / f"pytest-{pytest.__version__}.tar.gz"
    if not archive.exists():
        download(tmp_path_factory.mktemp("download")).replace(archive)
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder / f"pytest-{pytest.__version__}"


def download(folder):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "pytest", "--dest", str(folder), f"pytest=={pytest.__version__}"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_DOWNLOAD_SECONDS, env=environment()
    )
    found = list(folder.glob("pytest-*.tar.gz"))
    if done.returncode or len(found) != 1:
        pytest.fail(
            f"the sdist of pytest {pytest.__version__} cannot be fetched, so that nothing is known of conformance.\n"
            f"{' '.join(command)}\nended with status {done.returncode} and left {found}:\n{done.stderr[-2000:]}",
            pytrace=False,
        )
    return found[0]


@pytest.mark.extended
def test_pytests_own_junit_tests_pass_with_the_plugin_installed(sdist):
    command = [sys.executable, "-m", "pytest", "testing/test_junitxml.py", "-p", "no:hypothesispytest"]
    with Process([*command, "-p", "no:cacheprovider"], sdist, environment()) as process:
        left = process.wait()
    assert left.exit == 0, left.output
    assert re.search(r"^plugins: .*\bgpucluster-", left.stdout, re.MULTILINE)
    passed = re.search(r"= (\d+) passed\b", left.stdout)
    assert passed is not None, left.output
    assert int(passed[1]) > 100
