"""The configuration: rewardfl/config/schema.py explains each key, rewardfl/config/load.py reads the files."""

# ruff: noqa: F401  (this file only re-exports)

from rewardfl.config.fields import did_you_mean, shown
from rewardfl.config.load import (
    ConfigError,
    describe,
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
    TRAINABLE,
    AnchorConfig,
    AnyConfig,
    DataConfig,
    EarlyStopConfig,
    EvaluationConfig,
    FlowGrpoConfig,
    ForwardRlConfig,
    GroupConfig,
    GroupRunConfig,
    GrpoTrainConfig,
    RewardFlConfig,
    RewardSpec,
    active_steps,
    count_base_noises,
    is_supervised,
    kl_steps,
    list_reward_specs,
    processes_per_clip,
    second_pack_key,
    trained_positions,
)
