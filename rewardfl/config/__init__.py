"""The configuration: rewardfl/config/schema.py says what each key means, rewardfl/config/load.py reads the files."""

# ruff: noqa: F401  (this file only re-exports)

from rewardfl.config.load import ConfigError, describe, dump, flat, load, parse, to_dict
from rewardfl.config.schema import (
    BY_CONTENT,
    FREE,
    IF_NAMED,
    MARKS,
    OWN_METRICS,
    SECTIONS,
    TRAINABLE,
    Alike,
    AnchorConfig,
    AnyConfig,
    DataConfig,
    EarlyStopConfig,
    EvaluationConfig,
    FlowGrpoConfig,
    GrpoTrainConfig,
    Resumed,
    RewardFlConfig,
    WantedReward,
    active_steps,
    did_you_mean,
    is_supervised,
    part_weights,
    resolved_coupling,
    second_pack_key,
    shown,
    trained_positions,
    wanted_rewards,
)
