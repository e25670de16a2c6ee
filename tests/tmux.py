"""A real terminal for tests: tmux shows what a program has drawn, after all that its control sequences have done."""

import contextlib
import os
import shlex
import subprocess
import time
import uuid

from programs import require_program

DEADLINE_SECONDS = 120.0
"""Generous: nothing here should take a third of it."""


class Terminal:
    """A window of tmux with a shell in it. tmux ends with the shell, and there is no other in this server."""

    def __init__(self, tmux, socket):
        self._command = [tmux, "-L", socket, "-f", os.devnull]

    def ask(self, *arguments):
        """Ask tmux."""
        done = subprocess.run(
            [*self._command, *arguments], capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=True
        )
        return done.stdout

    def run(self, command, environ):
        """Type a command, and have its exit code shown behind ``ended with``."""
        changes = [f"{name}={value}" for name, value in environ.items() if os.environ.get(name) != value]
        gone = [word for name in {*os.environ, "COLUMNS", "LINES"} if name not in environ for word in ("-u", name)]
        typed = shlex.join(["env", *gone, *changes, *command])
        # What is typed is on the screen too, and must not be taken for what is said.
        self.keys(f"clear; {typed}; printf 'ended %s %s\\n' with $?", "Enter")

    def keys(self, *keys):
        """Press keys."""
        self.ask("send-keys", "-t", "window", *keys)

    def resize(self, columns, rows):
        """Change the size of the window. tmux tells the programs in it a moment later: that is waited for."""
        self.ask("resize-window", "-t", "window", "-x", str(columns), "-y", str(rows))
        descriptor = os.open(self.ask("display-message", "-p", "-t", "window", "#{pane_tty}").strip(), os.O_NOCTTY)
        try:
            until = time.monotonic() + DEADLINE_SECONDS
            while os.get_terminal_size(descriptor) != (columns, rows):
                assert time.monotonic() < until, "the terminal has kept its size"
                time.sleep(0.01)
        finally:
            os.close(descriptor)

    def screen(self):
        """Return what is on the screen."""
        return self.ask("capture-pane", "-p", "-t", "window")

    def everything(self):
        """Return the screen and all that has been scrolled away, wrapped lines joined."""
        return self.ask("capture-pane", "-p", "-J", "-S", "-", "-t", "window")

    def wait_for(self, text):
        """Wait until a text is on the screen, and return the screen."""
        until = time.monotonic() + DEADLINE_SECONDS
        while text not in (screen := self.screen()):
            assert time.monotonic() < until, f"{text!r} is not on the screen:\n{screen}"
            time.sleep(0.05)
        return screen


@contextlib.contextmanager
def terminal(columns=80, rows=24, directory="."):
    """Open a window, with a shell in a folder."""
    window = Terminal(require_program("tmux"), f"gpucluster-{uuid.uuid4().hex[:12]}")
    size = ("-x", str(columns), "-y", str(rows))
    shell = "env PS1='$ ' HISTFILE= sh"
    window.ask("new-session", "-d", *size, "-s", "window", "-c", str(directory), shell)
    try:
        window.wait_for("$")
        yield window
    finally:
        window.ask("kill-server")
