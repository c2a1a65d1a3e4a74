"""Action masks of environments: Gymnasium's convention, `info["action_mask"]` from reset and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tetherl.errors import SpaceError
from tetherl.spaces import ActionCodec

KEY = "action_mask"


def mask_in(info: Mapping[str, Any], actions: ActionCodec, episode: str) -> np.ndarray | None:
    """The mask in the info of one environment, [P] bool; None without one.

    SpaceError, which names the episode, for a mask that is none or forbids every choice.
    """
    return _checked(info[KEY], actions, episode) if KEY in info else None


def masks_in(
    infos: Mapping[str, Any], actions: ActionCodec, episodes: Sequence[str], over: np.ndarray
) -> list[np.ndarray | None]:
    """The masks in the infos of a vector environment, one for each copy; `episodes` names what each copy plays.

    A vector environment's infos hold one array per key, and under `_key` which copies gave it. Copies whose episode is
    over [B] bool take no action next, and their mask is not looked at.
    """
    if KEY not in infos:
        return [None] * len(episodes)
    given = np.asarray(infos.get(f"_{KEY}", True)) & ~over
    return [
        _checked(mask, actions, episode) if there else None
        for mask, episode, there in zip(infos[KEY], episodes, given, strict=True)
    ]


def _checked(mask: Any, actions: ActionCodec, episode: str) -> np.ndarray:
    try:
        return actions.mask(mask)
    except SpaceError as error:
        raise SpaceError(f"episode {episode}: {error}") from None
