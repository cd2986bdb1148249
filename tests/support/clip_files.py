"""CLIP checkpoints in the layouts of the published files, shrunk, with random weights that matter."""

import json
import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import CLIPConfig, CLIPModel

LETTERS = "abcdefghijklmnopqrstuvwxyz,."
MERGES = ["t h", "th e</w>", "a n", "an d</w>"]
CONTEXT = 24
SIZE, PATCH = 42, 14


def vocabulary():
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), *merged, "<|startoftext|>", "<|endoftext|>"]


def write_tokenizer(folder):
    """CLIP's vocab.json and merges.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary())}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))
    return folder


def write_clip(folder, projection=24, activation="quick_gelu", eos_token_id=None, seed=3):
    """A transformers CLIP folder with its tokenizer; None: the right eos_token_id."""
    torch.manual_seed(seed)
    tower = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "hidden_act": activation,
    }  # fmt: skip
    words = len(vocabulary())
    end = words - 1 if eos_token_id is None else eos_token_id
    config = CLIPConfig(
        projection_dim=projection,
        vision_config=tower | {"image_size": SIZE, "patch_size": PATCH},
        text_config=tower
        | {
            "vocab_size": words, "max_position_embeddings": CONTEXT, "bos_token_id": words - 2, "eos_token_id": end,
            "pad_token_id": words - 1,
        },
    )  # fmt: skip
    model = CLIPModel(config).eval()
    for name, parameter in model.named_parameters():
        if name != "logit_scale":
            parameter.data += 0.15 * torch.randn_like(parameter)
    model.logit_scale.data.fill_(math.log(100))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_head(path, seed=0):
    """The aesthetic predictor's .pth."""
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Linear(768, 1024), nn.Dropout(0.2), nn.Linear(1024, 128), nn.Dropout(0.2), nn.Linear(128, 64),
        nn.Dropout(0.1), nn.Linear(64, 16), nn.Linear(16, 1),
    )  # fmt: skip
    for parameter in layers.parameters():
        parameter.data *= 3
    torch.save({f"layers.{name}": value for name, value in layers.state_dict().items()}, path)
    return layers.eval()


# ---- open_clip ----

WIDTH, TEXT_WIDTH, EMBEDDING, LAYERS, HEADS = 64, 48, 20, 2, 16
BLOCKS = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_act": "gelu"}
VISION = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "image_size": SIZE, "patch_size": PATCH}
TEXT = {"hidden_size": TEXT_WIDTH, "intermediate_size": 4 * TEXT_WIDTH, "max_position_embeddings": CONTEXT}
OPEN_CLIP = {
    "projection_dim": EMBEDDING,
    "vision_config": BLOCKS | VISION,
    "text_config": BLOCKS | TEXT | {"vocab_size": len(vocabulary())},
}


def write_open_clip(path, seed=0):
    """A state dict of open_clip's ViT-H-14, shrunk, as HPS_v2.1_compressed.pt holds it."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, scale=1.0):
        return scale * torch.randn(shape, generator=generator)

    def norm(name, width):
        return {f"{name}.weight": 1 + random(width, scale=0.2), f"{name}.bias": random(width, scale=0.2)}

    def linear(name, before, after):
        return {f"{name}.weight": random(after, before, scale=before**-0.5), f"{name}.bias": random(after, scale=0.2)}

    def transformer(prefix, width):
        state = {}
        for i in range(LAYERS):
            block = f"{prefix}resblocks.{i}"
            state |= norm(f"{block}.ln_1", width) | norm(f"{block}.ln_2", width)
            state[f"{block}.attn.in_proj_weight"] = random(3 * width, width, scale=2 * width**-0.5)
            state[f"{block}.attn.in_proj_bias"] = random(3 * width, scale=0.2)
            state |= linear(f"{block}.attn.out_proj", width, width)
            state |= linear(f"{block}.mlp.c_fc", width, 4 * width) | linear(f"{block}.mlp.c_proj", 4 * width, width)
        return state

    words = len(vocabulary())
    state = {
        "positional_embedding": random(CONTEXT, TEXT_WIDTH, scale=0.3),
        "text_projection": random(TEXT_WIDTH, EMBEDDING),
        "logit_scale": torch.tensor(math.log(100)),
        "visual.class_embedding": random(WIDTH),
        "visual.positional_embedding": random((SIZE // PATCH) ** 2 + 1, WIDTH, scale=0.3),
        "visual.proj": random(WIDTH, EMBEDDING),
        "visual.conv1.weight": random(WIDTH, 3, PATCH, PATCH, scale=0.1),
        "token_embedding.weight": random(words, TEXT_WIDTH),
    }
    state |= norm("visual.ln_pre", WIDTH) | norm("visual.ln_post", WIDTH) | norm("ln_final", TEXT_WIDTH)
    state |= transformer("visual.transformer.", WIDTH) | transformer("transformer.", TEXT_WIDTH)
    torch.save({"epoch": 1, "name": "hps", "state_dict": state}, path)
    return state


def open_clip_image(state, pixels):
    """(N, D) unit embeddings of normalised (N, 3, SIZE, SIZE) pixels, as in open_clip."""
    x = F.conv2d(pixels, state["visual.conv1.weight"], stride=PATCH).flatten(2).permute(0, 2, 1)
    first = state["visual.class_embedding"].expand(len(x), 1, -1)
    x = torch.cat([first, x], 1) + state["visual.positional_embedding"]
    x = _blocks(state, "visual.transformer.", _norm(state, "visual.ln_pre", x), None)
    return F.normalize(_norm(state, "visual.ln_post", x[:, 0]) @ state["visual.proj"], dim=-1)


def open_clip_text(state, tokens):
    """(N, D) unit embeddings of (N, CONTEXT) tokens, 0 after the end-of-text token, which is the highest."""
    x = state["token_embedding.weight"][tokens] + state["positional_embedding"]
    mask = torch.full((CONTEXT, CONTEXT), -math.inf).triu(1)
    x = _norm(state, "ln_final", _blocks(state, "transformer.", x, mask))
    return F.normalize(x[torch.arange(len(x)), tokens.argmax(-1)] @ state["text_projection"], dim=-1)


def _norm(state, name, x):
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])


def _blocks(state, prefix, x, mask):
    width = x.shape[-1]
    attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
    for i in range(LAYERS):
        block = f"{prefix}resblocks.{i}"
        attention.load_state_dict({name: state[f"{block}.attn.{name}"] for name in attention.state_dict()})
        y = _norm(state, f"{block}.ln_1", x)
        x = x + attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        y = F.linear(_norm(state, f"{block}.ln_2", x), *_linear(state, f"{block}.mlp.c_fc"))
        x = x + F.linear(F.gelu(y), *_linear(state, f"{block}.mlp.c_proj"))
    return x


def _linear(state, name):
    return state[f"{name}.weight"], state[f"{name}.bias"]
