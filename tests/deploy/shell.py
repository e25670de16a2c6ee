"""A command that is run to its end by a test, which looks at its exit code itself."""

import subprocess


def finished(command, *, env=None, cwd=None, seconds=60):
    """Run a command with nothing to read, and return how it has ended, with what it has written."""
    return subprocess.run(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
