"""The decoder and its vector-Jacobian product against diffusers and autograd."""

import contextlib

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm
from pipelines import FRAMES, random_pipeline, residual_vae

from rewardfl.backbones.wan import decoder as wan_decoder
from rewardfl.backbones.wan.decoder import WanDecoder
from rewardfl.estimate.measure import Living


def denormalised(vae, latents):
    mean = torch.tensor(vae.config.latents_mean, dtype=latents.dtype).view(1, -1, 1, 1, 1)
    inverse_std = 1.0 / torch.tensor(vae.config.latents_std, dtype=latents.dtype).view(1, -1, 1, 1, 1)
    return latents / inverse_std + mean


def sample(dtype, batch=2, scale=1.0):
    torch.manual_seed(1)
    vae = random_pipeline(dtype).vae
    return vae, scale * torch.randn(batch, 16, (FRAMES - 1) // 2 + 1, 8, 8, dtype=dtype)


def test_decode_equals_diffusers():
    vae, latents = sample(torch.float32)
    with torch.no_grad():
        expected = vae.decode(denormalised(vae, latents)).sample
    assert torch.equal(WanDecoder(vae).decode(latents), expected) and expected.shape == (2, 3, FRAMES, 32, 32)


def test_vjp_equals_autograd():
    vae, latents = sample(torch.float64, scale=3.0)
    leaf = latents.clone().requires_grad_()
    video = vae.decode(denormalised(vae, leaf)).sample
    saturated = (video.detach().abs() == 1).double().mean()
    assert 0.001 < saturated < 0.9  # the clamp's zero gradient is part of what is compared
    cotangent = torch.randn_like(video)
    (expected,) = torch.autograd.grad(video, leaf, cotangent)
    actual = WanDecoder(vae).vjp(latents, cotangent)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12 * float(expected.abs().max()))
    assert all(parameter.grad is None for parameter in vae.parameters())


def test_the_residual_decoder_equals_autograd():
    """For TI2V-5B: the first latent frame is the conditioning's, and has no gradient."""
    torch.manual_seed(1)
    vae = residual_vae().double()
    first, latents = (3 * torch.randn(2, 48, frames, 4, 4, dtype=torch.float64) for frames in (1, 2))
    leaf, decoder = latents.clone().requires_grad_(), WanDecoder(vae, frame_given=True)
    video = vae.decode(denormalised(vae, torch.cat([first, leaf], 2))).sample
    assert 0.001 < (video.detach().abs() == 1).double().mean() < 0.9
    cotangent = torch.randn_like(video)
    (expected,) = torch.autograd.grad(video, leaf, cotangent)
    given = {"image": first}
    for caches in ("keep", "segment"):
        decoded = decoder.decode_with_caches(latents, given, caches)
        # a chunk's first product has fewer columns than the clip's, which not every CPU computes in one order
        torch.testing.assert_close(decoded.video, video.detach(), rtol=0, atol=1e-13)
        actual = decoder.vjp(latents, cotangent, decoded, given)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))


def peak_of_vjp(latents):
    vae = random_pipeline().vae
    decoder = WanDecoder(vae)
    decoded = decoder.decode_with_caches(latents)
    cotangent = torch.ones_like(decoded.video)
    held = [cache for caches in decoded.caches.values() for cache in caches if isinstance(cache, torch.Tensor)]
    with Living([*vae.parameters(), latents, cotangent, *held]) as living:
        decoder.vjp(latents, cotangent, decoded)
    return living.peak


def test_vjp_holds_one_chunk():
    """However long the clip."""
    assert peak_of_vjp(torch.randn(1, 16, 9, 8, 8)) < 1.1 * peak_of_vjp(torch.randn(1, 16, 3, 8, 8))


@pytest.mark.parametrize("make", [residual_vae, lambda: random_pipeline().vae], ids=["residual", "plain"])
def test_a_lean_graph_gives_the_same_bits(make, monkeypatch):
    torch.manual_seed(1)
    vae = make().to(torch.bfloat16)
    latents = torch.randn(1, vae.config.z_dim, 4, 4, 4)
    decoder = WanDecoder(vae)
    cotangent = torch.randn(decoder.decode(latents).shape)
    lean = decoder.vjp(latents, cotangent)
    assert not any("forward" in vars(module) for module in vae.decoder.modules())
    monkeypatch.setattr(wan_decoder, "lean_graph", lambda decoder: contextlib.nullcontext())
    assert torch.equal(lean, decoder.vjp(latents, cotangent))


@pytest.mark.parametrize("caches", ["keep", "offload", "segment"])
@pytest.mark.parametrize("first_given", [False, True])
def test_kept_chunks_are_decoded_once_and_give_the_same_bits(first_given, caches, monkeypatch):
    torch.manual_seed(1)
    vae = residual_vae() if first_given else random_pipeline().vae
    decoder, given = WanDecoder(vae, first_given), {"image": torch.randn(1, vae.config.z_dim, 1, 4, 4)}
    latents = torch.randn(1, vae.config.z_dim, 6, 4, 4)
    expected = decoder.decode_with_caches(latents, given)
    cotangent = torch.randn(expected.video.shape)
    gradient = decoder.vjp(latents, cotangent, expected, given)
    counts, chunks, run = [], [], wan_decoder.run_chunk

    def counted(*arguments, **settings):
        chunks.append(1)
        return run(*arguments, **settings)

    monkeypatch.setattr(wan_decoder, "run_chunk", counted)
    for count in (0, 1, 4, 9):
        decoded = decoder.decode_with_caches(latents, given, caches, count)
        assert torch.equal(decoded.video, expected.video) and not decoded.video.requires_grad
        first_chunks = range(max(6 - count, 0) + first_given)
        assert list(decoded.caches) == list(first_chunks[:: 3 if caches == "segment" else 1])
        chunks.clear()
        assert torch.equal(decoder.vjp(latents, cotangent, decoded, given), gradient)
        counts.append(len(chunks))
        assert counts[-1] <= counts[0] - min(count, 6)


def test_norms_in_strips_give_the_same_gradient(monkeypatch):
    torch.manual_seed(1)
    vae, latents = random_pipeline().vae, torch.randn(1, 16, 3, 5, 4)
    decoder = WanDecoder(vae)
    cotangent = torch.randn(decoder.decode(latents).shape)
    whole = decoder.vjp(latents, cotangent)
    normed, forward = [], WanRMS_norm.forward
    monkeypatch.setattr(WanRMS_norm, "forward", lambda norm, x: (normed.append(x), forward(norm, x))[1])
    monkeypatch.setattr(wan_decoder, "STRIP", 700)
    strips = decoder.vjp(latents, cotangent)
    recomputed = [x for x in normed if x.requires_grad]
    assert recomputed and all(x.numel() <= 700 or x.shape[-2] == 1 for x in recomputed)
    assert (strips - whole).abs().max() < 1e-6 * whole.abs().max()


def test_a_lean_graph_takes_half_the_memory(monkeypatch):
    latents = torch.randn(1, 16, 3, 24, 24)
    lean = peak_of_vjp(latents)
    monkeypatch.setattr(wan_decoder, "lean_graph", lambda decoder: contextlib.nullcontext())
    assert lean < 0.5 * peak_of_vjp(latents)


def test_the_layout_for_a_gpu_gives_the_same_gradient():
    torch.manual_seed(1)
    vae = residual_vae()
    latents = torch.randn(1, vae.config.z_dim, 5, 4, 4)
    cotangent = torch.randn(WanDecoder(vae).decode(latents).shape)
    expected = WanDecoder(vae).vjp(latents, cotangent)
    decoder = WanDecoder(wan_decoder.lay_out_for_cudnn(vae))
    decoded = decoder.decode_with_caches(latents, caches="offload")
    assert vae.decoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert (decoder.vjp(latents, cotangent, decoded) - expected).abs().max() < 1e-5 * expected.abs().max()
