"""A small Wan2.2-I2V-A14B-shaped pipeline, written in the layouts in which the real one is published.

Names of the original files are spelled out here from Wan-AI's modules; which diffusers name each becomes is asked of
diffusers' own converters, not of the code under test.
"""

import copy
import json
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers, convert_wan_vae_to_diffusers
from safetensors.torch import save_file
from transformers import UMT5Config, UMT5EncoderModel

from tiny_world.video import new_tokenizer

LAYERS = 2
T5_LAYERS = 2
RANK = 4  # the rank of the Lightning-like LoRA
REPOSITORY = "Wan-AI/Wan2.2-I2V-A14B"


def small_expert(in_channels: int = 36, layers: int = LAYERS, heads: int = 2, ffn: int = 32) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=12, in_channels=in_channels,
        out_channels=16, text_dim=32, freq_dim=256, ffn_dim=ffn, num_layers=layers, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip


def small_pipeline() -> WanImageToVideoPipeline:
    """Structure as the real one (four levels of VAE, 8x8x4 compression), no parameter at its default, float32.

    The text encoder's weights are bfloat16 numbers, as in models_t5_umt5-xxl-enc-bf16.pth.
    """
    torch.manual_seed(0)
    tokenizer = new_tokenizer()
    text = UMT5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=40, num_layers=T5_LAYERS, num_heads=4,
        feed_forward_proj="gated-gelu", relative_attention_num_buckets=8, relative_attention_max_distance=32,
    )  # fmt: skip
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
        temperal_downsample=[False, True, True],
    )  # fmt: skip
    pipe = WanImageToVideoPipeline(
        tokenizer=tokenizer, text_encoder=UMT5EncoderModel(text), vae=vae, transformer=small_expert(),
        transformer_2=small_expert(), boundary_ratio=0.9, image_processor=None, image_encoder=None,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    )  # fmt: skip
    for module in (pipe.text_encoder, pipe.vae, pipe.transformer, pipe.transformer_2):
        for parameter in module.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        module.eval().requires_grad_(requires_grad=False)
    for parameter in pipe.text_encoder.parameters():
        parameter.data = parameter.data.bfloat16().float()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def rounded(expert: WanTransformer3DModel) -> WanTransformer3DModel:
    """The expert in bfloat16 but for diffusers' float32 islands, as the real repository stores it."""
    expert = copy.deepcopy(expert)
    for name, parameter in expert.named_parameters():
        if not set(name.split(".")) & set(expert._keep_in_fp32_modules):
            parameter.data = parameter.data.bfloat16()
    return expert


def write_diffusers(pipe: WanImageToVideoPipeline, folder: Path, stored: torch.dtype) -> Path:
    """Wan-AI/Wan2.2-I2V-A14B-Diffusers: experts and text encoder in shards with an index."""
    pipe.save_pretrained(folder)
    sharded = {part: (pipe.components[part], "60KB") for part in ("transformer", "transformer_2")}
    if stored == torch.bfloat16:
        sharded = {part: (rounded(expert), size) for part, (expert, size) in sharded.items()}
    sharded["text_encoder"] = copy.deepcopy(pipe.text_encoder).bfloat16(), "20KB"
    for part, (model, size) in sharded.items():
        shutil.rmtree(folder / part)
        model.save_pretrained(folder / part, max_shard_size=size)
    return folder


def write_configs(pipe: WanImageToVideoPipeline, folder: Path) -> Path:
    """The diffusers layout without any weights, with the keys of rewardfl/backbones/wan/published."""
    folder.mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"boundary_ratio": 0.9, "expand_timesteps": False}))
    for part in ("transformer", "transformer_2", "vae", "scheduler"):
        pipe.components[part].save_config(folder / part)
    pipe.text_encoder.config.save_pretrained(folder / "text_encoder")
    return folder


def with_leaves(modules: list[str], leaves: tuple[str, ...]) -> list[str]:
    return [f"{module}.{leaf}" for module in modules for leaf in leaves]


def original_expert_names(layers: int = LAYERS) -> list[str]:
    both = ("weight", "bias")
    top = ["patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2"]
    names = [*with_leaves([*top, "time_projection.1", "head.head"], both), "head.modulation"]
    for block in (f"blocks.{i}" for i in range(layers)):
        names += [f"{block}.modulation", *with_leaves([f"{block}.norm3", f"{block}.ffn.0", f"{block}.ffn.2"], both)]
        for attention in (f"{block}.self_attn", f"{block}.cross_attn"):
            names += with_leaves([f"{attention}.{part}" for part in "qkvo"], both)
            names += [f"{attention}.norm_q.weight", f"{attention}.norm_k.weight"]
    return names


def original_vae_names() -> list[str]:
    """Of Wan2.1_VAE.pth: four levels, two residual blocks each (three in the decoder), attention in the middle."""
    both = ("weight", "bias")

    def residual(stem: str, *, shortcut: bool = False) -> list[str]:
        convolutions = with_leaves([f"{stem}.residual.2", f"{stem}.residual.6"], both)
        extra = with_leaves([f"{stem}.shortcut"], both) if shortcut else []
        return [f"{stem}.residual.0.gamma", f"{stem}.residual.3.gamma", *convolutions, *extra]

    names = with_leaves(["conv1", "conv2"], both)
    for side in ("encoder", "decoder"):
        middle = f"{side}.middle"
        names += with_leaves([f"{side}.conv1", f"{side}.head.2", f"{middle}.1.to_qkv", f"{middle}.1.proj"], both)
        names += [f"{side}.head.0.gamma", f"{middle}.1.norm.gamma", *residual(f"{middle}.0"), *residual(f"{middle}.2")]
    # index in the flat list: what is there. Channels: 1 1 2 4 4 down, 4 4 4 2 1 up, halved by each upsampler
    down = {0: "r", 1: "r", 2: "s", 3: "rs", 4: "r", 5: "t", 6: "rs", 7: "r", 8: "t", 9: "r", 10: "r"}
    up = dict.fromkeys(range(15), "r") | {3: "t", 4: "rs", 7: "t", 11: "s"}
    for stem, layers in (("encoder.downsamples", down), ("decoder.upsamples", up)):
        for index, layer in layers.items():
            place = f"{stem}.{index}"
            if layer.startswith("r"):
                names += residual(place, shortcut=layer == "rs")
            else:  # resampling in space, or in space and time
                resampling = [f"{place}.resample.1"] + ([f"{place}.time_conv"] if layer == "t" else [])
                names += with_leaves(resampling, both)
    return names


def original_state(model, names: list[str], converter) -> dict[str, torch.Tensor]:
    """The model's tensors by original name; the converter says which diffusers name each of `names` becomes."""
    state = model.state_dict()
    converted = converter({name: name for name in names})
    assert converted.keys() == state.keys(), sorted(converted.keys() ^ state.keys())[:4]
    return {original: state[name].clone() for name, original in converted.items()}


def original_expert(model: WanTransformer3DModel) -> dict[str, torch.Tensor]:
    names = original_expert_names(model.config.num_layers)
    return original_state(model, names, convert_wan_transformer_to_diffusers)


def original_vae(model: AutoencoderKLWan) -> dict[str, torch.Tensor]:
    return original_state(model, original_vae_names(), convert_wan_vae_to_diffusers)


def original_residual_vae(model: AutoencoderKLWan) -> dict[str, torch.Tensor]:
    """Of Wan2.2_VAE.pth: a level is a list of blocks and then what resamples; the rest is as in Wan2.1_VAE.pth."""
    rest = [name for name in original_vae_names() if "samples" not in name]
    converted = convert_wan_vae_to_diffusers({name: name for name in rest})
    inner = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
    inner |= {"conv_shortcut": "shortcut"}
    blocks = model.config.num_res_blocks
    state = {}
    for name, value in model.state_dict().items():
        if name in converted:
            state[converted[name]] = value.clone()
            continue
        side, blocks_name, level, *path = name.split(".")
        way = {"down_blocks": "downsamples", "up_blocks": "upsamples"}[blocks_name]
        if path[0] == "resnets":
            block, module, *leaf = path[1:]
            end = [block, inner[module], *leaf]
        else:
            end = [str(blocks if side == "encoder" else blocks + 1), *path[1:]]
        state[".".join([side, way, level, way, *end])] = value.clone()
    return state


def original_image_encoder(model) -> dict[str, torch.Tensor]:
    """Of models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth: Wan-AI's VisionTransformer, and what it is not."""
    embeddings = model.embeddings
    width = model.config.hidden_size
    state = {
        "log_scale": torch.zeros(()),
        "visual.head": torch.zeros(width, 8),
        "visual.cls_embedding": embeddings.class_embedding[None, None],
        "visual.pos_embedding": embeddings.position_embedding.weight[None],
        "visual.patch_embedding.weight": embeddings.patch_embedding.weight,
    }
    modules = {"visual.pre_norm": model.pre_layrnorm, "visual.post_norm": model.post_layernorm}
    for i, layer in enumerate(model.encoder.layers):
        inner, place = layer.self_attn, f"visual.transformer.{i}"
        modules |= {
            f"{place}.norm1": layer.layer_norm1, f"{place}.norm2": layer.layer_norm2,
            f"{place}.attn.proj": inner.out_proj, f"{place}.mlp.0": layer.mlp.fc1, f"{place}.mlp.2": layer.mlp.fc2,
        }  # fmt: skip
        for leaf in ("weight", "bias"):
            parts = [getattr(layer, leaf) for layer in (inner.q_proj, inner.k_proj, inner.v_proj)]
            state[f"{place}.attn.to_qkv.{leaf}"] = torch.cat(parts)
    state |= {f"{name}.{leaf}": getattr(part, leaf) for name, part in modules.items() for leaf in ("weight", "bias")}
    return {name: value.detach().clone() for name, value in state.items()}


def original_text_encoder(model: UMT5EncoderModel) -> dict[str, torch.Tensor]:
    """Wan-AI's T5Encoder: token_embedding, blocks.N.{norm1, attn.qkvo, pos_embedding, norm2, ffn}, norm."""
    state = {"token_embedding.weight": model.shared.weight, "norm.weight": model.encoder.final_layer_norm.weight}
    inside = {
        "norm1": "layer.0.layer_norm", "norm2": "layer.1.layer_norm", "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
        "ffn.fc1": "layer.1.DenseReluDense.wi_1", "ffn.fc2": "layer.1.DenseReluDense.wo",
        "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    }  # fmt: skip
    inside |= {f"attn.{letter}": f"layer.0.SelfAttention.{letter}" for letter in "qkvo"}
    for i, block in enumerate(model.encoder.block):
        state |= {f"blocks.{i}.{old}.weight": block.get_submodule(new).weight for old, new in inside.items()}
    return {name: value.data.bfloat16() for name, value in state.items()}


def write_shards(state: dict[str, torch.Tensor], folder: Path, count: int = 3) -> Path:
    """diffusion_pytorch_model-0000x-of-0000y.safetensors and their index, as in high_noise_model/."""
    folder.mkdir(parents=True)
    names = sorted(state)
    size = -(-len(names) // count)
    weight_map = {}
    for i in range(count):
        file = f"diffusion_pytorch_model-{i + 1:05d}-of-{count:05d}.safetensors"
        group = names[i * size : (i + 1) * size]
        save_file({name: state[name] for name in group}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(group, file)
    total = sum(value.nbytes for value in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_original(pipe: WanImageToVideoPipeline, folder: Path) -> Path:
    """Wan-AI/Wan2.2-I2V-A14B: experts in float32 shards, .pth pickles, the tokenizer under google/umt5-xxl."""
    for part, name in (("transformer", "high_noise_model"), ("transformer_2", "low_noise_model")):
        write_shards(original_expert(pipe.components[part]), folder / name)
        (folder / name / "config.json").write_text(json.dumps({"_class_name": "WanModel", "model_type": "i2v"}))
    torch.save(original_text_encoder(pipe.text_encoder), folder / "models_t5_umt5-xxl-enc-bf16.pth")
    torch.save(original_vae(pipe.vae), folder / "Wan2.1_VAE.pth")
    pipe.tokenizer.save_pretrained(folder / "google" / "umt5-xxl")
    return folder


def paths(folder: Path, configs: Path, changed: dict[str, object] | None = None) -> dict[str, object]:
    """The content of a wan22_paths.json for `write_original`'s folder."""
    return {
        "high_noise_model": str(folder / "high_noise_model"),
        "low_noise_model": str(folder / "low_noise_model"),
        "text_encoder": str(folder / "models_t5_umt5-xxl-enc-bf16.pth"),
        "vae": str(folder / "Wan2.1_VAE.pth"),
        "tokenizer": str(folder / "google" / "umt5-xxl"),
        "configs": str(configs),
    } | (changed or {})


def lightning(expert: WanTransformer3DModel, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """{diffusers name: (down, up, alpha)} for every linear layer of the blocks; alpha differs between layers."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, module in expert.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("blocks."):
            up = torch.randn(module.out_features, RANK, generator=generator) / RANK
            down = torch.randn(RANK, module.in_features, generator=generator) / module.in_features**0.5
            values[name] = down.bfloat16().float(), up.bfloat16().float(), 8.0 if "attn1" in name else 3.0
    return values


def write_lightning(values: dict, path: Path) -> Path:
    """Wan2.2-Lightning's file: diffusion_model.blocks.0.self_attn.q.lora_down.weight, .lora_up.weight, .alpha."""
    names = original_expert_names()
    original = {new: old for new, old in convert_wan_transformer_to_diffusers({n: n for n in names}).items()}
    state = {}
    for name, (down, up, alpha) in values.items():
        stem = "diffusion_model." + original[f"{name}.weight"].removesuffix(".weight")
        state |= {f"{stem}.lora_down.weight": down.bfloat16(), f"{stem}.lora_up.weight": up.bfloat16()}
        state[f"{stem}.alpha"] = torch.tensor(alpha)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path)
    return path
