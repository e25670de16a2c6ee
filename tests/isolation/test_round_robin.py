import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.isolation.round_robin import count_of_rounds, partner, rounds


@given(st.integers(2, 130))
def test_all_pairs_meet_once_and_no_player_is_in_two_pairs_at_a_time(players):
    schedule = rounds(players)
    for round_ in schedule:
        taken = [player for link in round_ for player in link]
        assert len(taken) == len(set(taken)) == players - players % 2
    met = [link for round_ in schedule for link in round_]
    assert sorted(met) == [(one, other) for one in range(players) for other in range(one + 1, players)]


@given(st.integers(2, 1024), st.data())
def test_partners_are_partners_of_each_other(players, data):
    player = data.draw(st.integers(0, players - 1))
    round_ = data.draw(st.integers(0, count_of_rounds(players) - 1))
    other = partner(player, round_, players)
    if other is None:
        assert players % 2
    else:
        assert other != player
        assert partner(other, round_, players) == player


@pytest.mark.parametrize("players", [-1, 0, 1])
def test_a_single_player_has_no_tournament(players):
    with pytest.raises(ValueError, match=f"two players or more, not {players}"):
        rounds(players)


@pytest.mark.parametrize(("player", "round_"), [(4, 0), (-1, 0), (0, 3), (0, -1)])
def test_a_number_out_of_range_has_no_partner(player, round_):
    with pytest.raises(ValueError, match=f"player {player} of 4 in round {round_} of 3"):
        partner(player, round_, 4)
