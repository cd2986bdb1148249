"""Which keys may change when a run resumes. A key in none of the lists must stay as it was."""

from collections.abc import Mapping
from typing import Any

# These compute the same numbers: places, logging, saving, the split of a batch.
FREE = frozenset((
    "run.output_dir", "run.save_steps", "run.keep_last", "run.resume_from_checkpoint", "run.resume_with_changes",
    "run.log_with", "run.sample_videos", "run.cpu_threads", "data.cache_dir", "data.skip_bad_rows",
    "evaluation.eval_steps", "train.max_steps", "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps", "train.train_batch_size", "train.early_stop", "train.context_parallel",
))  # fmt: skip
# Paths: their content is compared in place of them.
BY_CONTENT = frozenset((
    "model.model_paths", "model.model_id_with_origin_paths", "model.tokenizer_path", "lora.init_from",
    "data.file_name", "evaluation.eval_clips", "reward.reward_model_path", "reward.held_out_model_path",
    "reward.second_model_path",
))  # fmt: skip
# These may change, or their content, when run.resume_with_changes names them; run.json then lists the change.
NAMED = frozenset((
    "lora.init_from", "reward.terms", "reward.held_out_model_path", "reward.second_model_path", "reward.cap",
    "reward.motion_reference", "reward.kl_weight", "reward.kl_steps", "reward.kl_gradient", "anchor.weight",
    "anchor.draws", "anchor.sigmas", "anchor.target", "anchor.measured_clips", "train.learning_rate",
    "train.lr_scheduler_type", "train.warmup_steps", "train.weight_decay", "train.max_steps", "train.max_grad_norm",
    "evaluation.eval_clips", "evaluation.eval_inference_steps", "evaluation.eval_noises", "grpo.advantage",
    "grpo.noise_level", "grpo.max_std", "grpo.clip_range", "grpo.kl_weight", "forward.advantage", "forward.draws",
    "forward.sigmas", "forward.old_policy", "forward.base_anchor", "forward.mix",
    "forward.weighting", "forward.clip_range", "forward.beta",
))  # fmt: skip


def comparable(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return {section.key: value} of config.to_dict, of nested sections only what changes numbers."""
    values = {f"{section}.{key}": value for section, keys in settings.items() for key, value in keys.items()}
    untrained = values["train.memory"]["untrained"]
    values["train.memory"] = {"untrained": untrained if untrained in ("fp8", "boundary_cache") else "exact"}
    values["model.distill_lora"] = {"mode": values["model.distill_lora"]["mode"]}
    return values
