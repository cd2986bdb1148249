"""Replay against plain autograd through the chain, and the accounting of accumulation, batches and processes."""

import contextlib
import weakref

import pytest
import torch
from conftest import ROOT
from pipelines import FRAMES, HEIGHT, I2V, LAYERS, WIDTH, backbone_of, experts_of, latent_shape, random_pipeline

from rewardfl import backbones, flow, lora, reward_flow, sde
from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import DTYPES, Experts, Source, Velocity
from rewardfl.backbones.wan import model as wan
from rewardfl.backbones.wan.decoder import WanDecoder
from rewardfl.estimate.measure import Living, nbytes
from rewardfl.memory.offload import InputsOnHost

SCHEDULE = wan.schedule(6, 5.0, I2V.experts, 0.9)  # 1, .961, .909 high noise; .833, .714, .5 low noise


def lora_model(dtype):
    pipe = random_pipeline(dtype)
    for expert in (pipe.transformer, pipe.transformer_2):
        lora.inject(expert, rank=2, alpha=3.0, targets=LAYERS, seed=1)
        for i, p in enumerate(p for p in expert.parameters() if p.requires_grad):
            p.data = p.data.to(dtype) + 0.1 * torch.randn(
                p.shape, generator=torch.Generator().manual_seed(i), dtype=dtype
            )
    return pipe, experts_of(pipe)


def conditioning(batch, dtype, pipe):
    g = torch.Generator().manual_seed(5)
    shape = latent_shape(pipe, HEIGHT, WIDTH, FRAMES)
    text = torch.randn(batch, 8, 32, generator=g, dtype=dtype)
    image = torch.randn(batch, 18, *shape[2:], generator=g, dtype=dtype)
    x = torch.randn(batch, *shape[1:], generator=g, dtype=dtype)
    return {"text": text, "image": image}, x


def velocity_of(pipe, model, cond):
    return Velocity(backbone=backbone_of(pipe), model=model, conditioning=cond, schedule=SCHEDULE)


def quadratic_reward(video):
    """(B,) a smooth stand-in reward that sees every pixel."""
    weights = torch.linspace(-1, 1, video[0].numel(), dtype=video.dtype).view(video[0].shape)
    return ((video - 0.3 * weights) ** 2 * weights).flatten(1).mean(1) * 100


def autograd_gradients(pipe, model, cond, x, active, coupling, kl_weight, kl_gradient, kl_steps=None):
    """Back-propagate the same loss through one big graph; an input is coupling * x + (1 - coupling) * constant copy."""
    velocity, sigmas = velocity_of(pipe, model, cond), SCHEDULE.sigmas
    kl = 0.0
    for i in range(len(sigmas) - 1):
        if i in active:
            scaled = coupling * x + (1 - coupling) * x.detach()
            v = velocity(scaled, i)
            seen = x.detach() if kl_gradient == "fixed_trajectory" else scaled
            anchor = v if seen is scaled else velocity(seen, i)
            with lora.reference(model):  # not Velocity.reference, which has another graph
                v_ref = velocity(seen, i)
            if kl_gradient != "exact":
                v_ref = v_ref.detach()
            if kl_weight and i in (kl_steps or active):
                kl = kl + flow.velocity_kl(anchor, v_ref, sigmas[i]) / len(kl_steps or active)
        else:
            v = velocity(x, i).detach()
        x = x + (sigmas[i + 1] - sigmas[i]) * v
    inverse_std = 1.0 / torch.tensor(pipe.vae.config.latents_std, dtype=x.dtype).view(1, -1, 1, 1, 1)
    mean = torch.tensor(pipe.vae.config.latents_mean, dtype=x.dtype).view(1, -1, 1, 1, 1)
    video = pipe.vae.decode(x / inverse_std + mean).sample
    loss = (-quadratic_reward(video) + kl_weight * kl).sum()
    loss.backward()
    return gradients(model), x.detach(), kl


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


NO_GRAPHS = reward_flow.KeptGraphs()


def replay_gradients(
    pipe, model, cond, x, active, coupling, kl_weight, kl_gradient, kl_steps=None, graphs=NO_GRAPHS
):  # fmt: skip
    velocity, sigmas = velocity_of(pipe, model, cond), SCHEDULE.sigmas
    trajectory = reward_flow.rollout(velocity, x, sigmas, active, with_graphs=graphs)
    assert set(trajectory.graphs) == set(graphs.steps)
    decoded = WanDecoder(pipe.vae).decode_with_caches(trajectory.x0)
    video = decoded.video.requires_grad_()
    (grad_video,) = torch.autograd.grad(-quadratic_reward(video).sum(), video)
    grad_x0 = WanDecoder(pipe.vae).vjp(trajectory.x0, grad_video, decoded)
    kl = reward_flow.replay(
        velocity, trajectory, sigmas, active, grad_x0, coupling,
        reference=velocity.reference, kl_weight=kl_weight, kl_gradient=kl_gradient, kl_steps=kl_steps,
    ).kl  # fmt: skip
    assert not trajectory.graphs  # given up one by one
    return gradients(model), trajectory.x0, kl


def assert_same(actual, expected, relative):
    assert actual.keys() == expected.keys()
    norm = torch.cat([g.flatten() for g in expected.values()]).norm()
    assert norm > 0
    difference = torch.cat([(actual[n] - expected[n]).flatten() for n in expected]).norm()
    assert difference <= relative * norm, f"relative difference {float(difference / norm):.2e}"


CASES = [
    # active, coupling, kl_weight, kl_gradient, kl_steps
    ([3, 4, 5], 1.0, 0.0, "exact", None),
    ([3, 4, 5], 1.0, 0.7, "exact", [4]),
    ([3, 4, 5], 1.0, 0.7, "fixed_trajectory", None),
    ([3, 4, 5], 0.0, 0.7, "exact", None),
    ([3, 4, 5], 0.2, 0.7, "fixed_trajectory", [3, 5]),
    ([1, 3, 5], 0.2, 0.7, "exact", None),  # gaps, and both experts
    ([1, 3, 5], 1.0, 0.7, "reference_constant", [5]),
    ([5], 1.0, 0.7, "exact", None),
]


@pytest.mark.parametrize("active,coupling,kl_weight,kl_gradient,kl_steps", CASES)
def test_replay_equals_autograd(active, coupling, kl_weight, kl_gradient, kl_steps, monkeypatch):
    """The KL takes one reference velocity for each of its steps."""
    results, references, reference = [], [], Velocity.reference
    monkeypatch.setattr(Velocity, "reference", lambda *words: (references.append(words[2]), reference(*words))[1])
    for run in (autograd_gradients, replay_gradients):
        pipe, model = lora_model(torch.float64)
        cond, x = conditioning(2, torch.float64, pipe)
        results.append(run(pipe, model, cond, x, active, coupling, kl_weight, kl_gradient, kl_steps))
    (expected, x0, kl), (actual, x0_replay, kl_replay) = results
    torch.testing.assert_close(x0, x0_replay, rtol=1e-5, atol=1e-5)
    if kl_weight:
        torch.testing.assert_close(kl.detach(), kl_replay)
    assert references == (sorted(kl_steps or active, reverse=True) if kl_weight else [])
    assert_same(actual, expected, 1e-7)  # diffusers' norms round to float32 inside
    trained = {name.split(".")[1] for name in actual}  # inside.<expert>.
    assert trained == ({"high_noise", "low_noise"} if 1 in active else {"low_noise"})
    assert all("lora" in name for name in actual)


def test_stopping_early_decodes_the_x0_prediction():
    pipe, model = lora_model(torch.float64)
    cond, x = conditioning(1, torch.float64, pipe)
    velocity = velocity_of(pipe, model, cond)
    shortened = SCHEDULE.until(4)
    assert shortened.sigmas.tolist() == SCHEDULE.sigmas[:5].tolist() + [0.0]
    assert shortened.experts == SCHEDULE.experts[:5] and torch.equal(shortened.timesteps, SCHEDULE.timesteps[:5])
    full = reward_flow.rollout(velocity, x, SCHEDULE.sigmas, [4])
    with torch.no_grad():
        expected = full.latents[4] - SCHEDULE.sigmas[4] * velocity(full.latents[4], 4)
    early = reward_flow.rollout(velocity, x, shortened.sigmas, [4])
    torch.testing.assert_close(early.x0, expected)


@pytest.mark.parametrize("dtype,low,high", [(torch.bfloat16, 2e-5, 1e-3), (torch.float32, 0.0, 1e-8)])
def test_the_floor_of_the_kl_is_what_a_tiny_update_reads(dtype, low, high):
    """Against the thing itself: an adapter whose true divergence is far below what bfloat16 reads of it."""
    names = {value: name for name, value in DTYPES.items()}
    source = Source(model_paths=str(ROOT / "assets" / "tiny_world" / "pipeline"), dtype=names[dtype])
    backbone = backbones.open("wan2_2", source)
    model = backbone.load(["low_noise"]).transformer_2
    lora.inject(model, 4, 4.0, LAYERS, seed=0)
    generator = torch.Generator().manual_seed(0)
    text, image, x = (torch.randn(s, generator=generator) for s in ((1, 8, 32), (1, 18, 2, 8, 8), (1, 16, 2, 8, 8)))
    schedule, active = backbone.schedule(8, 5.0, x.shape[1:]), [5, 6]
    velocity = Velocity(
        backbone=backbone, model=Experts({"high_noise": model, "low_noise": model}),
        conditioning={"text": text.to(dtype), "image": image}, schedule=schedule,
    )  # fmt: skip
    kernel = sde.Kernel("flow", 0.7, schedule.sigmas)
    floor = reward_flow.kl_floor(velocity.reference, x, schedule.sigmas, active, start=4)
    policy_floor = sde.kl_floor(velocity.reference, x, kernel, active)
    assert low <= floor < high
    if dtype == torch.float32:
        assert policy_floor < 1e-8
        return
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 1e-4 * torch.randn(parameter.shape, generator=generator)
    read, of_policy = [], []
    with torch.no_grad():
        for i, latents in reward_flow.rollout(velocity.reference, x, schedule.sigmas, active, start=4).latents.items():
            read.append(flow.velocity_kl(velocity(latents, i), velocity.reference(latents, i), schedule.sigmas[i]))
            (mean, _), reference = (kernel.transition(v, latents, i) for v in (velocity, velocity.reference))
            of_policy.append(flow.transition_kl(mean, *reference))
    assert floor / 3 < float(torch.cat(read).mean()) < 3 * floor
    assert policy_floor / 3 < float(torch.cat(of_policy).mean()) < 3 * policy_floor


def test_exact_is_the_gradient_of_the_reported_kl():
    """By differences of replay's own KL, along a direction; close to the base model the others are not."""
    generator, errors = torch.Generator().manual_seed(0), {}
    base, update, x, direction = (torch.randn(n, 4, generator=generator).double() for n in (4, 4, 2, 4))
    weight = (0.01 * update).requires_grad_()
    sigmas, active = flow.linear_sigmas(4, 3.0).double(), (0, 1, 2, 3)

    def policy(x, i):
        return torch.tanh(x @ (0.8 * base + weight))

    def kl(mode):
        trajectory = reward_flow.rollout(policy, x, sigmas, active)
        return reward_flow.replay(
            policy, trajectory, sigmas, active, torch.zeros_like(x), 1.0,
            reference=lambda x, i: torch.tanh(0.8 * x @ base), kl_weight=1.0, kl_gradient=mode,
        ).kl.sum()  # fmt: skip

    for mode in ("exact", "fixed_trajectory", "reference_constant"):
        weight.grad = None
        kl(mode)
        slope, values, eps = float((weight.grad * direction).sum()), [], 1e-6
        for offset in (eps, -2 * eps, eps):
            weight.data += offset * direction
            values.append(float(kl(mode)))
        errors[mode] = abs(slope * 2 * eps / (values[0] - values[1]) - 1)
    assert errors["exact"] < 1e-6
    assert errors["fixed_trajectory"] > 1e-3 and errors["reference_constant"] > 1e-3


def test_the_references_graph_is_freed_before_the_policys():
    """As many tensors are saved for the backward pass at a time as where the reference has no graph."""
    most = {}
    for mode in ("exact", "reference_constant"):
        pipe, model = lora_model(torch.float32)
        cond, x = conditioning(1, torch.float32, pipe)
        alive, counts = weakref.WeakSet(), []

        class Saved:
            def __init__(self, tensor, alive=alive, counts=counts):
                self.tensor = tensor
                alive.add(self)
                counts.append(len(alive))

        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            replay_gradients(pipe, model, cond, x, [3, 4, 5], 1.0, 0.7, mode)
        most[mode] = max(counts)
    assert most["exact"] == most["reference_constant"] > 100


def endpoint_step(rewards, share=1.0):
    """Return a rollout by the policy, which then changes, and grad_x0 of `rewards` (B,) times a smooth reward."""
    pipe, model = lora_model(torch.float64)
    cond, x = conditioning(3, torch.float64, pipe)
    velocity, sigmas = velocity_of(pipe, model, cond), SCHEDULE.sigmas.double()
    trajectory = reward_flow.rollout(velocity, x, sigmas, [5])
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data *= 1.3
    x0 = trajectory.x0.clone().requires_grad_()
    score = (rewards.view(3, 1) * torch.tanh(x0).flatten(1)).sum()
    (grad_x0,) = torch.autograd.grad(-share * score, x0)
    return model, velocity, trajectory, sigmas, grad_x0


def published_endpoint_loss(velocity, trajectory, sigma, gradient, share, advantage, length, b):
    """DiffusionOPSD's two branches, term by term (arXiv 2608.24646), with one ascent step."""
    y0, v_old = trajectory.x0, trajectory.velocities[5]
    per_sample = (-1, *[1] * (y0.ndim - 1))
    step = length * y0.flatten(1).norm(dim=1).view(per_sample) * gradient
    step = step / gradient.flatten(1).norm(dim=1).view(per_sample)
    v, z = velocity(trajectory.latents[5], 5), trajectory.latents[5]
    loss = 0
    for sign, weight in ((1, advantage / 10 + 0.5), (-1, 0.5 - advantage / 10)):
        y = z - sigma * ((1 - sign * b) * v_old + sign * b * v)
        gap = y - (y0 + sign * step)
        size = gap.detach().abs().flatten(1).mean(1)
        loss = loss + (weight * gap.square().flatten(1).mean(1) / size).sum()
    return 5 * share * loss


@pytest.mark.parametrize("b,length", [(1.0, 0.1), (0.1, 0.02)])
def test_endpoint_is_the_published_two_branch_form(b, length):
    share = 0.25
    rewards = torch.tensor([1.0, 0.01, 30.0], dtype=torch.float64)
    model, velocity, trajectory, sigmas, grad_x0 = endpoint_step(rewards, share)
    replayed = reward_flow.replay_endpoint(velocity, trajectory, sigmas, grad_x0, length / b, b * share)
    actual = gradients(model)
    model.zero_grad()
    advantage = torch.tensor([2.0, -4.0, 0.5], dtype=torch.float64)
    published_endpoint_loss(velocity, trajectory, sigmas[5], -grad_x0, share, advantage, length, b).backward()
    assert_same(actual, gradients(model), 1e-9)
    assert replayed.kl.tolist() == [0, 0, 0] and replayed.cotangents.shape == (3, 1)


def test_endpoint_learns_nothing_from_a_sample_without_gradient():
    rewards = torch.tensor([1.0, 0.0, 1e-9], dtype=torch.float64)  # no face; a rounding
    model, velocity, trajectory, sigmas, grad_x0 = endpoint_step(rewards)
    replayed = reward_flow.replay_endpoint(velocity, trajectory, sigmas, grad_x0, 0.1, 1.0)
    sizes = replayed.cotangents.flatten()
    assert sizes[0] > 0 and sizes[1:].tolist() == [0, 0]
    grad_x0[1, 0, 0, 0, 0] = torch.nan  # NaN is seen, so that the update is skipped
    reward_flow.replay_endpoint(velocity, trajectory, sigmas, grad_x0, 0.1, 1.0)
    assert any(grad.isnan().any() for grad in gradients(model).values())


@pytest.mark.parametrize("active,coupling,kl_weight,kl_gradient,kl_steps", CASES[4:6])
@pytest.mark.slow(3)
def test_kept_graphs_give_the_same_gradients(active, coupling, kl_weight, kl_gradient, kl_steps, monkeypatch):
    """Graphs of all active steps or the last, on the host or not: the same bits by one forward pass less for each."""
    results, passes, call = [], [], Velocity.__call__
    monkeypatch.setattr(Velocity, "__call__", lambda *words: (passes[-1].append(words[2]), call(*words))[1])
    for graphs_of, keep_on_host in (((), False), (active, True), (active, False), (active[-1:], True)):
        pipe, model = lora_model(torch.float32)
        on_host = InputsOnHost(torch.device("cpu"))
        for expert in model.inside.values():
            expert.enable_gradient_checkpointing(*([on_host] if keep_on_host else []))
        cond, x = conditioning(2, torch.float32, pipe)
        passes.append([])
        with_graph = on_host.whole_graph if keep_on_host else contextlib.nullcontext
        settings = active, coupling, kl_weight, kl_gradient, kl_steps
        results.append(replay_gradients(pipe, model, cond, x, *settings, reward_flow.KeptGraphs(graphs_of, with_graph)))
        (expected, x0, kl), (actual, x0_kept, kl_kept) = results[0], results[-1]
        assert torch.equal(x0, x0_kept) and torch.equal(kl, kl_kept) and expected.keys() == actual.keys()
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
        assert len(passes[0]) - len(passes[-1]) == len(graphs_of)


def test_a_kept_graph_takes_little_device_memory():
    """Only text, time and positions, which all blocks share. Without the host it is more than 20 times as much."""
    pipe, model = lora_model(torch.float32)
    cond, _ = conditioning(1, torch.float32, pipe)
    cond, x = cond | {"image": torch.zeros(1, 18, 2, 64, 64)}, torch.randn(1, 16, 2, 64, 64)
    velocity, sizes = velocity_of(pipe, model, cond), []
    for on_host in (None, InputsOnHost(torch.device("cpu"))):
        if on_host is not None:
            model.inside.low_noise.enable_gradient_checkpointing(on_host)
        with Living([*model.parameters(), x, *cond.values()]) as living:
            with_graph = contextlib.nullcontext if on_host is None else on_host.whole_graph
            trajectory = reward_flow.rollout(
                velocity, x, SCHEDULE.sigmas, [5], 5, reward_flow.KeptGraphs([5], with_graph)
            )
            sizes.append(living.now - nbytes([trajectory.x0, trajectory.graphs[5]]))  # the host's memory is not counted
        del trajectory
    assert sizes[0] > 20 * sizes[1] > 0, sizes


def test_a_batch_is_its_samples():
    pipe, model = lora_model(torch.float64)
    cond, x = conditioning(2, torch.float64, pipe)
    both = replay_gradients(pipe, model, cond, x, [3, 4, 5], 1.0, 0.7, "exact")[0]
    pipe, model = lora_model(torch.float64)
    for i in range(2):  # gradients accumulate
        row = protocol.select_rows(cond, [i])
        single = replay_gradients(pipe, model, row, x[i : i + 1], [3, 4, 5], 1.0, 0.7, "exact")[0]
    assert_same(single, both, 1e-10)


@pytest.mark.parametrize("coupling", [1.0, 0.2, 0.0])
def test_each_replayed_step_passes_its_cotangent_on(coupling):
    """For v = a_i x an active step multiplies the gradient by 1 + coupling h_i a_i; a step between leaves it."""
    rates = torch.tensor([0.5, -2.0, 3.0, 1.5], requires_grad=True)
    sigmas, generator = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0]), torch.Generator().manual_seed(0)
    x, grad = (torch.randn(3, 2, 5, generator=generator) for _ in range(2))
    trajectory = reward_flow.rollout(lambda x, i: rates[i] * x, x, sigmas, [0, 1, 3])
    replayed = reward_flow.replay(lambda x, i: rates[i] * x, trajectory, sigmas, [0, 1, 3], grad, coupling)
    last = grad.flatten(1).norm(dim=1)
    second = last * abs(1 + coupling * (0.0 - 0.2) * 1.5)
    first = second * abs(1 + coupling * (0.5 - 0.8) * -2.0)
    torch.testing.assert_close(replayed.cotangents, torch.stack([first, second, last], 1))
    assert not replayed.cotangents.requires_grad and replayed.kl.tolist() == [0, 0, 0]


def test_zero_cotangent_still_calls_every_micro_batch():
    """An invalid sample: every rank takes the same collective calls, and only the KL moves the weights."""
    pipe, model = lora_model(torch.float32)
    cond, x = conditioning(1, torch.float32, pipe)
    velocity, sigmas = velocity_of(pipe, model, cond), SCHEDULE.sigmas
    trajectory = reward_flow.rollout(velocity, x, sigmas, [3, 4, 5])
    calls = []
    reward_flow.replay(
        velocity, trajectory, sigmas, [3, 4, 5], torch.zeros_like(x), 1.0,
        backward=lambda loss: (calls.append(float(loss.detach())), loss.backward()),
    )  # fmt: skip
    assert calls == [0.0, 0.0, 0.0]
    assert all(float(g.abs().max()) == 0 for g in gradients(model).values())
