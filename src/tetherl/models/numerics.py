"""How torch computes in this process: the same for whoever acts and whoever learns."""

from __future__ import annotations

import torch


def set_up_torch(threads: int, device: str) -> None:
    """Use `threads` threads, and full float32 on a GPU.

    cuDNN would round convolutions and recurrent layers to TF32 by default. A policy that acts on a CPU and learns on a
    GPU then sees other probabilities than those it acted with, and fresh data no longer starts at a ratio of 1.
    """
    torch.set_num_threads(threads)
    if torch.device(device).type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
