"""Steps of an episode become fragments; a counter is sent through and must come out whole."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from tetherl.data.assembler import EpisodeAssembler
from tetherl.data.fragment import Fragment, StepCounts


class Game:
    """Feeds an assembler with steps whose observation, action and reward are the step's number."""

    def __init__(self, **settings) -> None:
        self.books = StepCounts()
        self.fragments: list[Fragment] = []
        self.assembler = EpisodeAssembler(self.books, self.fragments.append, episode_id="e", worker=3, **settings)
        self.t = 0

    @staticmethod
    def obs(t: int) -> dict[str, np.ndarray]:
        return {"": np.array([t, -t], np.float32)}

    def decide(self, *, version: int = 0, learning: bool = False, by_policy: bool = True) -> None:
        self.assembler.decided(
            self.obs(self.t),
            np.array([self.t], np.int64),
            -0.1 * self.t,
            np.array([self.t, 0.0], np.float32),
            version,
            state_in=np.array([self.t], np.float32),
            by_policy=by_policy,
            learning=learning,
        )

    def result(self) -> None:
        self.t += 1
        self.assembler.result(float(self.t - 1), self.obs(self.t))

    def step(self, **decision) -> None:
        self.decide(**decision)
        self.result()

    def end(self, *, terminated: bool = False, truncated: bool = False) -> tuple[float, int]:
        self.t += 1
        return self.assembler.end(
            float(self.t - 1), terminated=terminated, truncated=truncated, final_obs=self.obs(self.t)
        )

    def check_books(self) -> None:
        b = self.books
        assert b.received == b.emitted + b.open + sum(b.dropped.values())
        assert b.emitted == sum(len(f) for f in self.fragments)

    def check_counter(self) -> None:
        """Every row holds its own number, and the fragments' ends fit together."""
        for f in self.fragments:
            t = np.arange(f.t0, f.t0 + len(f))
            np.testing.assert_array_equal(f.obs[""][:, 0], t)
            np.testing.assert_array_equal(f.actions[:, 0], t)
            np.testing.assert_array_equal(f.rewards, t)
            np.testing.assert_array_equal(f.dist[:, 0], t)
            np.testing.assert_allclose(f.logp, -0.1 * t, rtol=1e-6)
            assert f.state_in is not None and f.state_in[0] == f.t0
            if f.t0 == 0:
                assert f.prev_action is None and f.prev_reward == 0.0
            else:
                assert f.prev_action is not None and f.prev_action[0] == f.t0 - 1
                assert f.prev_reward == f.t0 - 1
            if f.terminated:
                assert f.final_obs is None
            else:
                assert f.final_obs is not None and f.final_obs[""][0] == f.t0 + len(f)


def test_fragments_are_cut_at_their_length_and_lose_nothing():
    game = Game(fragment_length=4)
    for _ in range(9):
        game.step()
    game.decide()
    assert game.end(terminated=True) == (45.0, 10)
    assert [len(f) for f in game.fragments] == [4, 4, 2]
    assert [f.terminated for f in game.fragments] == [False, False, True]
    game.check_counter()
    game.check_books()


def test_complete_episodes_make_one_fragment():
    game = Game(fragment_length=4, batch_mode="complete_episodes")
    for _ in range(9):
        game.step()
    assert game.fragments == [] and game.books.open == 9
    game.decide()
    game.end(truncated=True)
    assert [len(f) for f in game.fragments] == [10]
    assert game.fragments[0].truncated
    game.check_counter()
    game.check_books()


def test_termination_wins_over_truncation():
    game = Game()
    game.decide()
    game.end(terminated=True, truncated=True)
    assert game.fragments[0].terminated and not game.fragments[0].truncated


def test_cut_emits_completed_rows_and_the_open_row_goes_on():
    game = Game(fragment_length=100)
    game.step()
    game.step()
    game.decide()
    game.assembler.cut()
    assert [len(f) for f in game.fragments] == [2]
    game.assembler.cut()  # nothing completed since: nothing happens
    game.result()
    game.decide()
    game.end(terminated=True)
    assert [(f.t0, len(f)) for f in game.fragments] == [(0, 2), (2, 2)]
    game.check_counter()
    game.check_books()


def test_abort_drops_the_row_without_a_result():
    game = Game()
    for _ in range(3):
        game.step()
    game.decide()
    game.assembler.abort()
    assert [len(f) for f in game.fragments] == [3]
    assert not game.fragments[0].terminated and not game.fragments[0].truncated
    game.check_counter()
    game.check_books()
    assert game.books.received == 3


def test_abort_while_the_next_decision_waits_bootstraps_from_the_newest_observation():
    game = Game()
    game.step()
    game.step()
    game.assembler.abort()
    game.check_counter()
    assert [len(f) for f in game.fragments] == [2]


def test_episode_that_never_acted_leaves_no_trace():
    game = Game()
    assert game.assembler.end(0.0, terminated=True, truncated=False, final_obs=None) == (0.0, 0)
    assert game.fragments == [] and game.books == StepCounts()


def test_discard_cuts_before_the_gap_and_starts_after_it():
    game = Game(fate="discard", fragment_length=100)
    for learning in [False, False, True, True, False, False]:
        game.step(learning=learning)
    game.decide()
    game.end(terminated=True)
    assert [(f.t0, len(f)) for f in game.fragments] == [(0, 2), (4, 3)]
    assert game.books.dropped == {"discarded": 2}
    assert game.books.received_learning == 2
    game.check_counter()
    game.check_books()


def test_discard_with_complete_episodes_gives_the_episode_up():
    game = Game(fate="discard", batch_mode="complete_episodes")
    for learning in [False, False, True, False]:
        game.step(learning=learning)
    game.decide()
    game.end(terminated=True)
    assert game.fragments == []
    assert game.books.dropped == {"discarded": 1, "incomplete": 4}
    game.check_books()


def test_keep_stamps_rows_decided_while_learning():
    game = Game()
    for learning in [False, True, False]:
        game.step(learning=learning)
    game.assembler.cut()
    assert game.fragments[0].learning is not None
    assert game.fragments[0].learning.tolist() == [False, True, False]
    assert game.books.received_learning == 1


def test_episodes_outside_training_count_nothing_but_their_return():
    game = Game(training=False)
    for _ in range(3):
        game.step()
    game.decide()
    assert game.end(terminated=True) == (6.0, 4)
    assert game.fragments == [] and game.books == StepCounts()
    assert game.assembler.nbytes == 0


def test_misuse_is_an_error():
    game = Game()
    game.decide()
    with pytest.raises(RuntimeError, match="decided twice"):
        game.decide()
    game.result()
    with pytest.raises(RuntimeError, match="without a decision"):
        game.result()


def test_masks_go_with_their_rows():
    books, fragments = StepCounts(), []
    assembler = EpisodeAssembler(books, fragments.append, episode_id="e", worker=1, fragment_length=3)
    masks = [None, np.array([True, False]), None, None, None, None]
    for t, mask in enumerate(masks):
        assembler.decided(Game.obs(t), np.array([0]), 0.0, np.zeros(2, np.float32), 0, mask=mask)
        assembler.result(0.0, Game.obs(t + 1))
    with_mask, without = fragments
    assert with_mask.mask.dtype == bool and with_mask.mask.tolist() == [[True, True], [True, False], [True, True]]
    assert without.mask is None and with_mask.nbytes == without.nbytes + 6


def test_the_memory_count_is_what_open_rows_really_take():
    """Recurrent states and bookkeeping count too: a bound in bytes must hold for small observations."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        assembler = EpisodeAssembler(
            StepCounts(), lambda fragment: None, episode_id="e", worker=1, batch_mode="complete_episodes"
        )
        for t in range(3000):
            obs = {"": np.full(4, t, np.float32)}
            state = np.zeros(256, np.float32)
            assembler.decided(obs, np.array([t % 2]), -0.5, np.zeros(2, np.float32), 0, state_in=state)
            assembler.result(1.0, obs)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used < 1.5 * assembler.nbytes
    assert assembler.nbytes < 4 * used, "and not far above: it decides what is cut"


def test_the_memory_count_returns_to_zero():
    for finish in ("end", "abort", "cut"):
        game = Game(fragment_length=5)
        for _ in range(7):
            game.step()
        game.decide()
        if finish == "end":
            game.end(terminated=True)
        elif finish == "abort":
            game.assembler.abort()
        else:
            game.result()
            game.assembler.cut()
        assert game.assembler.nbytes == 0, finish
