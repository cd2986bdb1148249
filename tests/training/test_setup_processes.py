"""Launches and trackers that do not fit the configuration are refused."""

import pytest
from test_model_files import REQUIRED

from rewardfl import config
from rewardfl.config import ConfigError
from rewardfl.training import setup_processes
from rewardfl.training.setup_processes import check_sharding


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(setup_processes, "get_available_trackers", lambda: ["tensorboard"])
    cfg = config.parse(REQUIRED, ["run.log_with=wandb"])
    with pytest.raises(ConfigError, match="run.log_with: wandb is not installed; pip install wandb, or set"):
        setup_processes.connect_processes(cfg.run, cfg.model, cfg.train, 1)


@pytest.mark.parametrize("sharding", ["zero2", "fsdp2"])
@pytest.mark.parametrize("key, value", [
    ("train.memory.trained", "cpu_swap"), ("train.compile_blocks", "true"), ("train.context_parallel", "2"),
])  # fmt: skip
def test_what_sharded_weights_exclude(key, value, sharding):
    plain, cfg = config.parse(REQUIRED), config.parse(REQUIRED, [f"{key}={value}"])
    per_clip = config.processes_per_clip(cfg)
    check_sharding(plain.train, 1, sharding)
    check_sharding(cfg.train, per_clip, "none")
    with pytest.raises(ConfigError, match=f"^{key} .*{sharding}.*configs/accelerate/ddp.yaml"):
        check_sharding(cfg.train, per_clip, sharding)
