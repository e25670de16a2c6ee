"""Which product is taken: an (m, k) matrix times a (k, n) one, and how the two lie in memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LAYOUTS = ("nn", "nt", "tn", "tt")
"""How the left and the right operand lie: n row by row, t column by column, which is its transpose row by row."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a product and the layout of its operands. The result lies row by row.

    Attributes:
        m, n: rows and columns of the result.
        k: columns of the left operand, and rows of the right one.
        layout: one of ``LAYOUTS``.

    Raises: ValueError if a number is not positive, or there is no such layout.
    """

    m: int
    n: int
    k: int
    layout: str = "nn"

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k) < 1 or self.layout not in LAYOUTS:
            raise ValueError(f"m, n and k must be at least 1, and layout one of {', '.join(LAYOUTS)}: {self!r}")

    @classmethod
    def square(cls, n: int, *, layout: str = "nn") -> Shape:
        """Return the shape of a product of two n x n matrices."""
        return cls(m=n, n=n, k=n, layout=layout)

    @property
    def is_square(self) -> bool:
        """Tell whether both operands are n x n, so that they can be multiplied either way."""
        return self.m == self.n == self.k

    @property
    def flops(self) -> int:
        """Operations of one product.

        Source: 2 m n k: Golub and Van Loan, "Matrix Computations" (4th edition), section 1.1.
        """
        return 2 * self.m * self.n * self.k

    @property
    def labels(self) -> dict[str, str]:
        """The labels of what is measured with it: m, n, k and layout."""
        return {"m": str(self.m), "n": str(self.n), "k": str(self.k), "layout": self.layout}

    def __str__(self) -> str:
        """Write it as ``16384x8192x4096 nt``: m, n, k, layout."""
        return f"{self.m}x{self.n}x{self.k} {self.layout}"
