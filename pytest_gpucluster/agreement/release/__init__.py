"""Getting a rank out of a call that will never return: one file for each kind of call."""

from __future__ import annotations

from typing import Protocol


class Releaser(Protocol):
    """Ends whatever blocks the main thread, from another thread of the same process."""

    @property
    def making_group(self) -> bool:
        """Tell whether the main thread is inside the making of a process group, where no flight recorder looks."""

    def release(self) -> None:
        """Make the blocked call return or raise. Safe to call again, and after the call has ended by itself."""
