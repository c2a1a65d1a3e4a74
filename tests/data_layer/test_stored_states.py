"""Recurrent states of the actor that travel with fragments, from the assembler to the batch."""

from __future__ import annotations

import numpy as np

from tetherl.data.assembler import EpisodeAssembler
from tetherl.data.batch import assemble
from tetherl.data.fragment import Fragment, StepCounts


def play(steps: int, *, every: int, length: int = 128, states: bool = True) -> list[Fragment]:
    """Step t is fed with the state [t, -t]."""
    fragments: list[Fragment] = []
    assembler = EpisodeAssembler(
        StepCounts(), fragments.append, episode_id="e", worker=1, fragment_length=length, state_every=every
    )
    for t in range(steps):
        state = np.array([t, -t], np.float32) if states else None
        obs = {"": np.array([t], np.float32)}
        assembler.decided(obs, np.array([0]), 0.0, np.zeros(2, np.float32), 0, state_in=state)
        assembler.result(0.0, {"": np.array([t + 1], np.float32)})
    assembler.cut()
    return fragments


def test_a_fragment_carries_the_state_of_every_so_many_rows_from_its_first():
    first, second = play(17, every=4, length=10)
    assert first.states[:, 0].tolist() == [0, 4, 8] and second.states[:, 0].tolist() == [10, 14]
    assert first.state_every == 4 and second.state_in.tolist() == [10, -10]
    assert first.nbytes > play(10, every=0)[0].nbytes


def test_without_being_asked_or_without_recurrence_none_travel():
    assert play(10, every=0)[0].states is None
    assert play(10, every=4, states=False)[0].states is None


def test_the_batch_knows_in_which_row_each_was_fed():
    fragments = play(17, every=4, length=10)
    fragments.insert(1, play(3, every=0)[0])  # carries none
    batch, _, _ = assemble(fragments, version=0, max_lag=0, state_size=2)
    assert batch.stored_rows.tolist() == [0, 4, 8, 13, 17]
    assert batch.stored_states[:, 0].tolist() == [0, 4, 8, 10, 14]
    assert batch.obs[""][batch.stored_rows, 0].tolist() == [0, 4, 8, 10, 14]
    nothing, _, _ = assemble(play(5, every=0), version=0, max_lag=0, state_size=2)
    assert nothing.stored_rows is None
