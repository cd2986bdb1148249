"""The configuration: schema.py explains each key, load.py reads the files."""

# ruff: noqa: F401  (this file only re-exports)

from rewardfl.config.load import (
    ConfigError,
    describe_errors,
    dump,
    flat,
    load,
    parse,
    parse_value,
    read_saved,
    to_dict,
    without_removed,
)
from rewardfl.config.schema import (
    RESERVED_METRICS,
    SECTIONS,
    AnchorConfig,
    AnyConfig,
    DataConfig,
    EarlyStopConfig,
    FlowGrpoConfig,
    ForwardRlConfig,
    GrpoTrainConfig,
    RewardFlConfig,
    RewardSpec,
    active_steps,
    did_you_mean,
    is_supervised,
    kl_steps,
    list_reward_specs,
    processes_per_clip,
    shown,
    trained_positions,
)
