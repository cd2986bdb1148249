"""VideoAlign's and HPSv3's files in the layouts that are published, shrunk, with random weights that matter."""

import hashlib
import json

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import nn
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

SIGNS = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
WIDTH, RANK, ALPHA = 32, 4, 6
PIXELS = 16 * 28 * 28  # pixels of a frame, a sixteenth of what is published
VIDEO_QUESTION = (
    "\nLook! It is: <|VQ_reward|>\nIt moves: <|MQ_reward|>\nIt should be: {text_prompt}\nIt is that: <|TA_reward|>\n"
)
FRAME_QUESTION = ("\nIs this {text_prompt}?\n", "\nIt is: <|Reward|>\n")
NORM = {"VQ_mean": 0.3, "VQ_std": 2.0, "MQ_mean": -0.2, "MQ_std": 0.5, "TA_mean": 0.1, "TA_std": 1.5}


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def write_qwen(folder):
    """config.json, flat as Qwen/Qwen2-VL-2B-Instruct has it, and a tokenizer of bytes and two merges."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
    tokenizer = Qwen2Tokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[("t", "h"), ("th", "e")])
    tokenizer.add_tokens([f"<|{name}|>" for name in SIGNS], special_tokens=True)
    tokenizer.save_pretrained(folder)
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "torch_dtype": "bfloat16",
        "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "hidden_act": "silu",
        "vocab_size": 320, "tie_word_embeddings": True, "rope_theta": 1000000.0, "use_sliding_window": False,
        "sliding_window": 32768, "max_window_layers": 2, "bos_token_id": 0, "eos_token_id": 1,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")},
        "vision_config": {
            "depth": 2, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2, "in_chans": 3, "hidden_size": WIDTH,
            "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def scorer(qwen, score_tokens, make_head, seed=0):
    """transformers' model with a head, as the authors' class has it, and its tokenizer with these tokens."""
    torch.manual_seed(seed)
    tokenizer = Qwen2Tokenizer.from_pretrained(qwen)
    tokenizer.add_special_tokens({"additional_special_tokens": list(score_tokens)})
    config = Qwen2VLConfig.from_pretrained(qwen)
    config.dtype = config.text_config.dtype = config.vision_config.dtype = torch.float32
    model = Qwen2VLForConditionalGeneration(config)
    model.resize_token_embeddings(len(tokenizer))
    model.rm_head = make_head()
    for parameter in model.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    return model.eval(), tokenizer


def write_video_align(folder, qwen, score_tokens, outputs=3, *, old_names=True, lora=True):
    """KwaiVGI/VideoReward: model_config.json and the state dict of a PEFT model. The model and its tokenizer."""
    model, tokenizer = scorer(qwen, score_tokens, lambda: nn.Linear(WIDTH, outputs, bias=False))
    if lora:
        linear = [
            name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "language_model" in name
        ]
        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=linear, lora_dropout=0.1))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = 0.2 * torch.randn_like(parameter)
    state = {before_4_52(name) if old_names else name: value.clone() for name, value in model.state_dict().items()}
    for step, content in ((900, {}), (11352, state)):  # the highest step counts, not the last name
        (folder / f"checkpoint-{step}").mkdir(parents=True, exist_ok=True)
        torch.save(content, folder / f"checkpoint-{step}" / "model.pth")
    config = {
        "data_config": {
            "fps": 2.0, "num_frames": None, "max_frame_pixels": PIXELS, "eval_dim": ["VQ", "MQ", "TA"],
            "prompt_template_type": "detailed_special", "sample_type": "uniform",
        },
        "model_config": {"output_dim": outputs, "use_special_tokens": True, "reward_token": "special"},
        "peft_lora_config": {"lora_enable": lora, "lora_r": RANK, "lora_alpha": ALPHA, "use_rslora": False},
        "inference_config": NORM,
    }  # fmt: skip
    (folder / "model_config.json").write_text(json.dumps(config))
    return model.eval(), tokenizer


def ranknet():
    return nn.Sequential(
        nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )


def write_hpsv3(path, qwen, score_tokens):
    """HPSv3.safetensors. The model and its tokenizer."""
    model, tokenizer = scorer(qwen, score_tokens, ranknet)
    save_file({before_4_52(name): value.clone() for name, value in model.state_dict().items()}, path)
    return model, tokenizer


def before_4_52(name):
    """As transformers named the halves of a Qwen2-VL when the scorers were trained (4.45.2)."""
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def write_questions(folder):
    """The authors' Python files with texts of our own, which say so loudly when they are run."""
    first, second = FRAME_QUESTION
    video, frame = folder / "prompt_template.py", folder / "data_collator_qwen.py"
    video.write_text(f"import nowhere\nDETAILED_PROMPT_WITH_SPECIAL_TOKEN = {VIDEO_QUESTION!r}\nraise SystemExit\n")
    frame.write_text(
        f"import nowhere\nINSTRUCTION = {first!r}\nprompt_with_special_token = {second!r}\nraise SystemExit\n"
    )
    return video, frame
