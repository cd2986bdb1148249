"""The seconds of a phase include the device's work."""

import torch

from rewardfl.training.timer import Timer


def test_a_timer_waits_for_the_runs_own_device(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        with Timer(device)("decode"):
            pass
    assert waited == [torch.device("cuda", 1)]
