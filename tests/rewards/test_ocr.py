"""The reward of rendered text: its score by hand, and both engines on text that is drawn here."""

import itertools
import math
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image, ImageDraw, ImageFont

from rewardfl import config, data, rewards
from rewardfl.evaluation.judge_videos import check_rows
from rewardfl.rewards import RewardError, ocr
from rewardfl.rewards.scoring import Term, score_safely
from rewardfl.training.setup_rewards import missing_references

NO_CLIP = torch.zeros(3, 0, 8, 8)
rapidocr = pytest.mark.skipif(not find_spec("rapidocr"), reason="rapidocr is missing: pip install 'rewardfl[ocr]'")
tesseract = pytest.mark.skipif(not shutil.which("tesseract"), reason="tesseract is missing: apt install tesseract-ocr")


@pytest.fixture(autouse=True)
def alphabet(monkeypatch):
    """The dictionary of the engine, which most machines lack."""
    monkeypatch.setattr(ocr, "_alphabet", lambda: frozenset())


QUOTED = [
    ('a sign that says "OPEN"', "open"), ('a board, "\t咖啡 店"', "咖啡店"), ('"ÉCOLE!" in chalk', "école!"),
    ("a 24” monitor, a 5'' phone, a 6'2\" man and a 6' board, 'HELLO'", "hello"),
    ('a 24 " and a 5" by ½" card: " HELLO "', "hello"), ('a poster "SALE 24""', "sale24"),
    (r"a sign \"OPEN\"", "open"), ('a sign ""OPEN""', "open"), ("``OPEN'' in neon", "open"),
    *((f"a sign {a}OPEN{b} at night", "open") for a, b in ("“”", "‘’", "„“", "»«", "‹›", "「」", "‚‘")),
    ("« OPEN » in neon", "open"), ("John's sign: 'DON'T WALK'.", "don'twalk"), ("‘it’s time’ in neon", "it'stime"),
    ("the dogs' bed, the '90s, rock 'n' roll and \"OPEN\"", "open"),
]  # fmt: skip
UNQUOTED = [
    ("no quotes, John's or the dogs'", "quotes no text; put the text to be read in quotation marks"),
    ('only "  " spaces', "quotes no text"), ('a 12" record', "quotes no text"),
    ('a quote that is "not closed', "has a quotation mark without"), ("'the dogs' toys'", "has a quotation mark"),
    ('an empty "" quote, "late"', "has a quotation mark"), ('"SALE 24" monitor"', "has a quotation mark without"),
    ('"Fresh  Bread" next to "Cold Beer"', "has 2 quoted texts"), ("'say \"OPEN\" now'", "has 2 quoted texts"),
]  # fmt: skip


@pytest.mark.parametrize("prompt, text", QUOTED)
def test_the_text_is_between_quotation_marks(prompt, text):
    assert (ocr.quoted_text(prompt), ocr.Ocr.prompt_problem(prompt)) == (text, "")
    assert ocr.plain_text(ocr.Ocr.prompt_target(prompt)) == text


@pytest.mark.parametrize("prompt, problem", UNQUOTED)
def test_a_prompt_without_exactly_one_quoted_text_is_refused(prompt, problem):
    message = ocr.Ocr.prompt_problem(prompt)
    assert ocr.quoted_text(prompt) == "" and message.startswith(f"the prompt {problem}")
    assert message.endswith(f", got {prompt!r}")


@pytest.mark.parametrize(
    "text, reading",
    [
        ("IT’S ‘TIME‘", "IT'S `TIME´"), ("“A” „B“ «C» ''D''", '"A" "B" "C" "D"'), ("1–2—3−4‐5", "1-2-3-4-5"),
        ("STRASSE", "straße"), ("STRAẞE", "strasse"), ("İstanbul Isparta", "istanbul ısparta"), ("ΟΔΟΣ", "οδος"),
        ("ﬁre ﬄ", "fire ffl"), ("ＯＰＥＮ！", "open!"), ("cafe\u0301", "CAFÉ"), ("x̣̂", "x̣̂"),
        ("soft\u00adly zero\u200bwidth\ufeff", "softly zerowidth"), ("a\u00a0b\u3000c\u202fd", "a b c d"),
        ("½ 10² …", "1/2 102 ..."), ("❤\ufe0f", "❤"), ("你好，世界！", "你好,世界!"), ("№ 5 µm", "No 5 μm"),
    ],
)  # fmt: skip
def test_equivalent_texts_are_equal(text, reading):
    assert ocr.plain_text(text) == ocr.plain_text(reading) == ocr.plain_text(ocr.plain_text(text))


def test_different_texts_stay_different():
    assert len({ocr.plain_text(text) for text in ("cafe", "café", "caff", "c-afe", "c'afe", 'c"afe')}) == 6


def test_letters_that_the_engine_lacks_are_refused(monkeypatch):
    monkeypatch.setattr(ocr, "_alphabet", lambda: frozenset(ocr.plain_text("AÉß'\"-1")))
    assert ocr.Ocr.prompt_problem('"A’É SS — e\u0301\u00ad 1"') == ""
    assert "the prompt quotes П И, which the engine's alphabet lacks" in ocr.Ocr.prompt_problem('"ПИП A"')


def box(left, top, right, bottom):
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


@pytest.mark.parametrize(
    "boxes",
    [
        [box(15, 239, 225, 294), box(256, 197, 502, 255)],  # FRESH COFFEE of cases/reports/09_ocr_pictures.py
        [box(0, 20, 90, 60), box(100, 0, 190, 40), box(0, 70, 90, 110), box(100, 60, 190, 100)],
        [box(0, 40, 90, 80), box(100, 20, 190, 60), box(200, 0, 290, 40)],  # a line that rises
        [box(0, 0, 40, 100), box(50, 0, 200, 45), box(50, 55, 200, 100)],  # an initial of two lines
        [box(0, 0, 200, 50), box(5, 30, 190, 80)],  # slanted lines one above the other
    ],
)
def test_boxes_are_read_line_by_line(boxes):
    for order in itertools.permutations(range(len(boxes))):
        shuffled = np.array([boxes[i] for i in order], dtype=np.float32)
        assert [order[i] for i in ocr.reading_order(shuffled)] == list(range(len(boxes)))


@pytest.mark.parametrize(
    "reading, text, score",
    [
        ("", "OPEN", 0.0), ("open", "OPEN", 1.0), ("O P\nEN", "OPEN", 1.0), ("OPXN", "OPEN", 0.75),
        ("OPN", "OPEN", 0.75), ("NOW OPEN TILL 9", "open", 1.0),  # a longer reading that contains it
        ("OOPPEENN", "OPEN", 0.0), ("nothing similar at all", "OPEN", 0.0),  # four edits and more
        ("Hapy Brthday!", "Happy Birthday", 1 - 3 / 13), ("咖啡", "咖啡店", 1 - 1 / 3),
    ],
)  # fmt: skip
def test_the_score_is_flow_grpos(reading, text, score):
    """1 - min(distance, n) / n of lower case without spaces, or 1, to the last digit."""
    assert ocr.text_score(ocr.plain_text(reading), ocr.plain_text(text)) == score


READINGS = {10: ["NOW", "Open"], 20: ["OPEN"], 30: ["OP", "XN"], 40: None, 50: ["", "OPEN"]}  # by the pixels' red


@pytest.fixture
def engine(monkeypatch):
    """The colours that an engine is called with, which reads READINGS and breaks at red 99."""
    calls = []

    def read(picture):
        calls.append(picture[0, 0].tolist())
        if picture[0, 0, 2] == 99:
            raise OSError("the engine broke")
        lines = READINGS[int(picture[0, 0, 2])]
        boxes = [box(20 * i, -i, 20 * i + 10, 9 - i) for i in range(len(lines or ()))]  # a line that rises
        scores = lines and [0.5 + 0.25 * (line == "OPEN") for line in lines]
        return SimpleNamespace(txts=lines and lines[::-1], scores=scores and scores[::-1], boxes=np.array(boxes[::-1]))

    monkeypatch.setattr(ocr, "_load_engine", lambda *, detect: read)
    return calls


def clip(*reds):
    """(1, 3, F, 4, 4), frames of one colour: these, 7, 200 of 255."""
    frames = torch.tensor([[red, 7, 200] for red in reds]) / 127.5 - 1
    return frames.T[None, :, :, None, None].expand(1, 3, len(reds), 4, 4)


def score(reward, video, prompt='a sign "OPEN"'):
    return reward(video, [reward.reference(NO_CLIP, prompt)] * len(video))


def test_score_and_parts_of_pictures(engine):
    output = score(rewards.build("ocr", {}), torch.cat([clip(10), clip(20), clip(30), clip(40), clip(50)]))
    assert output.valid.all() and output.score.tolist() == [1, 1, 0.75, 0, 1]
    assert output.parts["exact"].tolist() == [0, 1, 0, 0, 1]
    assert output.parts["read_characters"].tolist() == [7, 4, 4, 0, 4]
    confidence = output.parts["confidence"].tolist()
    assert confidence[:3] == [0.5, 0.75, 0.5] and math.isnan(confidence[3]) and confidence[4] == 0.75
    assert engine[0] == [200, 7, 10]  # blue comes first


def test_a_video_scores_the_mean_of_its_frames(engine):
    output = score(rewards.build("ocr", {"frames": 3}), clip(30, 99, 99, 40, 99, 99, 20))
    assert output.score.item() == pytest.approx((0.75 + 0 + 1) / 3)
    assert output.parts["exact"].item() == pytest.approx(1 / 3)
    assert output.parts["confidence"].item() == (0.5 + 0.75) / 2  # of those with a reading
    assert score(rewards.build("ocr", {"frames": 9}), clip(30, 20)).score.item() == (0.75 + 1) / 2


def test_samples_are_invalid_or_failed(engine):
    reward = rewards.build("ocr", {})
    video = torch.cat([clip(20), clip(99), clip(20), clip(20)])
    video[2, 0, 0, 0, 0] = math.nan
    reference = reward.reference(NO_CLIP, '"OPEN"')
    result = score_safely(reward, video, [reference, reference, reference, None])
    assert result.output.valid.tolist() == [True, False, False, False]
    assert result.failed.tolist() == [False, True, False, False]
    assert result.problems == ("OSError: the engine broke",)


@pytest.mark.parametrize("detect, options", [(True, "--psm 11"), (False, "--psm 7 -c tessedit_char_whitelist=abc")])
def test_tesseract_reads_a_large_png(engine, tmp_path, monkeypatch, detect, options):
    file = tmp_path / "tesseract"
    file.write_text('#!/bin/sh\necho "$@"\nhead -c 24 | tail -c 8 | od -An -tx1\n')
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    rewards.build("ocr", {"second": "tesseract"})
    text = ocr.read_by_tesseract(np.zeros((4, 4, 3), np.uint8), detect=detect)
    assert text.startswith(f"stdin stdout {options}")
    assert text.endswith("00 00 00 0c 00 00 00 0c\n")  # a PNG of three times four pixels a side


def test_missing_engines_and_texts_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(RewardError, match=r"reward ocr needs rapidocr .*; pip install 'rewardfl\[ocr\]'$"):
        ocr.Ocr()
    monkeypatch.setattr(ocr, "_load_engine", lambda *, detect: None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(RewardError, match="second: tesseract is not installed; apt-get install tesseract-ocr"):
        ocr.Ocr(second="tesseract")
    with pytest.raises(RewardError, match="the prompt quotes no text; .* got 'a sign'"):
        ocr.Ocr().reference(NO_CLIP, "a sign")


def test_tools_refuse_rows_without_text(engine):
    cfg = config.load(ROOT / "configs" / "tiny_forward.yaml")
    rows = data.load_metadata(ROOT / "assets" / "tiny_world" / "eval" / "metadata.csv", "--data")[:2]
    term = Term(key="reward.terms.text", label="text", reward=ocr.Ocr(), weight=0, mean=0, std=1)
    with pytest.raises(data.DataError, match=r"2 of 2 rows .*\nline 2: reward.terms.text: the prompt quotes no text"):
        check_rows(rows, cfg.data, [term], None, quiet=True)
    (problem,) = missing_references(rows[0], [term])
    assert problem.startswith("reward.terms.text: the prompt quotes no text; ")


FONTS = ["DejaVuSans.ttf", "DejaVuSerif-Bold.ttf", "DejaVuSansMono-Oblique.ttf", "STIXGeneralItalic.ttf"]
COLOURS = [("white", "navy"), ("black", "white"), ("firebrick", "wheat"), ("gold", "darkgreen")]
NOISES = [0, 12, 25]  # standard deviations, of 255


def draw(text, size, width, height, i):
    """(1, 3, 1, H, W) in [-1, 1], the text in the middle; i chooses font, colours and noise."""
    ink, ground = COLOURS[i % 4]
    file = Path(matplotlib.get_data_path(), "fonts", "ttf", FONTS[i // 4 % 4])
    picture = Image.new("RGB", (width, height), ground)
    middle = (width / 2, height / 2)
    ImageDraw.Draw(picture).text(middle, text, ink, ImageFont.truetype(str(file), size), anchor="mm", align="center")
    pixels = np.array(picture) + np.random.default_rng(i).normal(0, NOISES[i % 3], (height, width, 3))
    return torch.from_numpy(pixels.clip(0, 255) / 127.5 - 1).float().permute(2, 0, 1)[None, :, None]


def score_drawn(reward, texts, sizes, width, height):
    """The reward's output, of each text drawn in each size, with fonts, colours and noises in turn."""
    cases = [(text, size, i) for i, (text, size) in enumerate(itertools.product(texts, sizes))]
    video = torch.cat([draw(text, size, width, height, i) for text, size, i in cases])
    return reward(video, [reward.reference(NO_CLIP, f'a "{text}"') for text, _, _ in cases])


@rapidocr
@pytest.mark.long
def test_rapidocr_reads_what_is_drawn(monkeypatch):
    """With the network closed."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("the network was asked"))
    scene = ["OPEN", "Happy Birthday", "Route 66", "Fresh\nBread", "Left     Right", "Über-Café", "Sale 50%"]
    output = score_drawn(ocr.Ocr(), scene, (30, 54), 512, 256)
    assert output.score.mean() > 0.97 and output.parts["exact"].mean() > 0.9
    assert output.parts["exact"][6:10].all()  # two lines, and two columns, in reading order
    assert score_drawn(ocr.Ocr(), ["IT’S TIME", "10–20 °C", "straße"], (40,), 512, 256).score.tolist() == [1] * 3
    small = score_drawn(ocr.Ocr(detect=False), ["OPEN", "cat42", "Hello", "K9x"], (12, 16, 20), 96, 32)
    assert small.score.mean() > 0.97 and small.parts["exact"].mean() > 0.9
    reward = ocr.Ocr(detect=False)
    assert score(reward, draw("OPEN", 18, 96, 32, 0), '"SHUT"').score < 0.3
    assert score(reward, -torch.ones(1, 3, 1, 32, 96), '"SHUT"').parts["read_characters"] == 0
    monkeypatch.undo()  # the dictionary of the weights
    assert "quotes П Р И В Е Т, which" in ocr.Ocr.prompt_problem('"ПРИВЕТ"')
    assert ocr.Ocr.prompt_problem('"Ünïté №5 咖啡店’s ½ かな"') == ""


@rapidocr
@tesseract
@pytest.mark.long
def test_tesseract_reads_what_is_drawn():
    scene = score_drawn(ocr.Ocr(second="tesseract"), ["OPEN", "Happy Birthday", "Route 66"], (30, 54), 512, 256)
    assert torch.equal(scene.parts["rapidocr_score"], scene.score)
    assert scene.parts["tesseract_score"].mean() > 0.8
    reward = ocr.Ocr(detect=False, second="tesseract")
    small = score_drawn(reward, ["OPEN", "cat42", "Hello", "K9x"], (12, 16, 20), 96, 32)
    assert {*reward.second_opinion} <= {*small.parts}
    assert small.parts["tesseract_score"].mean() > 0.9 and small.parts["tesseract_exact"].mean() > 0.8
    assert small.score.mean() > 0.97
