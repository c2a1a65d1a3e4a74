"""Derived model settings, refused combinations, and what may be imported without torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces

from tetherl.errors import ConfigError
from tetherl.models.config import ModelConfig
from tetherl.models.defaults import resolve_model
from tetherl.spaces import ObservationCodec

VECTOR = spaces.Box(-1, 1, (4,))
IMAGE = spaces.Box(0, 255, (84, 84, 4), np.uint8)


def resolve(space: spaces.Space, **settings) -> ModelConfig:
    return resolve_model(ModelConfig(**settings), ObservationCodec(space).leaves)


@pytest.mark.parametrize(
    ("space", "lstm", "shared"),
    [(VECTOR, False, False), (VECTOR, True, True), (IMAGE, False, True), (IMAGE, True, True)],
)
def test_value_function_shares_with_images_or_lstm(space, lstm, shared):
    assert resolve(space, use_lstm=lstm).vf_share_layers is shared
    assert resolve(space, rnn="gru" if lstm else None).vf_share_layers is shared
    assert resolve(space, use_lstm=lstm, vf_share_layers=not shared).vf_share_layers is not shared


def test_previous_action_is_on_with_lstm_only_unless_asked_for():
    assert resolve(VECTOR).lstm_use_prev_action is False
    assert resolve(VECTOR, use_lstm=True).lstm_use_prev_action is True
    assert resolve(VECTOR, lstm_use_prev_action=True).lstm_use_prev_action is True
    assert resolve(VECTOR, use_lstm=True, lstm_use_prev_action=False).lstm_use_prev_action is False


def test_dense_layers_default_for_vectors():
    assert resolve(VECTOR).fcnet_hiddens == [64, 64]
    assert resolve(VECTOR, fcnet_hiddens=[8]).fcnet_hiddens == [8]
    assert resolve(IMAGE).fcnet_hiddens is None


def test_settings_that_would_do_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"fcnet_hiddens: \[256\] would do nothing.*post_fcnet_hiddens"):
        resolve(IMAGE, fcnet_hiddens=[256])
    with pytest.raises(ConfigError, match=r"conv_filters: would do nothing.*\(4,\)"):
        resolve(VECTOR, conv_filters=[[16, [3, 3], 1]])
    both = spaces.Dict({"camera": IMAGE, "speed": VECTOR})
    assert resolve(both, fcnet_hiddens=[32]).fcnet_hiddens == [32]

    with pytest.raises(ConfigError, match=r"encoder: would do nothing.*\(4,\)"):
        resolve(VECTOR, encoder="impala")
    with pytest.raises(ConfigError, match=r"normalize_observations: would do nothing.*\(84, 84, 4\)"):
        resolve(IMAGE, normalize_observations=True)
    assert resolve(both, normalize_observations=True, encoder="impala").normalize_observations
    with pytest.raises(ConfigError, match=r"custom_config: does nothing without model.custom"):
        resolve(VECTOR, custom_config={"units": 3})


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match=r"use_lstm is true and rnn is gru"):
        resolve(VECTOR, use_lstm=True, rnn="gru")
    with pytest.raises(ConfigError, match=r"model.encoder, model.conv_filters: both"):
        resolve(IMAGE, encoder="nature", conv_filters=[[16, [3, 3], 1]])


def test_layers_without_units_are_refused():
    with pytest.raises(ConfigError, match=r"post_fcnet_hiddens.*at least 1 unit.*\[64, 0\]"):
        resolve(VECTOR, post_fcnet_hiddens=[64, 0])


def test_planning_needs_no_torch():
    code = (
        "import sys, tetherl.models.config, tetherl.models.conv_plan, tetherl.models.defaults;"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
