"""The base model's videos: how they are sampled, and which are made again."""

from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from rewardfl import backbones, config
from rewardfl.backbones.protocol import Experts, Source
from rewardfl.data.cache import Cache
from rewardfl.training import setup_data
from rewardfl.training.plan import resolve
from rewardfl.training.sampler import DeployedSampler
from rewardfl.training.samples import Sample
from rewardfl.training.shard import Shard

PIPELINE = ROOT / "assets" / "tiny_world" / "pipeline"


def sample_of(name):
    row = SimpleNamespace(id=name, prompt="talking", video=None, offers=("picture",))
    return Sample(row=row, clip={}, size=(32, 32), references=())


def test_they_take_as_many_steps_as_a_rollout():
    def schedule(steps, *_):
        raise RuntimeError(f"{steps} steps")

    conditions = SimpleNamespace(
        read_or_substitute=lambda *_, skip: (0, {}), latent_shape=lambda _: (1, 1, 2, 2),
        backbone=SimpleNamespace(schedule=schedule),
    )  # fmt: skip
    run_plan = config.load(ROOT / "tests" / "grpo.yaml", ["evaluation.eval_inference_steps=3"])  # has the same sections
    model, device = Experts({}), torch.device("cpu")
    sampler = DeployedSampler(
        plan=run_plan, model=model, decoder=None, conditions=conditions, negative=None, device=device
    )
    for sample, steps in ((sampler.generate, 3), (sampler.base, 8)):
        with pytest.raises(RuntimeError, match=f"^{steps} steps"):
            sample([sample_of("0")], 0, 0)


def test_another_boundary_or_row_is_sampled_again(tmp_path):
    """Without a reward that measures motion the anchor takes the first noise's, and only of rows to train on."""
    generated, store = [], Cache(tmp_path)
    job = SimpleNamespace(run_on_main=lambda find, errors: find(), wait=lambda: None, shard=Shard(0, 1, quiet=True))

    def generate(samples, row, noise):
        generated.append((samples[row].row.id, noise))
        return row, torch.zeros(3, 1, 2, 2), torch.full((1, 1), float(len(generated)))

    reference = ["anchor.weight=1", "anchor.target=reference"]
    for boundary, names, latents in ((0.9, "a", [1]), (0.8, "a", [2]), (0.9, "ba", [3, 1])):
        cfg = config.load(ROOT / "tests" / "face.yaml", [*reference, f"model.min_timestep_boundary={boundary}"])
        backbone = backbones.describe("wan2_2", Source(model_paths=str(PIPELINE), dtype="float32"))
        run_plan = resolve(cfg, backbone, 1, here=False)
        tables, point = ([sample_of(name) for name in names], [sample_of("held out")]), SimpleNamespace(base={})
        samples, held_out = setup_data.add_base_motion(run_plan, job, store, [], point, generate, *tables)
        assert [float(store.get(sample.base_latents)["latents"]) for sample in samples] == latents
        assert held_out[0].base_latents is None
    assert generated == [("a", 0), ("a", 0), ("b", 0)]
