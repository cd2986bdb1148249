"""Text-to-image pipelines with random weights, small enough to differentiate in float64."""

import tempfile
from pathlib import Path

import clip_files
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
)

from tiny_world.video import new_tokenizer

SIDE = 32


def clip_tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = CLIPTokenizer.from_pretrained(clip_files.write_tokenizer(Path(folder)))
    tokenizer.model_max_length = 77
    return tokenizer


def clip_text(width, model_class=CLIPTextModelWithProjection):
    words = len(clip_files.vocabulary())
    config = CLIPTextConfig(
        vocab_size=words, hidden_size=width, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=width, bos_token_id=words - 2, eos_token_id=words - 1, pad_token_id=words - 1,
    )  # fmt: skip
    return model_class(config)


def t5(tokenizer, width):
    config = T5Config(
        vocab_size=len(tokenizer), d_model=width, d_kv=16, d_ff=64, num_layers=1, num_heads=2, dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return T5EncoderModel(config)


def talker():
    words = new_tokenizer()
    words.chat_template = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }}{% endfor %}"
    return words


def qwen3(tokenizer, width, model_class, layers):
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=512,
    )  # fmt: skip
    return model_class(config)


def image_vae(channels=4):
    """Four pixels on a side of one latent."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 16), latent_channels=channels, norm_num_groups=4, scaling_factor=1.3,
        shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


def perturbed(module, by=0.12):
    for parameter in module.parameters():
        parameter.data += by * torch.randn_like(parameter)
    return module.eval().requires_grad_(requires_grad=False)


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def random_flux() -> FluxPipeline:
    """Like FLUX.1-dev: it is told a guidance, and the shift of its sigmas depends on the image's size."""
    torch.manual_seed(0)
    letters, words = clip_tokenizer(), new_tokenizer()
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=40, pooled_projection_dim=16, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    pipe = FluxPipeline(
        transformer=perturbed(transformer), vae=perturbed(image_vae()),
        text_encoder=perturbed(clip_text(16, CLIPTextModel)),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True), tokenizer=letters,
        text_encoder_2=perturbed(t5(words, 40)), tokenizer_2=words,
    )  # fmt: skip
    return quiet(pipe)


def random_flux2_klein(*, distilled=False) -> Flux2KleinPipeline:
    """Three of the text encoder's layers are told to the network, the 27th among them."""
    torch.manual_seed(0)
    words, width = talker(), 16
    transformer = Flux2Transformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=3 * width, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False,
    )  # fmt: skip
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 16), latent_channels=4, norm_num_groups=4,
    )  # fmt: skip
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2)
    pipe = Flux2KleinPipeline(
        transformer=perturbed(transformer), vae=perturbed(vae), tokenizer=words,
        text_encoder=perturbed(qwen3(words, width, Qwen3ForCausalLM, 28)), is_distilled=distilled,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    )  # fmt: skip
    return quiet(pipe)


def random_qwen_image() -> QwenImagePipeline:
    torch.manual_seed(0)
    words, width = new_tokenizer(), 32
    transformer = QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=width, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    vae = AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 1, 2], num_res_blocks=1, temperal_downsample=[False, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.1, 0.9, 1.3, 1.0],
    )  # fmt: skip
    sizes = {"hidden_size": width, "intermediate_size": 48, "num_attention_heads": 2}
    text = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=sizes
            | {
                "num_hidden_layers": 1, "num_key_value_heads": 1, "vocab_size": len(words),
                "max_position_embeddings": 512, "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]},
            },
            vision_config={
                "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": width,
            },
        )
    )  # fmt: skip
    pipe = QwenImagePipeline(
        transformer=perturbed(transformer), vae=perturbed(vae), text_encoder=perturbed(text), tokenizer=words,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02),
    )  # fmt: skip
    return quiet(pipe)


def random_sd3() -> StableDiffusion3Pipeline:
    torch.manual_seed(0)
    letters, words = clip_tokenizer(), new_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=40, caption_projection_dim=32, pooled_projection_dim=32, pos_embed_max_size=12,
        dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    pipe = StableDiffusion3Pipeline(
        transformer=perturbed(transformer), scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=perturbed(image_vae()), text_encoder=perturbed(clip_text(16)), text_encoder_2=perturbed(clip_text(16)),
        text_encoder_3=perturbed(t5(words, 40)), tokenizer=letters, tokenizer_2=letters, tokenizer_3=words,
    )  # fmt: skip
    return quiet(pipe)


def random_z_image() -> ZImagePipeline:
    torch.manual_seed(0)
    words, width = talker(), 16
    transformer = ZImageTransformer2DModel(
        in_channels=4, dim=32, n_layers=2, n_refiner_layers=2, n_heads=2, n_kv_heads=2, cap_feat_dim=width,
        axes_dims=[4, 6, 6], axes_lens=[640, 12, 12],
    )  # fmt: skip
    pipe = ZImagePipeline(
        transformer=perturbed(transformer, 0.05), vae=perturbed(image_vae()), tokenizer=words,
        text_encoder=perturbed(qwen3(words, width, Qwen3Model, 3)),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )  # fmt: skip
    return quiet(pipe)
