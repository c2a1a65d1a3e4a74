from __future__ import annotations

import numpy as np
import pytest

from tetherl.data.batch import assemble, chunk_table, ranges
from tetherl.data.fragment import Fragment
from tetherl.errors import TrainingError


def fragment(number: int, length: int, *, t0: int = 0, **changes) -> Fragment:
    """Row t of fragment b carries 1000 * b + t in every field."""
    marks = 1000 * number + np.arange(length)
    values = {
        "obs": {"": marks.astype(np.float32)[:, None]},
        "final_obs": {"": np.array([1000 * number + length], np.float32)},
        "actions": marks[:, None].astype(np.int64),
        "logp": -marks.astype(np.float32),
        "dist": np.stack([marks, marks], 1).astype(np.float32),
        "rewards": marks.astype(np.float32),
        "versions": np.full(length, 5),
        "by_policy": np.ones(length, bool),
        "terminated": False,
        "truncated": False,
        "episode_id": f"e{number}",
        "t0": t0,
        "worker": number,
        "prev_action": np.array([1000 * number - 1]) if t0 else None,
        "prev_reward": 1000.0 * number - 1 if t0 else 0.0,
    }
    return Fragment(**(values | changes))


def test_rows_stay_in_order_and_belong_together():
    batch, kept, dropped = assemble([fragment(1, 3), fragment(2, 2, t0=7)], version=5, max_lag=0)
    marks = [1000, 1001, 1002, 2000, 2001]
    assert len(batch) == 5 and len(kept) == 2 and dropped == {}
    for rows in (batch.obs[""][:, 0], batch.actions[:, 0], -batch.logp, batch.dist[:, 1], batch.rewards):
        assert rows.tolist() == marks
    assert batch.final_obs[""].tolist() == [[1003], [2002]]
    assert batch.lengths.tolist() == [3, 2] and batch.starts.tolist() == [0, 3]
    assert batch.fragment_of_row.tolist() == [0, 0, 0, 1, 1]
    assert batch.position_in_fragment.tolist() == [0, 1, 2, 0, 1]


def test_previous_action_and_reward_come_from_the_row_before_or_from_the_fragment():
    batch, _, _ = assemble([fragment(1, 3), fragment(2, 2, t0=7)], version=5, max_lag=0)
    assert batch.prev_action[:, 0].tolist() == [0, 1000, 1001, 1999, 2000]
    assert batch.prev_reward.tolist() == [0, 1000, 1001, 1999, 2000]
    assert batch.has_prev.tolist() == [False, True, True, True, True]


def test_an_episode_start_has_no_previous_row_and_no_state_whatever_the_fragment_carries():
    poisoned = fragment(1, 2, prev_action=np.array([9]), prev_reward=9.0, state_in=np.full(4, np.nan, np.float32))
    batch, _, _ = assemble([poisoned], version=5, max_lag=0, state_size=4)
    assert not batch.has_prev[0] and batch.prev_action[0] == 0 and batch.prev_reward[0] == 0
    assert batch.state_in.tolist() == [[0, 0, 0, 0]]


def test_late_rows_and_foreign_rows_are_masked_and_counted_once():
    versions = np.array([5, 4, 3, 2, 6])
    by_policy = np.array([True, False, True, False, True])
    batch, _, dropped = assemble([fragment(1, 5, versions=versions, by_policy=by_policy)], version=5, max_lag=2)
    assert batch.valid.tolist() == [True, False, True, False, False]  # the last one is of an unknown version
    assert batch.lag.tolist() == [0, 1, 2, 3, -1]
    assert dropped == {"not_policy": 2, "stale": 1}
    assert batch.valid.sum() + sum(dropped.values()) == 5


def test_rows_after_another_versions_rows_are_not_fresh_where_a_state_connects_them():
    fragments = [
        fragment(1, 3),
        fragment(2, 4, versions=np.array([4, 5, 5, 5])),
        fragment(3, 3, versions=np.array([5, 4, 5])),
        fragment(4, 1),
    ]
    batch, _, _ = assemble(fragments, version=5, max_lag=2)
    assert batch.fresh(recurrent=False).astype(int).tolist() == [1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1]
    assert batch.fresh(recurrent=True).astype(int).tolist() == [1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 1]


def test_fragments_without_a_valid_row_are_left_out_but_counted():
    late = fragment(1, 3, versions=np.full(3, 1))
    batch, kept, dropped = assemble([late, fragment(2, 2)], version=5, max_lag=2)
    assert [f.episode_id for f in kept] == ["e2"] and len(batch) == 2 and dropped == {"stale": 3}
    assert assemble([late], version=5, max_lag=2) == (None, [], {"stale": 3})
    assert assemble([], version=5, max_lag=2) == (None, [], {})


def test_a_fragment_that_cannot_be_trained_on_is_named():
    with pytest.raises(TrainingError, match=r"worker 3, episode 'e3', rows 4\.\.5.*no final_obs"):
        assemble([fragment(3, 2, t0=4, final_obs=None)], version=5, max_lag=0)
    assemble([fragment(3, 2, final_obs=None, terminated=True)], version=5, max_lag=0)
    with pytest.raises(TrainingError, match=r"state_in has shape \(3,\).*\(4,\)"):
        assemble([fragment(1, 2, state_in=np.zeros(3, np.float32))], version=5, max_lag=0, state_size=4)
    with pytest.raises(TrainingError, match="has no rows"):
        assemble([fragment(1, 0)], version=5, max_lag=0)


@pytest.mark.parametrize("name", ["seq_01_chunking"])
def test_chunks_of_the_golden_case(kit, name):
    case = kit.golden(name)
    lengths, size = np.array(case["inputs"]["episode_lengths"]), case["inputs"]["max_seq_len"]
    table = chunk_table(lengths, size)
    assert table[:, :3].tolist() == case["expected"]["chunks_episode_start_length"]
    assert [len(table), table[:, 2].max()] == case["expected"]["padded_shape"]
    assert table[:, 2].sum() == case["expected"]["valid_steps"]
    # "state from step 3" means: the chunk starts at step 4 of its episode; null: at step 0.
    starts = [0 if step is None else step + 1 for _, step in case["expected"]["initial_state_from"]]
    assert table[:, 1].tolist() == starts
    assert np.array_equal(ranges(table[:, 3], table[:, 2]), np.arange(16))


def test_ranges_in_any_order():
    assert ranges(np.array([10, 0, 5]), np.array([2, 3, 1])).tolist() == [10, 11, 0, 1, 2, 5]


def test_masks_stay_with_their_rows_and_all_is_allowed_without_one():
    mask = np.array([[True, False], [False, True], [True, True]])
    batch, _, _ = assemble([fragment(1, 3, mask=mask), fragment(2, 2)], version=5, max_lag=0)
    assert batch.mask.dtype == bool and batch.mask.tolist() == [*mask.tolist(), [True, True], [True, True]]
    plain, _, _ = assemble([fragment(1, 3)], version=5, max_lag=0)
    assert plain.mask is None
    with pytest.raises(TrainingError, match=r"mask has shape \(3, 3\), expected \(3, 2\)"):
        assemble([fragment(1, 3, mask=np.ones((3, 3), bool))], version=5, max_lag=0)
