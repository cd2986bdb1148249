"""The colour of written words, on drawings of every ink and ground."""

from itertools import product

import pytest
import torch

from rewardfl.rewards.pixels.ink import GROUNDS, INKS, WordInk
from tiny_words.drawing import Word, draw_word

REWARD = WordInk()


@pytest.mark.parametrize("ground", GROUNDS)
def test_letters_are_of_the_ink_that_they_were_drawn_with(ground):
    generator = torch.Generator().manual_seed(0)
    for drawn, named in product(INKS, INKS):
        picture = draw_word(Word("BGR", drawn, ground), generator)
        noisy = (picture + 0.05 * torch.randn(picture.shape, generator=generator)).clamp(-1, 1)
        reference = REWARD.reference(picture, Word("XYZ", named, ground).prompt)
        output = REWARD(torch.stack([picture, noisy])[:, :, None], [reference] * 2)
        assert output.valid.all()
        assert output.score.min() > 0.95 if drawn == named else output.score.max() < 0.05


def test_half_of_the_letters_in_another_ink_are_half():
    red, blue = (draw_word(Word("HHHHHH", ink, "white"), torch.Generator().manual_seed(3)) for ink in ("red", "blue"))
    mixed = torch.cat([red[:, :, :48], blue[:, :, 48:]], 2)
    reference = REWARD.reference(mixed, 'the word "HHHHHH" in red on white')
    assert REWARD(mixed[None, :, None], [reference]).score.item() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("prompt", ['the word "ABC" in gold on white', "in red on white, a word"])
def test_a_prompt_without_colours_is_refused(prompt):
    with pytest.raises(ValueError, match="reward word_ink: the prompt names no ink"):
        REWARD.reference(torch.zeros(3, 0, 8, 8), prompt)
