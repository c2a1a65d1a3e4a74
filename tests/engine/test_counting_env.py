from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from tetherl.testing import CountingEnv


def play(env, episodes, seed=None):
    """[(observation, reward, terminated, truncated), ...] of whole episodes."""
    rows = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed if episode == 0 else None)
        assert observation.tolist() == [episode, 0]
        over = False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(0)
            over = terminated or truncated
            rows.append((*observation.tolist(), reward, terminated, truncated))
    return rows


def test_it_counts():
    env = CountingEnv(min_length=2, max_length=9, seed=4)
    rows = play(env, 5)
    lengths = [env.length_of(episode) for episode in range(5)]
    assert len(set(lengths)) > 1 and all(2 <= n <= 9 for n in lengths)
    expected = [(e, k, float(k), k == n, False) for e, n in enumerate(lengths) for k in range(1, n + 1)]
    assert rows == expected


def test_the_seed_decides_the_lengths():
    first, same, other = (play(CountingEnv(), 6, seed) for seed in (1, 1, 2))
    assert first == same != other
    assert play(CountingEnv(seed=1), 6) == first


@pytest.mark.parametrize(("ends", "ways"), [("terminate", "TTTT"), ("truncate", "CCCC"), ("alternate", "TCTC")])
def test_how_episodes_end(ends, ways):
    rows = play(CountingEnv(ends=ends), 4)
    assert "".join("T" if row[3] else "C" for row in rows if row[3] or row[4]) == ways
    assert not any(row[3] and row[4] for row in rows)


def test_a_saved_state_goes_on_exactly():
    env, copy = CountingEnv(ends="alternate", seed=3), CountingEnv(ends="alternate")
    play(env, 2)
    env.reset()
    env.step(0)
    copy.set_state(env.get_state())
    for _ in range(3):
        over = False
        while not over:
            a, b = env.step(1), copy.step(1)
            assert a[0].tolist() == b[0].tolist() and a[1:] == b[1:]
            over = a[2] or a[3]
        assert np.array_equal(env.reset()[0], copy.reset()[0])


def test_misuse_is_an_error():
    env = CountingEnv(min_length=1, max_length=1)
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
        env.step(0)
    env.reset()
    with pytest.raises(ValueError, match="action 5"):
        env.step(5)
    env.step(0)
    with pytest.raises(RuntimeError):
        env.step(0)
    with pytest.raises(ValueError, match="sideways"):
        CountingEnv(ends="sideways")
    with pytest.raises(ValueError, match="from 3 to 2"):
        CountingEnv(min_length=3, max_length=2)


def test_gymnasium_accepts_it():
    check_env(CountingEnv(), skip_render_check=True)
    space = gymnasium.spaces.MultiDiscrete([2, 3])
    env = CountingEnv(action_space=space)
    env.reset()
    assert env.step(np.array([1, 2]))[1] == 1.0
