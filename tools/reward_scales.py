"""How large is each reward on your clips, and how hard does it pull? Before any training, to choose weights by.

    python tools/reward_scales.py --config configs/tiny_face.yaml --rows 4 [section.key=value ...]

The base model's videos of the first clips, sampled as in training, are scored by every reward of the configuration of
train_reward_fl.py. A line has the mean and standard deviation of its score (the configuration's mean and std); the norm
of its gradient by the video, and that gradient's cosine with the first reward's; its weight, its share of the weighted
gradient, and the weight with which it would pull as hard as the first. The KL is not a reward, and not in here.
"""

from rewardfl import command_line, trust
from rewardfl.config import schema


def main() -> int:
    parser = command_line.Parser(__doc__, config="a run's YAML file")
    count = command_line.option_type(schema.Count)
    parser.add_argument("--rows", type=count, default=4, help="clips, one noise each (default: %(default)s)")
    command_line.add_device_options(parser)
    trust.add_option(parser)
    return command_line.run("rewardfl.evaluation.scales:print_scales", parser.parse_intermixed_args())


if __name__ == "__main__":
    raise SystemExit(main())
