import copy
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from rewardfl import config
from rewardfl.config import ConfigError

ROOT = Path(__file__).parents[2]
ENDPOINT = "sample.gradient_mode=endpoint"
REQUIRED = {
    "run": {"output_dir": "out"},
    "model": {"model_paths": "weights/wan"},
    "data": {"file_name": "clips/metadata.csv"},
    "reward": {"reward_model_path": "weights/antelopev2"},
}


def load(*overrides):
    return config.parse(REQUIRED, overrides)


def refused(*overrides, raw=REQUIRED, longest=300):
    """Return the lines of the ConfigError. raw: sections, or a file's path. Each line is printable and short."""
    with pytest.raises(ConfigError) as error:
        (config.load if isinstance(raw, Path) else config.parse)(raw, overrides)
    lines = str(error.value).split("\n")
    assert all(len(line) <= longest and line.isprintable() for line in lines), lines
    return lines


def test_file_values_then_overrides(tmp_path):
    path = tmp_path / "run.yaml"  # with a byte order mark
    path.write_text("\ufeff" + yaml.safe_dump(REQUIRED | {"train": {"learning_rate": "1e-5", "warmup_steps": 3}}))
    cfg = config.load(path, ["train.warmup_steps=7", "lora.lora_rank=4", "sample.active_steps=[2, 5]"])
    assert cfg.train.learning_rate == 1e-5 and isinstance(cfg.train.learning_rate, float)
    assert (cfg.train.warmup_steps, cfg.lora.lora_rank, cfg.sample.active_steps) == (7, 4, (2, 5))
    assert cfg.run.seed == 42 and cfg.run.resume_from_checkpoint == "auto" and cfg.model.min_timestep_boundary is None
    path.write_text(config.dump(cfg))
    assert config.load(path) == cfg
    (line,) = refused(raw=tmp_path / ("x" * 300), longest=600)
    assert "x" * 300 in line


@pytest.mark.parametrize("override, expected", [
    ("run.output_dir=out/lr=3", "out/lr=3"), ("train.max_steps=null", "1 epoch"),
    ("train.max_steps=2 epochs", "2 epochs"), ("train.learning_rate=1", 1.0),
    ("reward.cap=none", "none"), ("reward.cap=0.7", 0.7), ("sample.noises_per_sample=4", 4),
    ("run.resume_from_checkpoint=false", False), ("run.resume_from_checkpoint=a #b", "a #b"),
    ("lora.lora_alpha=16", 16.0), ("lora.init_from=null", None), ("lora.init_from=~", "~"),
    ("run.output_dir=2026", "2026"), ('run.output_dir="a b"', "a b"), ("run.output_dir=yes", "yes"),
    ("run.output_dir='OFF'", "OFF"), ("run.output_dir=2024-01-31", "2024-01-31"),
    ("run.output_dir=null", "null"), ('data.file_name="\\u6ca1"', "\u6ca1"), ('model.model_paths="half', '"half'),
    ("reward.terms.score.settings.url=http://x/ #1", "http://x/ #1"), ("reward.terms.score.settings.count=3", 3),
])  # fmt: skip
def test_values_of_overrides(override, expected):
    """Keys of texts take them as they are: YAML's words for other types, too."""
    others = ["reward.terms.score.name=remote"] if "settings" in override else []
    value = config.to_dict(load(*others, override))
    for part in override.partition("=")[0].split("."):
        value = value[part]
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    "override, value, may_be",
    [
        ("train.learning_rate=fast", "'fast'", "number"), ("train.learning_rate=true", "True", "number"),
        ("train.learning_rate=.nan", "nan", "finite"), ("train.max_grad_norm=inf", "'inf'", "finite"),
        ("train.warmup_steps=true", "True", "whole number"), ("train.warmup_steps=1.0", "1.0", "whole number"),
        ("train.warmup_steps=-1", "-1", "at least 0"), ("train.max_steps=all", "'all'", "3 epochs"),
        ("train.memory.use_gradient_checkpointing=1", "1", "true or false"),
        ("model.min_timestep_boundary=900", "900", "at most 1"), ("run.output_dir=", "''", "not empty"),
        ("reward.terms={a: {name: clip_score, std: 1e9}}", "'1e9'", "at most 1000000"),
        ("reward.cap=high", "'high'", "'self_similarity' or 'none'"), ("reward.cap=-1", "-1", "greater than 0"),
        ("reward.det_size=1", "1", "multiple of 32"),
        ("reward.terms.score.settings={a: [1]}", "[1]", "text or true or false or a whole number or a number or keys"),
        ("sample.noises_per_sample=frsh", "'frsh', did you mean 'fresh'?", "'fresh' or a whole number"),
        ("sample.active_steps=5", "5", "list"), ("sample.active_steps=[1, true]", "True", "whole number"),
        ("sample.active_steps=[]", "[]", "in increasing order"), ("reward.kl_steps=[5,4]", "[5, 4]", "increasing"),
        ("sample.gradient_mode=chian", "'chian', did you mean 'chain'?", "chain, "),
    ],
)  # fmt: skip
def test_wrong_values_name_the_key_and_the_value(override, value, may_be):
    (line,) = refused(override)
    assert line.startswith(override.split("=")[0]) and line.endswith(f", got {value}") and may_be in line


def test_settings_keep_their_types():
    given = {"a": 1, "b": 1.5, "c": "1e-5", "d": True, "e": None, "f": 1.0}
    text = yaml.safe_dump({"name": "motion", "settings": given}, default_flow_style=True)
    settings = load(f"reward.terms.score={text}").reward.terms["score"].settings
    assert [(key, type(value), value) for key, value in settings.items()] == [
        (key, type(value), value) for key, value in given.items()
    ]


@pytest.mark.parametrize(
    "override, message",
    [
        ("train.lerning_rate=1", "unknown key 'train.lerning_rate', did you mean 'learning_rate'?"),
        ("train.keep_attention=false", "train.keep_attention was removed: it saved 6 % of the FLOPs"),
        ("reward.views=0", "reward.views was removed: it traded identity for motion; delete the key"),
        ("train.lora_rank=1", "train.lora_rank -> lora.lora_rank: "),
        ("trian.learning_rate=1", "unknown section 'trian', did you mean 'train'?; sections are run, model, lora,"),
        ("model_paths=x", "model_paths -> model.model_paths: "),
        ("lora.lora_rank", "override 'lora.lora_rank' must have the form section.key=value"),
        ("lora=4", "override 'lora=4' must name a key: lora.<key>=value"),
        ("run.seed=" + "[" * 4000, "override 'run.seed=["),
        ("train.max_steps=[a", "override 'train.max_steps=[a' is not valid YAML: "),
        ("reward.terms.flow.wieght=0.5", "unknown key 'reward.terms.flow.wieght', did you mean 'weight'?"),
        ("run.output_dir.x=1", "override 'run.output_dir.x=1': run.output_dir holds "),
        ("train.weight_decay.x=1", "train.weight_decay must be a number, got {'x': 1}"),
        ("train.early_stop.patinece=1", "unknown key 'train.early_stop.patinece', did you mean 'patience'?"),
        ("train.early_stop=true", "section 'train.early_stop' must hold keys, got True"),
    ],
)
def test_wrong_keys_and_overrides(override, message):
    assert any(line.startswith(message) for line in refused(override))


def test_an_override_of_one_key_within_a_key():
    """It keeps the others, adds what is not there yet, and changes nothing that was read before."""
    raw = copy.deepcopy(REQUIRED)
    raw["reward"]["others"] = {"flow": {"name": "optical_flow", "weight": 0.3, "settings": {"reversals": 2.0}}}
    before = copy.deepcopy(raw)
    others = config.parse(
        raw,
        ["reward.terms.flow.weight=0.5", "reward.terms.flow.settings.reversals=1", "reward.terms.red.name=motion"],
    ).reward.others
    assert (others["flow"].weight, others["flow"].settings, others["red"].name) == (0.5, {"reversals": 1}, "motion")
    assert raw == before and others["flow"].name == "optical_flow"


def test_a_section_that_may_be_null():
    judged = ["reward.held_out_model_path=judge", "train.early_stop.patience=3"]
    assert load().train.early_stop is None and load(*judged, "train.early_stop=null").train.early_stop is None
    cfg = load(*judged)
    assert (cfg.train.early_stop.patience, cfg.train.early_stop.motion) == (3, 0.8)
    assert config.parse(yaml.safe_load(config.dump(cfg))) == cfg
    assert config.parse(json.loads(json.dumps(config.to_dict(cfg)))) == cfg


def test_all_problems_at_once():
    assert len(refused("train.learning_rate=fast", "lora.lora_rnak=4", "data.height=0")) == 3


def test_a_key_has_one_place():
    for sections in config.SECTIONS.values():
        names = [name for section in sections.values() for name in section.model_fields]
        names = [name for name in names if name not in ("draws", "sigmas")]  # of the anchor and of the forward process
        assert len(names) == len(set(names))


def test_an_override_fills_an_empty_section():
    assert config.parse(REQUIRED | {"lora": None}, ["lora.lora_rank=4"]).lora.lora_rank == 4
    (line,) = refused(raw=REQUIRED | {"lora": None})
    assert line == "section 'lora' must hold keys, got None; write them beneath it or remove the line"
    assert "override 'lora.lora_rank=4': lora holds 3, no keys" in refused(
        "lora.lora_rank=4", raw=REQUIRED | {"lora": 3}
    )


BOMB = "a: &a [x, x]\n" + "".join(f"{c}: &{c} [*{b}, *{b}]\n" for b, c in itertools.pairwise("abcdefghijklmnopqrstuv"))


@pytest.mark.parametrize(
    "text, message",
    [
        (BOMB, "line 2: a configuration takes no aliases"),
        ("run: !!python/name:os.system\n", "line 1: could not determine a constructor for the tag"),
        ("[" * 50_000, "at most 100000 characters and 500 brackets"),
        ("train: {<<: {learning_rate: 1}, learning_rate: 2}", "'learning_rate' is given twice"),
        ("run:\n  [a]: 1\n", "line 2: .* unhashable key"),
        ("run:\n  seed: \x9f\n", "character #x009f"),
        ("run: caf\udce9\n", "is not UTF-8 .*; save it as UTF-8"),
        ("run: {output_dir: out}\n", "data.file_name is required; write it in the file or pass data.file_name="),
        ("- run\n", r"must hold sections \(run, model, lora"),
        ("run: [a\n", "is not valid YAML"),
        ("run: {seed: 1}\nrun: {seed: 2}\n", "line 2: 'run' is given twice; remove one"),
        ("3: {a: 1}\n", "unknown section 3"),
    ],
    ids=lambda value: value[:30],
)
def test_files_that_are_no_configuration(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert any(re.search(message, line) for line in refused(raw=path))


@pytest.mark.parametrize("number", ["0x2a", "0b11", "1:30", "1:30.5", "9" * 400, "9" * 5000])
def test_numbers_are_decimal(number):
    """YAML 1.1 would read 042 as 34 and 1:30 as 90."""
    assert load("run.seed=042").run.seed == 42
    for override in (f"run.seed={number}", f"train.learning_rate={number}"):
        (line,) = refused(override)
        assert override.partition("=")[0] in line


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=" + "x" * 10_000, "train.learning_rate=[" + "1, " * 2_000 + "]", "train." + "x" * 10_000 + "=1",
        "x" * 10_000 + ".y=1", "x" * 10_000, "lora=" + "x" * 10_000, "lora.lora_base_model=" + "x" * 10_000,
        "model.trainable_models=" + "x" * 10_000, "reward.terms={" + "x" * 10_000 + ": 1}",
        "reward.terms={y: {name: y, weight: " + "x" * 10_000 + "}}", 'reward.terms={"\\e[31m": {name: y}}', '"\\e": 1',
        *(f'run.output_dir="{value}"' for value in ("\\0", "\\e[31m", "a\\nb", "\\u2028", "\\ud800")),
    ],
)  # fmt: skip
def test_long_values_are_cut_in_messages(override):
    for line in refused(override):
        assert line.count("x") <= 100


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=9223372036854775808", "run.cpu_threads=100000", "run.output_dir=" + "x" * 256,
        "run.output_dir=" + "x/" * 3000, "run.save_steps=10000000000", "lora.lora_alpha=1e9", "data.height=1000000",
        "data.max_pixels=255", "data.fps=1e-320", "data.fps=0", "sample.num_inference_steps=1001", "sample.shift=1e300",
        "reward.terms.score.std=4e9", "reward.terms.score.mean=1e30", "reward.terms.score.weight=1e-320",
        "reward.terms.score.settings={a: 1e300}", "train.learning_rate=1.5", "evaluation.eval_noises=0",
        "train.max_steps=100000000", "grpo.noise_level=1e-320", "grpo.group_size=1000000",
    ],
)  # fmt: skip
def test_numbers_that_would_fail_later(override):
    (line,) = refused(override, raw=REQUIRED | ({"grpo": {}} if override.startswith(("grpo", "eval")) else {}))
    assert line.startswith(override.split("=")[0])


KEPT = "train.memory.active_graphs=keep_on_host"
OFFLOADED = "train.memory.use_gradient_checkpointing_offload=true"
SPLIT = "train.context_parallel=2"
FP8, CACHED = "train.memory.untrained=fp8", "train.memory.untrained=boundary_cache"
UNSTORED = "train.memory.use_gradient_checkpointing=false"


@pytest.mark.parametrize(
    "overrides, message",
    [
        ("sample.mid_timestep=6 sample.final_timestep=5", "mid_timestep must be at most final_timestep 5, got 6"),
        ("sample.final_timestep=8", "final_timestep must be at most 7 for 8 sampling steps, got 8"),
        ("sample.active_steps=[6,8]", r"active_steps must lie in 0..7 \(the sampling steps\), got \[6, 8\]"),
        ("sample.active_steps=[6,7] sample.gradient_mode=last", "active_steps does nothing in gradient_mode last"),
        ("sample.endpoint_length=0.2", "endpoint_length does nothing without gradient_mode endpoint; set it, or"),
        (f"{ENDPOINT} reward.kl_weight=0", "endpoint makes its videos by averaged weights; set train.ema_decay"),
        (f"{ENDPOINT} train.ema_decay=0.5", "endpoint stays near the averaged weights and has no KL; set reward.kl"),
        (f"{ENDPOINT} {KEPT}", "endpoint has no graphs in its rollout; set train.memory.active"),
        (f"{ENDPOINT} sample.verdict.keep=2", "sample.verdict.keep does nothing without a train.ema_decay; set it, or"),
        ("sample.verdict={}", "sample.verdict does nothing without gradient_mode endpoint; set it, or remove verdict"),
        (f"{ENDPOINT} sample.endpoint_length=[0.1,0.2]", "takes one endpoint_length without sample.verdict; name one"),
        (f"{ENDPOINT} sample.endpoint_length=[0.2,0.1]", "endpoint_length must be .*lengths in increasing order"),
        (f"{ENDPOINT} sample.verdict.pareto.scor=0", "pareto.scor is not one of reward.terms .score., did you mean"),
        (f"{ENDPOINT} sample.verdict.caps.held_out=0.5", "caps.held_out is not one of reward.terms .score.; name one"),
        (
            f"{ENDPOINT} reward.terms.flow.name=optical_flow sample.verdict.caps.flow=1",
            "caps.flow does nothing for a t",
        ),
        ("sample.gradient_mode=bridge sample.coupling=1", "gradient_mode must be chain, bridge, bridge:WEIGHT .betw"),
        ("model.trainable_models=ditt2", "trainable_models must be dit or dit2 or both, got 'ditt2'"),
        ("model.trainable_models=dit,dit", "trainable_models must be dit or dit2 or both, got 'dit,dit'"),
        ("model.trainable_models=dit,dit2 train.memory.untrained=cpu_swap", "needs one expert that is not trained"),
        (KEPT, "keep_on_host needs train.memory.use_gradient_checkpointing_offload: true; set it"),
        (f"train.memory.active_graphs=keep_on_device {OFFLOADED}", "keep_on_device needs .*_offload: false; set it"),
        ("reward.kl_steps=[5,8]", r"must be some of the steps with a gradient \[4, 5, 6, 7\], got \[5, 8\]"),
        ("reward.kl_steps=[7] reward.kl_weight=0", "kl_steps needs a reward.kl_weight above 0; set it, or remove"),
        ("train.memory.kept_chunks=2 data.num_frames=1", "kept_chunks does nothing without videos"),
        ("train.memory.kept_steps=1", "kept_steps does nothing without active_graphs keep_on_host or keep_on_"),
        (f"train.memory.trained=cpu_swap {UNSTORED}", "cpu_swap needs train.memory.use_gradient_c"),
        (f"{FP8} model.distill_lora.low=x model.distill_lora.mode=adapter", "fp8 takes no distillation's adapter; set"),
        (f"{FP8} train.compile_blocks=true", "compile_blocks does not go with train.memory.untrained fp8"),
        (f"{SPLIT} data.max_pixels=9999", "context_parallel divides the tokens of one size; set data.height and width"),
        (f"{SPLIT} model.attention_backend=_flash_3", "context_parallel needs a model.attention_backend of native, _n"),
        (f"{SPLIT} {KEPT}", "context_parallel does not go with train.memory.active_graphs; set active_graphs: replay"),
        (f"{SPLIT} train.compile_blocks=true", "not go with train.compile_blocks; set compile_blocks: false"),
        ("sample.gradient_mode=last sample.mid_timestep=5", "mid_timestep does nothing without a sample.gradient_mode"),
        ("data.num_frames=1 data.fps=8", "data.fps does nothing without videos .a data.num_frames above 1.; set it"),
        (CACHED, "boundary_cache needs a number of noises per clip; set sample.noises_per_sample"),
        (f"{CACHED} model.trainable_models=dit sample.noises_per_sample=2", "needs the training of dit2"),
        ("train.early_stop={}", "train.early_stop needs a held-out judge; set reward.held_out_model_path"),
        ("train.early_stop={} train.max_steps=14", "needs 2 .* windows of 5 updates, train.max_steps 14 are"),
        (f"{UNSTORED} {OFFLOADED}", "offload does nothing without train.memory.use_gradient_checkpointing; set it"),
    ],
)
def test_combinations_that_cannot_work(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(*overrides.split())


def test_combinations_that_work():
    load("train.max_steps=2", "train.warmup_steps=10")
    both = load("model.trainable_models='dit2, dit'", "lora.lora_base_model='dit,dit2'")
    assert config.trained_positions(both) == (0, 1) and config.trained_positions(load()) == (1,)


@pytest.mark.parametrize("overrides, steps, coupling", [
    ("", (4, 5, 6, 7), 1.0), ("sample.gradient_mode=last sample.final_timestep=3", (3,), 1.0),
    (f"{ENDPOINT} train.ema_decay=0.5 reward.kl_weight=0 sample.final_timestep=2", (2,), 1.0),
    ("sample.active_steps=[0,6] sample.gradient_mode=bridge", (0, 6), 0.2),
    ("sample.mid_timestep=7 sample.gradient_mode=bridge:0.5", (7,), 0.5),
    ("sample.mid_timestep=6 sample.gradient_mode=bridge sample.coupling=0.4", (6, 7), 0.4),
    ("sample.mid_timestep=6 sample.gradient_mode=drtune sample.coupling=0", (6, 7), 0.0),
])  # fmt: skip
def test_active_steps(overrides, steps, coupling):
    cfg = load(*overrides.split())
    assert config.active_steps(cfg) == steps and cfg.sample.coupling == coupling


def test_the_room_imports_nothing_else_of_the_package():
    code = "import sys, rewardfl.config; print(*(name for name in sys.modules if name[:8] in ('rewardfl', 'torch')))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    room = {f"rewardfl.config{name}" for name in ("", ".aliases", ".load", ".resuming", ".schema")}
    assert set(shown.split()) == {"rewardfl", "rewardfl.machine", *room}


PLACES = {
    field: name
    for sections in config.SECTIONS.values()
    for name, section in sections.items()
    for field in section.model_fields
}


def test_every_field_is_read():
    files = [*ROOT.glob("train_*.py"), *ROOT.glob("rewardfl/**/*.py"), *ROOT.glob("tools/*.py")]
    code = Counter(re.findall(r"\w+", "\n".join(path.read_text() for path in files)))
    assert not [name for name in PLACES if code[name] < 2]


def test_every_field_is_explained():
    """A comment stands above each field, or above the fields it is grouped with."""
    lines = (ROOT / "rewardfl" / "config" / "schema.py").read_text().splitlines()
    for name in PLACES:
        at = next(i for i, line in enumerate(lines) if re.match(rf"    {name}: ", line))
        while re.match(r"    \w+: ", lines[at]):
            at -= 1
        assert lines[at].startswith("    # "), f"{PLACES[name]}.{name} has no comment"
