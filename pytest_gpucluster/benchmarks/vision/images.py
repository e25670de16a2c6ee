"""Images with labels, as a loader reads them: made up, or kept in memory as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

Sample = tuple[torch.Tensor, int]
"""An image, uint8, height x width x colours, and its label."""


class Images(Protocol):
    """Labelled images of one size. Each worker of a loader gets a copy of its own, by pickle.

    Attributes:
        name: of the data, a label of the measurements.
        classes: labels are 0 to ``classes`` - 1.
        shape: height, width and colours of each image.
    """

    @property
    def name(self) -> str: ...

    @property
    def classes(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int, int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Sample:
        """Return one image.

        Raises: EnvironmentBroken if it cannot be read.
        """


@dataclass(frozen=True)
class SyntheticImages:
    """Images of noise, each with the tint of its class, so that they can be learned.

    A few are made, from a seed, when the first one is asked for, and come again and again: what is measured is how a
    loader hands them over, not how they are made.
    """

    rows: int
    side: int
    seed: int = 0
    name: str = field(default="synthetic", init=False)
    classes: int = field(default=10, init=False)

    MADE = 60

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and colours."""
        return (self.side, self.side, 3)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Sample:
        row %= self.MADE
        return self._made[row], row % self.classes

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_made"}

    @cached_property
    def _made(self) -> torch.Tensor:
        draws = torch.Generator().manual_seed(self.seed)
        noise = torch.randint(0, 128, (self.MADE, *self.shape), dtype=torch.uint8, generator=draws)
        tints = torch.randint(0, 128, (self.classes, 3), dtype=torch.uint8, generator=draws)
        return noise + tints[torch.arange(self.MADE) % self.classes][:, None, None]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Images of one size in one piece.

    Attributes:
        images: uint8, rows x height x width x colours.
        labels: one for each row.
    """

    images: torch.Tensor
    labels: list[int]


class StoredImages:
    """A data set that is read as a whole.

    Args:
        name: of the data.
        classes: that it has.
        read: reads it. Each worker reads for itself: a pickled tensor would be sent through shared memory.

    Raises: as ``read`` does.
    """

    def __init__(self, name: str, classes: int, read: Callable[[], Block]) -> None:
        self.name, self.classes, self._read = name, classes, read
        self._block: Block | None = read()
        _, height, width, colours = self._block.images.shape
        self.shape = (height, width, colours)
        self._rows = len(self._block.labels)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Sample:
        if self._block is None:
            self._block = self._read()
        return self._block.images[row], self._block.labels[row]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_block": None}
