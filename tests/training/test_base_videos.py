"""The base model's videos: how they are sampled, which are made again, and the anchor's loss at their latents."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from pipelines import FRAMES, HEIGHT, WIDTH, backbone_of
from test_reward_flow import SCHEDULE, conditioning, lora_model

from rewardfl import anchor, config, flow, lora
from rewardfl.backbones.protocol import Experts, Velocity
from rewardfl.data.cache import Cache
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.training import setup_data
from rewardfl.training.anchors import Anchors
from rewardfl.training.conditions import Conditions
from rewardfl.training.sampler import DeployedSampler
from rewardfl.training.samples import Batch, Sample
from rewardfl.training.shard import Shard

CPU = torch.device("cpu")
REFERENCE = ["anchor.weight=1", "anchor.target=reference"]


def sample_of(name, **more):
    row = SimpleNamespace(id=name, prompt="talking", video=None, offers=("picture",))
    return Sample(row=row, clip={}, size=(HEIGHT, WIDTH), references=(), **more)


def test_they_take_as_many_steps_as_a_rollout():
    def schedule(steps, *_):
        raise RuntimeError(f"{steps} steps")

    conditions = SimpleNamespace(
        read_or_substitute=lambda clips, row, skip: (row, {}), latent_shape=lambda sample: (1, 1, 2, 2)
    )
    sampler = DeployedSampler(
        backbone=SimpleNamespace(schedule=schedule), model=Experts({}), decoder=None, conditions=conditions,
        negative=None, settings=config.load(ROOT / "tests" / "grpo.yaml").sample, steps=3, seed=1, skip=False,
        device=CPU,
    )  # fmt: skip
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

    for boundary, names, latents in ((0.9, "a", [1]), (0.8, "a", [2]), (0.9, "ba", [3, 1])):
        cfg = config.load(ROOT / "tests" / "face.yaml", [*REFERENCE, f"model.min_timestep_boundary={boundary}"])
        tables = [sample_of(name) for name in names], [sample_of("held out")]
        point = SimpleNamespace(base={})
        samples, held_out = setup_data.add_base_motion(cfg, job, store, [], point, generate, *tables)
        assert [float(store.get(sample.base_latents)["latents"]) for sample in samples] == latents
        assert held_out[0].base_latents is None
    assert generated == [("a", 0), ("a", 0), ("b", 0)]


def test_a_row_without_a_clip_is_anchored_at_their_latents(tmp_path):
    """The loss is the mean square of the difference that the adapter makes to the velocity at the noised latents."""
    pipe, model = lora_model(torch.float32)
    inputs, x0 = conditioning(1, torch.float32, pipe)
    sample = sample_of("anna", base_latents={"kind": "base_latents"})
    backbone, digests = backbone_of(pipe), dict.fromkeys(("text", "image", "untrained", "dtype"), "")
    conditions = Conditions(store=Cache(tmp_path), backbone=backbone, num_frames=FRAMES, **digests)
    conditions.store.put(sample.base_latents, {"latents": x0})
    settings = config.AnchorConfig(weight=1, target="reference", draws=2)
    anchors = Anchors(
        settings=settings, steps=(3, 4), seed=1, backbone=backbone, conditions=conditions,
        samples=[sample], schedules=None, skip_lost=False, device=CPU,
    )  # fmt: skip
    batch = Batch(rows=[0], replaced=[False], conditioning=inputs, x=x0, schedule=SCHEDULE, start_step=0)
    job = SimpleNamespace(accumulate=lambda policy: contextlib.nullcontext(), backward=torch.Tensor.backward)
    (loss,), anchored = anchors.accumulate(job, model, batch, 7, 1.0)
    expected = []
    for n, moment in enumerate(anchor.draw_moments(2, (3, 4), 1, 7, whole_range=False)):
        at = SCHEDULE.at(moment)
        velocity = Velocity(backbone=backbone, model=model, conditioning=inputs, schedule=at)
        noisy = flow.add_noise(x0, draw_noise(x0.shape, noise_seed(1, 7, "anchor/anna/0", n), CPU), at.sigmas[0])
        with torch.no_grad(), lora.reference(model):
            base = velocity(noisy, 0)
        expected.append((velocity(noisy, 0) - base).square().mean())
    assert anchored.tolist() == [True] and loss > 1e-4
    torch.testing.assert_close(loss, torch.stack(expected).mean())
