"""Bytes of one real block and one real decoder chunk, forward and backward, on the CPU, beside what the estimate says.

    python -m benchmarks.parts [--config configs/wan22_face.yaml] [section.key=value ...] [--json FILE]

Random weights of the configured shape (the published one's where its folder is not there), and the video's own sizes.
A dispatch mode counts the tensors that live, as on a GPU; RSS is what the kernel gives the process. At 480x480x81 in
float32 it takes 16 GB of memory and some minutes.
"""

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

from benchmarks.reward_step import fill, highest_rss, new_decoder, reset_rss
from rewardfl import backbones, config
from rewardfl.backbones.seam import DTYPES, Backbone
from rewardfl.backbones.wan import files
from rewardfl.backbones.wan import model as wan
from rewardfl.config import RewardFlConfig
from rewardfl.estimate.measure import Costs, Living
from rewardfl.estimate.measure import measure as measure_costs
from rewardfl.run import start, work
from rewardfl.run.checkpoint import git_commit, library_versions

CPU = torch.device("cpu")


def measured(predicted: int, living: Living, rss: int, seconds: float) -> dict[str, Any]:
    return {
        "predicted": predicted, "measured": living.peak, "measured / predicted": living.peak / predicted,
        "RSS, more than before": rss, "seconds": seconds,
    }  # fmt: skip


def block(cfg: RewardFlConfig, backbone: Backbone, costs: Costs) -> dict[str, Any]:
    """A trained expert's block: its peak, without weights and input."""
    name = work.trained_experts(cfg, backbone.experts)[0]
    made, dtype = files.config_of(backbone.layout, backbone.variant.parts[name]), DTYPES[cfg.model.dtype]
    expert = wan.new_expert(made, dtype, 1, work.work_of(cfg, backbone, None, None, 1).video.adapter)
    trained = [parameter_name for parameter_name, parameter in expert.named_parameters() if parameter.requires_grad]
    fill(expert, CPU, CPU, cfg.run.seed)
    for parameter_name, parameter in expert.named_parameters():
        parameter.requires_grad_(parameter_name in trained)
    rope = WanRotaryPosEmbed(made["attention_head_dim"], made["patch_size"], made["rope_max_seq_len"])
    whole = (costs.shape[1] + (backbone.variant.image == "frame"), *costs.shape[2:])
    tokens, width = costs.experts[name].tokens, made["attention_head_dim"] * made["num_attention_heads"]
    rotary = rope(torch.empty(1, made["in_channels"], *whole))
    times = (1, tokens) if backbone.variant.token_times else (1,)
    told = wan.TEXT_LENGTH + 257 * backbone.variant.clip
    hidden = torch.randn(1, tokens, width, dtype=dtype, requires_grad=True)
    text, when = torch.randn(1, told, width, dtype=dtype), torch.randn(*times, 6, width, dtype=dtype)
    (one,) = expert.blocks
    given = [*expert.parameters(), hidden, text, when, *rotary]
    reset_rss()
    before, begin = highest_rss(), time.perf_counter()
    with Living(given) as living:
        out = one(hidden, text, when, rotary)
        torch.autograd.backward([out], [torch.empty_like(out)])
    return measured(costs.experts[name].block_peak, living, highest_rss() - before, time.perf_counter() - begin)


def chunk(cfg: RewardFlConfig, backbone: Backbone, costs: Costs) -> dict[str, Any]:
    """A decoder chunk from the third on, by the decoder's own VJP: its peak, without weights and the caches kept.

    The VJP of three latent frames whose last two have a gradient: the second's cotangent comes through the caches, too.
    """
    decoder = new_decoder(cfg, backbone, CPU)
    latents = torch.randn(1, costs.shape[0], 4, *costs.shape[2:])
    decoded = decoder.decode_with_caches(latents)
    cotangent = torch.randn_like(decoded.video)
    kept = [cache for caches in decoded.caches.values() for cache in caches if isinstance(cache, torch.Tensor)]
    reset_rss()
    before, begin = highest_rss(), time.perf_counter()
    with Living([*decoder.vae.parameters(), latents, decoded.video, cotangent, *kept]) as living:
        decoder.vjp(latents, cotangent, decoded)
    return measured(costs.chunks[-1].peak_vjp, living, highest_rss() - before, time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/wan22_face.yaml")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write there what is printed")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    cfg = config.load(args.config, args.overrides)
    backbone = backbones.describe(cfg.model.model_name, start.model_source(cfg))
    video = work.work_of(cfg, backbone, None, None, 1).video
    costs = measure_costs(video)
    report = {
        "command": shlex.join(["python", "-m", "benchmarks.parts", *sys.argv[1:]]),
        **library_versions(("torch", "diffusers", "peft")),
        "commit": git_commit(Path(__file__).parent),
        "video": f"{video.height}x{video.width}x{video.num_frames}, {cfg.model.dtype}",
    }
    for name, part in {"decoder chunk": chunk, "block": block}.items():
        report[name] = part(cfg, backbone, costs)
        print(json.dumps({name: report[name]}, indent=1), flush=True)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
