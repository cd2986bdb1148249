"""train_forward_rl.py as a user runs it, on the embedded tiny world."""

import itertools
import shutil

import pytest
import runs
import torch
from runs import FORWARD_FAST, HELD_OUT, PAIRS, SWAPPED, assert_same_run, call_forward, launch_forward, metrics

import train_forward_rl
from rewardfl import forward_rl
from rewardfl.optim import OldPolicy
from rewardfl.training import checkpoint
from rewardfl.training.distributed import Distributed
from rewardfl.training.run import Run

pytestmark = pytest.mark.slow(150)

# two updates share an epoch, which is gone through twice; the old policy and both anchors take part
EPOCHS = [
    "forward.updates_per_epoch=2", "forward.inner_epochs=2", "run.save_steps=4", "train.warmup_steps=0",
    "forward.objective=nft", "forward.mix=0.5", "forward.old_policy.decay=0.5", "forward.old_policy.rate=0.1",
    "forward.base_anchor=0.01", "forward.old_policy.anchor=0.01", "anchor.weight=0.1", "anchor.measured_clips=2",
    "train.max_steps=8", HELD_OUT, "evaluation.eval_steps=4", "evaluation.eval_inference_steps=2",
]  # fmt: skip
BEST = [*(word for word in EPOCHS if "old_" not in word and "mix" not in word), "forward.objective=best"]
SHORT = ["train.max_steps=1", "run.sample_videos=0"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of two epochs of four updates each that nothing interrupts."""
    run = tmp_path_factory.mktemp("straight") / "run"
    launch_forward(f"run.output_dir={run}", *EPOCHS)
    return run


def test_a_run_logs_the_distances_between_the_policies(straight):
    lines = metrics(straight)
    assert [line["step"] for line in lines] == list(range(9))
    assert ["eval/score" in line for line in lines] == [True, *[False] * 3, True, *[False] * 3, True]
    first, second = lines[1], lines[2]
    assert first["policy/from_old"] == first["policy/from_base"] == 0  # the policy has not moved yet
    assert 0 < second["policy/from_old"] == pytest.approx(second["policy/from_base"])  # the old one is the base still
    assert all(line["policy/deviation"] > 0 and line["grad_norm"] > 0 for line in lines[1:])
    # the old policy took 0.6 of the way after four updates
    assert 0 < lines[5]["policy/from_old"] < lines[5]["policy/from_base"]
    assert all(line["policy/misfit_positive"] > 0 and line["policy/misfit_negative"] > 0 for line in lines[1:])


@pytest.mark.parametrize("objective", ["nft", "best", "dpo", "pairs"])
def test_a_resumed_run_is_the_same_to_the_bit(straight, tmp_path, objective):
    settings, copies = EPOCHS, ["old_policy"]
    if objective != "nft":
        start = straight / "checkpoints" / "step-000004"  # whose adapter is dpo's reference
        dpo = ["forward.objective=dpo", f"lora.init_from={start}"]
        settings = [*BEST, *{"best": [], "dpo": dpo, "pairs": [*PAIRS, dpo[1]]}[objective]]
        copies = ["old_policy", *["start_policy"] * (objective != "best")]
        launch_forward(f"run.output_dir={(straight := tmp_path / 'straight')}", *settings)
    if objective in ("dpo", "pairs"):
        first, *later = lines = metrics(straight)[1:]
        assert first["policy/chosen_change"] == first["policy/rejected_change"] == 0 < first["policy/from_base"]
        assert all(line["policy/chosen_change"] != 0 for line in later) and "eval/score" in lines[-1]
        assert any(key.startswith("reward/") for line in lines for key in line) == (objective == "dpo")
    run = shutil.copytree(straight, tmp_path / "run", symlinks=True)
    shutil.rmtree(run / "checkpoints" / "step-000008")
    (run / "checkpoints" / "latest").unlink()
    launch_forward(f"run.output_dir={run}", *settings)
    assert_same_run(run, straight, 8)
    states = [checkpoint.load_state(path / "checkpoints" / "step-000008") for path in (run, straight)]
    for name in copies:
        assert all(map(torch.equal, states[0][name], states[1][name])) and len(states[0][name]) == len(states[1][name])


def test_blocks_in_host_memory_change_nothing(straight, tmp_path):
    launch_forward(f"run.output_dir={tmp_path}", *EPOCHS, *SWAPPED)
    assert_same_run(tmp_path, straight, 8)


@pytest.mark.parametrize(
    "objective, anchor", [("rvm", "old"), ("nft", "old"), ("awm", "old"), ("best", "base"), ("dpo", "base")]
)
def test_every_objective_learns_and_begins_on_policy(objective, anchor, tmp_path):
    launch_forward(f"run.output_dir={tmp_path}", *SHORT, f"forward.objective={objective}", f"forward.{anchor}_anchor=1")
    (line,) = metrics(tmp_path)
    assert line[f"policy/from_{anchor}"] == 0  # to the bit: the old policy, like the base, is the policy
    assert line.get("policy/ratio") == (1 if objective == "awm" else None) and sum("/from_" in key for key in line) == 1
    assert line["grad_norm"] > 0 and line["policy/deviation"] > 0


def test_a_video_is_rolled_out_by_the_old_policy(monkeypatch, tmp_path):
    """With an old policy that never moves, the second epoch's videos do not depend on what the first has learned."""
    rewards = []
    for number, rate in enumerate(("1e-3", "1e-6")):
        monkeypatch.setattr(OldPolicy, "follow", lambda self, update: None)
        run = tmp_path / str(number)
        launch_forward(f"run.output_dir={run}", *SHORT, "train.max_steps=2", f"train.learning_rate={rate}")
        rewards.append(metrics(run)[-1]["reward/score"])
    assert rewards[0] == rewards[1]


def test_a_dead_contrast_ends_the_run(monkeypatch, capsys, tmp_path):
    """The optimizer's step reaches no weight that the forward pass uses."""
    monkeypatch.setattr(Distributed, "step", lambda self, optimizer, parameters, max_norm: 1.0)
    code, _, error = call_forward(monkeypatch, capsys, *FORWARD_FAST, *SHORT, f"run.output_dir={tmp_path}")
    assert code == 3 and "policy/deviation is exactly 0 after an update that had advantages" in error


@pytest.mark.parametrize("start, settings, words", [
    (call_forward, [*FORWARD_FAST, *PAIRS[:-1]], "takes columns chosen and rejected; fill them, or set a weight"),
    (call_forward, [*FORWARD_FAST, PAIRS[-1]], "chosen and rejected are for objective dpo with all reward.terms"),
    (call_forward, [*FORWARD_FAST, *PAIRS, f"evaluation.eval_clips={runs.CACHE}/pairs.csv"], "3 of 3 rows"),
    (runs.call, [*runs.FAST, PAIRS[-1]], "chosen and rejected are for objective dpo with all"),
], ids=["no pairs", "rewards", "evaluation", "another script"])  # fmt: skip
def test_pairs_are_for_dpo_without_a_reward(monkeypatch, capsys, tmp_path, start, settings, words):
    code, _, error = start(monkeypatch, capsys, *settings, f"run.output_dir={tmp_path}")
    assert code == 2 and words in error and "cannot be used" in error


def test_pairs_that_are_told_apart_leave_nothing_to_learn(monkeypatch, tmp_path):
    monkeypatch.setattr(forward_rl, "pair_logits", lambda change, *_: torch.full_like(change, 1000))
    launch_forward(f"run.output_dir={tmp_path}", *PAIRS, *SHORT)
    assert [metrics(tmp_path)[0][key] for key in ("actor/loss", "grad_norm", "train/no_signal")] == [0, 0, 1]


def regression(draws):
    """Return best's loss: mean((v - (noise - x0))^2)."""
    return sum((draw.velocity(draw.x) - draw.target).square().mean() / len(draws) for draw in draws)


def preference(draws, beta=100.0):
    """Return dpo's loss from its four errors at once, against the model without an adapter: pairs share their noise."""
    losses = []
    for pair in itertools.combinations(sorted(draws, key=lambda draw: -draw.advantage), 2):
        if torch.allclose(*(draw.target + draw.x0 for draw in pair), atol=1e-4):
            policy = [(draw.velocity(draw.x) - draw.target).square().mean() for draw in pair]
            base = [(draw.velocity.func.reference(draw.x, 0) - draw.target).square().mean() for draw in pair]
            logit = -beta / 2 * ((policy[0] - base[0]) - (policy[1] - base[1]))
            losses.append(-torch.log(torch.sigmoid(logit)))
    assert len(losses) == len(draws) // 2
    return sum(losses) / len(losses)


@pytest.mark.parametrize("settings, loss_of", [
    (["forward.objective=best"], regression), (["forward.objective=dpo", "forward.beta=100"], preference),
    (PAIRS, preference),
], ids=["best", "dpo", "pairs"])  # fmt: skip
def test_chosen_videos_train_by_the_published_loss(monkeypatch, tmp_path, settings, loss_of):
    """Loss and gradient equal autograd, and eight updates fit the first draws."""
    make, first, expected = train_forward_rl.make_draws, [], []

    def watched_make(*arguments, **settings):
        draws, old = make(*arguments, **settings)
        first.extend([] if first else draws)
        loss, again = loss_of(draws), loss_of(first)
        parameters = [p for p in draws[0].velocity.func.model.parameters() if p.requires_grad]
        norm = sum(gradient.square().sum() for gradient in torch.autograd.grad(loss, parameters)) ** 0.5
        expected.append([loss.item(), norm.item(), again.item()])
        return draws, old

    def check_pair(rollout, run, members):
        """Member 0 is the chosen clip. The rejected one is as bright in its first frame, and darkens."""
        x0 = run.conditions.clip_latents(run.samples[members[0].row])
        apart = (rollout.x0 - x0).square().mean((0, 1, 3, 4)).tolist()
        assert any(apart) == bool(members[0].member) and 10 * apart[0] <= apart[-1]

    runs.watch(monkeypatch, Run, "read_pair", check_pair)
    monkeypatch.setattr(train_forward_rl, "make_draws", watched_make)
    epoch = ["forward.inner_epochs=8", "train.max_steps=8", "run.sample_videos=0"]
    launch_forward(f"run.output_dir={tmp_path}", *settings, *epoch)
    for line, (loss, norm, _) in zip(metrics(tmp_path), expected, strict=True):
        assert [line["actor/loss"], line["grad_norm"]] == pytest.approx([loss, norm], rel=1e-4)
    assert expected[-1][2] < 0.95 * expected[0][2]
