"""What a run takes, before there is a GPU or a model: compute, memory, disk, and what to set when it is too much.

    python tools/plan_run.py --config configs/wan22_face.yaml [--gpu-memory 80] [--host-gb 512]
        [--rates "RTX 4090,copies=12"] [--processes 8] [--sharding zero2|fsdp2] [section.key=value ...]

The model's shape is read from the configured model's folder when it is there, else from the published configurations
that come with rewardfl (of an image model, by the last part of model.model_paths). The host's memory is this machine's,
or its container's limit, unless --host-gb names another's.
Exit code 0: the run fits the memory of GPU and host as it is set; 2: it does not, or cannot work at all.
"""

import argparse
from pathlib import Path

from rewardfl import command_line, trust
from rewardfl.config import schema
from rewardfl.estimate.rates import parse_rates


def main() -> int:
    parser = command_line.Parser(__doc__, config="a run's YAML file, of any training script")
    positive, count = map(command_line.option_type, (schema.Positive, schema.Count))
    parser.add_argument("--gpu-memory", type=positive, default=80.0, metavar="GB", help="of one GPU, in 1e9 bytes")
    text = "host memory of all processes together (default: this machine's)"
    parser.add_argument("--host-gb", type=positive, metavar="GB", help=text)
    measured = "in practice, of an H100 (default) or RTX 4090, with other numbers in TFLOP/s and GB/s"
    parser.add_argument("--rates", type=parse_rates, default="H100", metavar='"RTX 4090,copies=12"', help=measured)
    parser.add_argument("--processes", type=count, default=1, help="GPUs of the run, one process each")
    text, shardings = "as zero2_offload.yaml or fsdp2.yaml spread the run", ("none", "zero2", "fsdp2")
    parser.add_argument("--sharding", choices=shardings, default="none", help=text)
    trust.add_option(parser)
    args = parser.parse_intermixed_args()
    return command_line.exit_code(lambda: plan_run(args))


def plan_run(args: argparse.Namespace) -> int:
    # here, so that --help and mistakes in the arguments need no torch
    from rewardfl import backbones, config, data, machine
    from rewardfl.estimate.report import Machine, estimate
    from rewardfl.training import model_files, plan, setup_summary, workload

    cfg = config.load(args.config, args.overrides)
    rows = data.load_metadata(cfg.data.file_name) if Path(cfg.data.file_name).is_file() else None
    backbone = backbones.describe(cfg.model.model_name, model_files.model_source(cfg.model))
    backbone.check_clips(cfg.data.height, cfg.data.width, cfg.data.num_frames, cfg.data.max_pixels)
    run_plan = plan.resolve(cfg, backbone, args.processes, here=False)
    if rows is not None:
        problems = [(row.line, text) for row in rows if (text := plan.size_problem(cfg.data, backbone, row.size))]
        rows, _ = data.usable_rows(rows, problems, skip_bad_rows=cfg.data.skip_bad_rows)
    overview = setup_summary.overview(run_plan, backbone, rows)
    planned = workload.make_workload(run_plan, backbone, rows, args.sharding)
    print(f"model's shape from {backbone.described_by()}")
    print(f"data: {'not there yet' if rows is None else f'{len(rows)} clips'}: {cfg.data.file_name}\n")
    host = machine.usable_memory() if args.host_gb is None else args.host_gb * 1e9
    text, fits = estimate(planned, Machine(args.gpu_memory * 1e9, host, args.processes), args.rates)
    print(overview, text, sep="\n")
    return command_line.DONE if fits else command_line.REFUSED


if __name__ == "__main__":
    raise SystemExit(main())
