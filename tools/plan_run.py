"""What a run takes, before there is a GPU or a model: compute, memory, disk, and what to set when it is too much.

    python tools/plan_run.py --config configs/wan22_face.yaml [--gpu-memory 80] [--tflops 400] [--processes 8]
        [--sharding zero2|fsdp2] [section.key=value ...]

Of train_reward_fl.py or train_flow_grpo.py, as the file's sections say. The model's shape is read from the configured
model's folder when it is there, else from configs/wan22_i2v_a14b.
Exits with 0 when the run fits the GPU's memory as it is set, 2 when it does not or when it cannot work at all.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from rewardfl import config as configuration
from rewardfl import data, plan, plan_grpo
from rewardfl.backbones.wan import load as wan_load
from rewardfl.config import AnyConfig, FlowGrpoConfig, RewardFlConfig
from rewardfl.run import checks

FITS, DOES_NOT = 0, 2  # exit codes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--gpu-memory", type=float, default=80, metavar="GB", help="of one GPU, in 1e9 bytes")
    parser.add_argument("--tflops", type=float, default=plan.TFLOPS, help="TFLOP/s that the GPU reaches in practice")
    parser.add_argument("--processes", type=int, default=1, help="GPUs of the run, one process each")
    parser.add_argument(
        "--sharding", choices=plan.SHARDINGS, default="none", help="as zero2_offload.yaml or fsdp2.yaml spread the run"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    if args.processes < 1:
        parser.error("--processes must be at least 1")
    try:
        cfg = configuration.load(args.config, args.overrides)
        clips = len(data.load_metadata(cfg.data.file_name)) if Path(cfg.data.file_name).is_file() else None
        configs = plan.source_of(cfg.model.model_paths, wan_load.PUBLISHED)
        spatial, temporal = checks.vae_factors(configs)
        checks.check_geometry(
            cfg.data.height, cfg.data.width, cfg.data.num_frames, spatial, temporal, max_pixels=cfg.data.max_pixels
        )
        run = run_of(cfg, configs, clips, args.processes, args.sharding)
    except (configuration.ConfigError, data.DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return DOES_NOT
    published = " (published; no configurations in model.model_paths)" if configs == wan_load.PUBLISHED else ""
    print(f"model's shape from {configs}{published}")
    print(f"data: {'not there yet' if clips is None else f'{clips} clips'}: {cfg.data.file_name}\n")
    costs, gpu_memory = plan.costs_of(cfg, configs), args.gpu_memory * 1e9
    if isinstance(run, plan_grpo.GrpoRun):
        print("\n".join([*plan_grpo.arithmetic(run), "", plan_grpo.report(costs, run, args.tflops, gpu_memory)]))
    else:
        print(plan.report(costs, run, args.tflops, gpu_memory))
    return FITS if plan.fits(costs, run, gpu_memory) else DOES_NOT


def run_of(cfg: AnyConfig, configs: Path, clips: int | None, processes: int, sharding: str) -> plan.AnyRun:
    """What the configuration does with it; ConfigError for what cannot work."""
    if isinstance(cfg, FlowGrpoConfig):
        return plan_grpo.run_of(cfg, configs, clips, plan_grpo.total_steps(cfg, clips), processes, sharding)
    run = plan.run_of(cfg, configs, clips, updates(cfg, clips, processes), processes, sharding)
    checks.check_active_experts(run.active, run.experts, run.trained, configuration.resolved_coupling(cfg))
    return run


def updates(cfg: RewardFlConfig, clips: int | None, processes: int) -> int | None:
    """Optimizer updates of the run, of train_batch_size clips where it is given; None where the data must say."""
    train = cfg.train
    if train.max_steps is not None or clips is None:
        return train.max_steps
    clips_per_update = processes * train.per_device_train_batch_size * train.gradient_accumulation_steps
    return data.total_steps(clips, train.train_batch_size or clips_per_update, train.num_train_epochs, None)


if __name__ == "__main__":
    sys.exit(main())
