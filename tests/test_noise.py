"""Seeds and draws of noise."""

import torch

from rewardfl.noise import draw_noise, noise_seed, training_noise_seed


def test_seeds_depend_on_each_of_their_parts():
    cells = [(seed, epoch, name, member) for seed in (0, 1) for epoch in (0, 1) for name in "ab" for member in (0, 1)]
    assert len({noise_seed(*cell) for cell in cells}) == 16
    assert noise_seed(42, 1, "clip#1", 2) == 8305654411088914815  # the same in every process and version


def test_a_sample_takes_its_noises_in_turn():
    def seeds(noises):
        return [training_noise_seed(42, epoch, "a", noises) for epoch in range(6)]

    assert seeds("fresh") == [noise_seed(42, epoch, "a") for epoch in range(6)]
    assert seeds(2) == 3 * [noise_seed(42, 0, "a", 0), noise_seed(42, 0, "a", 1)]
    assert training_noise_seed(42, -1, "a", 2) == noise_seed(42, -1, "a")  # sample videos


def test_noise_depends_only_on_its_seed():
    first = draw_noise((16, 3, 4, 4), 11)
    torch.manual_seed(1)
    assert torch.equal(draw_noise((16, 3, 4, 4), 11), first) and not torch.equal(draw_noise((16, 3, 4, 4), 12), first)
    assert abs(first.mean()) < 0.1 and abs(first.std() - 1) < 0.1
