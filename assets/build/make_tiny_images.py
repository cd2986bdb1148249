"""Rebuild the tiny images from a seed: scenes, a pipeline of Stable Diffusion 3's kind, a judge and prompts.

    python assets/build/make_tiny_images.py                    # assets/tiny_images, about an hour on two CPU cores
    python assets/build/make_tiny_images.py --quick --out DIR  # the whole path with next to no training, half a minute

Finished stages stay in --work and are not trained again; delete the folder to start over. OUT/figures.json has figures
of the written networks, next to a contact sheet (drawn pictures above, the base's below).
"""

from make_tiny_world import make_parser, make_work_folder, write_figures


def main() -> None:
    args = make_parser(__doc__, "tiny_images").parse_args()
    from tiny_images import build  # here, so that --help works without torch

    plan = build.QUICK if args.quick else build.Plan()
    build.build(plan, args.out, make_work_folder(args, "tiny_images"), args.seed)
    write_figures(build.measure(args.out, plan.measured, args.seed + 900), args.out)


if __name__ == "__main__":
    main()
