"""A round-robin tournament: everybody meets everybody once, nobody is in two pairs at a time.

>>> rounds(4)
(((0, 3), (1, 2)), ((0, 1), (2, 3)), ((0, 2), (1, 3)))
>>> rounds(3)
(((1, 2),), ((0, 1),), ((0, 2),))
"""

from __future__ import annotations


def count_of_rounds(players: int) -> int:
    """Return how many rounds it takes: players - 1, or players where their number is odd.

    Raises:
        ValueError: there are fewer than two.
    """
    if players < 2:
        raise ValueError(f"a tournament takes two players or more, not {players}")
    return players - 1 + players % 2


def partner(player: int, round_: int, players: int) -> int | None:
    """Return whom a player meets in a round, or None where an odd number leaves it out.

    Two players meet in the round that is the sum of their numbers, modulo an odd number m. Where their number is even,
    the last one is not among these m, and meets whoever would meet itself.

    Raises:
        ValueError: a number is out of its range.

    Source: the circle method, https://en.wikipedia.org/wiki/Round-robin_tournament#Circle_method, as modular sums.
    """
    modulus = count_of_rounds(players)
    if not (0 <= player < players and 0 <= round_ < modulus):
        raise ValueError(f"player {player} of {players} in round {round_} of {modulus}: there is no such thing")
    last = players - 1 if players % 2 == 0 else None
    if player == last:
        return round_ * ((modulus + 1) // 2) % modulus
    other = (round_ - player) % modulus
    return last if other == player else other


def rounds(players: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the pairs of each round, the lower number first, in ascending order.

    Raises:
        ValueError: there are fewer than two players.
    """
    schedule = []
    for round_ in range(count_of_rounds(players)):
        met = ((player, partner(player, round_, players)) for player in range(players))
        schedule.append(tuple((one, other) for one, other in met if other is not None and one < other))
    return tuple(schedule)
