from __future__ import annotations

import torch

from tetherl.models.numerics import set_up_torch


def test_threads_are_set_and_a_gpu_computes_in_full_float32(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    try:
        set_up_torch(1, "cpu")
        assert torch.get_num_threads() == 1 and torch.backends.cudnn.allow_tf32
        set_up_torch(2, "cuda:0")
        assert torch.get_num_threads() == 2 and not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_num_threads(before)
