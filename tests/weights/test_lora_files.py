"""The reader of LoRA files: every tool's alpha and expert are read, and what cannot be read is refused by name."""

import shutil

import pytest
import torch
from lora_dialects import ALPHA, DIALECTS, RANK, peft_metadata
from merging_world import merge
from safetensors.torch import load_file, save_file

from rewardfl import backbones
from rewardfl.backbones.protocol import Source
from rewardfl.config.schema import LoraConfig
from rewardfl.merging import lora_merge
from rewardfl.training.lora_init import read_initial_adapters
from rewardfl.weights import lora_files
from rewardfl.weights.shards import InputError

pytest_plugins = "merging_world"
Q, KEY = "blocks.0.attn1.to_q", "diffusion_model.blocks.0.self_attn.q"


def refusal(path, *options):
    """Return the message with which the reader refuses a file. It names the file."""
    with pytest.raises(InputError) as error:
        lora_files.read_lora(path, *options)
    assert str(path) in str(error.value)
    return str(error.value)


def halves(down, up):
    """Return a LoRA's tensors with these shapes, for the layer Q in diffusers' names."""
    return {f"{Q}.lora_A.weight": torch.ones(down), f"{Q}.lora_B.weight": torch.ones(up)}


# {what: (changes of a LoRA with ComfyUI's names, None: without the key; part of the message)}
BROKEN = {
    "missing half": (lambda down, up: {f"{KEY}.lora_up.weight": None}, "no up"),
    "unknown layer": (lambda down, up: {f"{KEY[:-2]}.magic.lora_up.weight": torch.zeros(4, 4)}, "magic"),
    "unknown ending": (lambda down, up: {f"{KEY}.gate": torch.zeros(4)}, "gate"),
    "rank": (lambda down, up: {f"{KEY}.lora_up.weight": up[:, :3].contiguous()}, "ranks must agree"),
    "nan": (lambda down, up: {f"{KEY}.lora_up.weight": up * torch.nan}, "that are nan"),
    "infinity": (
        lambda down, up: {f"{KEY}.lora_down.weight": down.index_fill(0, torch.tensor(1), torch.inf)},
        f"{KEY}.lora_down.weight has values that are nan or infinite",
    ),
    "lokr": (lambda down, up: {f"{KEY}.lokr_w1": torch.zeros(4, 4)}, "lokr_w1"),
    "twice": (lambda down, up: {f"{Q}.lora_A.weight": down.clone()}, "two keys give the down"),
    "alpha below 0": (lambda down, up: {f"{KEY}.alpha": torch.tensor(-1.0)}, f"alpha of {Q} is -1"),
    "alpha 1e300": (lambda down, up: {f"{KEY}.alpha": torch.tensor(1e300).double()}, f"alpha of {Q}"),
    "alpha of three": (lambda down, up: {f"{KEY}.alpha": torch.ones(3)}, f".alpha of {Q} has shape (3,)"),
    "no rank": (lambda down, up: {f"{KEY}.lora_down.weight": torch.ones(4)}, "ranks must agree"),
    "quantised": (lambda down, up: {f"{KEY}.diff": up.to(torch.float8_e4m3fn)}, "give the LoRA unquantised"),
}  # fmt: skip


@pytest.mark.parametrize("what", [*BROKEN, "empty"])
def test_broken_loras_are_refused_by_name(values, tmp_path, what):
    state = load_file(path := DIALECTS["d5"](tmp_path, values))
    change, message = BROKEN.get(what, (lambda down, up: dict.fromkeys(state), "holds no tensors"))
    state |= change(state[f"{KEY}.lora_down.weight"], state[f"{KEY}.lora_up.weight"])
    save_file({name: value for name, value in state.items() if value is not None}, path)
    assert message in refusal(path)


@pytest.mark.parametrize(
    "magnitudes",
    [
        {"dora_scale": (24,)}, {"dora_scale": (1, 23)}, {"lora_magnitude_vector": (1, 24)},
    ],
)  # fmt: skip
def test_a_magnitude_must_say_its_axis(tmp_path, magnitudes):
    """A square layer takes 24 values along both axes."""
    state = halves((4, 24), (24, 4)) | {f"{Q}.{ending}": torch.ones(shape) for ending, shape in magnitudes.items()}
    save_file(state, tmp_path / "low.safetensors")
    text = refusal(tmp_path / "low.safetensors")
    assert Q in text and all(ending in text for ending in magnitudes)


def test_alphas_that_disagree_are_refused(values, tmp_path):
    path = DIALECTS["d5"](tmp_path, values)
    assert "alpha 2 by the .alpha keys, 3 by --alpha" in refusal(path, 3.0)
    save_file(load_file(path), path, peft_metadata(7.0))
    assert "alpha 2 by the .alpha keys, 7 by the configuration" in refusal(path)


def test_metadata_of_other_tensors_is_refused(values, tmp_path):
    path = DIALECTS["d10_metadata"](tmp_path, values)
    save_file(load_file(path), path, {"ss_network_alpha": "2", "ss_network_dim": "0"})
    assert "no numbers" in refusal(path)
    path = DIALECTS["d3"](tmp_path, values)
    (path / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 2, "peft_type": "LORA"}')
    with pytest.raises(InputError, match=f"has rank {RANK}, its configuration .3"):
        lora_files.read_lora(path)


def test_kohyas_alpha_is_of_its_rank(tmp_path, values):
    """Each layer has the scale of the metadata's rank, whatever its own."""
    path = DIALECTS["d10_metadata"](tmp_path, values)
    save_file(load_file(path), path, {"ss_network_alpha": "2", "ss_network_dim": "8"})
    (adapter,) = lora_files.read_lora(path)
    assert {update.scale for update in adapter.updates.values()} == {0.25}


@pytest.mark.parametrize("is_zip", (True, False))
def test_torch_files_of_both_formats_are_read(values, tmp_path, is_zip):
    """A file from before torch 1.6 cannot be mapped."""
    path = DIALECTS["d9"](tmp_path, values)
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=is_zip)
    (adapter,) = lora_files.read_lora(path)
    assert torch.equal(adapter.updates[Q].down, values[Q][0])


@pytest.mark.parametrize(
    "content",
    [
        b"", b"PK\x03\x04", b"\x80\x02}q\x00.", b"garbage", b"\x80\x02cos\nsystem\n.", [torch.ones(1)], {"a": 5},
        {5: torch.ones(1)}, {"proj_out.diff": torch.ones(4, 24).to(torch.float8_e4m3fn)},
    ],
)  # fmt: skip
def test_other_torch_files_are_refused(tmp_path, content):
    if isinstance(content, bytes):
        (tmp_path / "low.pt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "low.pt")
    refusal(tmp_path / "low.pt")


@pytest.mark.parametrize("name", ("face.sft", "0123456789abcdef", "face.safetensors.bin"))
def test_a_lora_is_read_by_its_content(values, tmp_path, name):
    path = shutil.copy(DIALECTS["d5"](tmp_path, values), tmp_path / name)
    (adapter,) = lora_files.read_lora(path)
    assert adapter.updates.keys() == values.keys()
    path.write_bytes(path.read_bytes()[:-4])
    assert "cut off, damaged or not a safetensors file" in refusal(path)


@pytest.mark.parametrize(
    "name, meaning",
    [
        ("wan2.2_i2v_A14b_low_noise_lora.safetensors", "low_noise"), ("HighNoise.safetensors", "high_noise"),
        ("low_noise_model/x.safetensors", "low_noise"), ("low_rank/face.safetensors", None),
        ("transformer_2/pytorch_lora_weights.safetensors", "low_noise"), ("high_quality_face.safetensors", None),
        ("high_noise_and_low_noise.safetensors", None), ("lownoises.safetensors", None),
    ],
)  # fmt: skip
def test_published_names_and_users_name_an_expert(values, tmp_path, name, meaning):
    (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(DIALECTS["d5"](tmp_path, values), path)
    (adapter,) = lora_files.read_lora(path)
    assert adapter.expert == meaning
    for word in ("high", "low"):
        (adapter,) = lora_merge.read_loras(f"{path}@{word}:0.5", None).loras
        assert adapter.expert == f"{word}_noise"


def test_a_run_and_a_missing_file_are_explained(tmp_path):
    (tmp_path / "run" / "checkpoints" / "latest").mkdir(parents=True)
    for name, message in (("run", "checkpoints/latest"), ("absent.safetensors", "no LoRA")):
        assert message in refusal(tmp_path / name)


def test_a_merged_lora_is_not_added_again(pipeline, values, tmp_path):
    """As a distillation, a start of training, or an adapter of generate and evaluate."""
    path, part, merged = DIALECTS["d5"](tmp_path, values), tmp_path / "step" / "transformer_2", tmp_path / "merged"
    part.mkdir(parents=True)
    DIALECTS["d1"](part, values)
    settings = LoraConfig(init_from=str(path), lora_rank=RANK, lora_alpha=ALPHA)
    merge("--base", pipeline, "--lora", f"{path}@low", "--out", merged)
    backbone = backbones.open("wan2_2", Source(model_paths=str(merged)))
    for read in (
        lambda: backbones.open("wan2_2", Source(model_paths=str(merged), distilled=("", str(path)))),
        lambda: read_initial_adapters(settings, backbone, ["low_noise"], [*values]),
        lambda: backbone.attach_adapters({"low_noise": backbone.empty_expert("low_noise")}, part.parent),
    ):
        with pytest.raises(InputError, match=f"is merged into {merged}/transformer_2.* already"):
            read()
