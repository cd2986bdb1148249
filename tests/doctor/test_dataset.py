"""tools/check_dataset.py as a user runs it."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, run_tool
from PIL import Image
from pipelines import I2V

from rewardfl import config, data
from rewardfl.doctor import dataset
from rewardfl_tools import check_dataset

WORLD = ROOT / "assets" / "tiny_world"
FACES = ("--faces", WORLD / "faces" / "reward", "--det-size", 128, "--device", "cpu")


def call(*arguments, expect=0):
    """Return the printed lines."""
    return run_tool(check_dataset.main, *arguments, expect=expect).splitlines()


def person(number=0):
    return data.read_video(WORLD / "train" / "videos" / f"{number:03d}.mp4")


def nobody(num_frames=9, height=80, width=80):
    return torch.full((num_frames, height, width, 3), 90, dtype=torch.uint8)


def write_csv(folder, *rows, header=data.COLUMNS):
    with (folder / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return folder / "metadata.csv"


def test_a_good_dataset_by_its_configuration(tmp_path):
    rows = (WORLD / "train" / "metadata.csv").read_text().splitlines()[:4]
    (tmp_path / "metadata.csv").write_text("\n".join(rows).replace("videos/", f"{WORLD}/train/videos/") + "\n")
    text = (ROOT / "configs" / "tiny_face.yaml").read_text()
    (tmp_path / "run.yaml").write_text(text.replace("assets/tiny_world/train/metadata.csv", f"{tmp_path}/metadata.csv"))
    sheet = tmp_path / "new" / "sheet.png"
    out = call("--config", tmp_path / "run.yaml", *FACES, "--sheet", sheet)
    assert out.pop(0).startswith("note: 3 of 3 clips are trained on at 8 (line 2, 000.mp4) frames per second, the ")
    assert out == ["3 rows: 3 can be used, 0 cannot", "80 x 80 (height x width): 3 rows", f"sheet: {sheet}"]
    pixels = np.asarray(Image.open(sheet).convert("RGB")).astype(int)
    assert (np.abs(pixels - (0, 220, 0)).max(2) < 8).sum() > 9 * 4 * 40  # nine boxes of faces, two pixels wide
    assert not is_red(pixels).any()


def is_red(pixels):
    return np.abs(pixels - (255, 0, 0)).max(2) < 30


@pytest.mark.slow(2)
def test_every_problem_and_every_warning(tmp_path):
    """All rows are gone through, whatever is wrong with the first."""
    data.write_video(tmp_path / "a.mp4", person(), 16)
    data.write_video(tmp_path / "tiny.mp4", person(3)[:, ::2, ::2], 16)
    data.write_video(tmp_path / "wide.mp4", torch.cat([person(4)] * 2, 2), 16)
    data.write_video(tmp_path / "nobody.mp4", nobody(), 16)
    hidden = torch.cat([person(5)[:1], nobody(7), person(5)[:1]])
    data.write_video(tmp_path / "hidden.mp4", hidden, 16)
    data.write_video(tmp_path / "turns.mp4", torch.cat([nobody(1), person(6)[1:3], nobody(6)]), 16)
    data.write_video(tmp_path / "leaves.mp4", torch.cat([person(6)[:1], nobody(8)]), 16)
    (tmp_path / "text.mp4").write_text("not a video")
    Image.fromarray(np.tile(person()[0].numpy(), (2, 1, 1))).save(tmp_path / "tall.png")
    Image.fromarray(nobody(1)[0].numpy()).save(tmp_path / "empty.png")
    path = write_csv(
        tmp_path,
        ["a.mp4", "one", "", "", ""],
        ["text.mp4", "x", "", "", "lost.mp4"],
        ["tiny.mp4", "x", "", "", ""],
        ["wide.mp4", "x", "", "", ""],
        ["a.mp4", "tall", "tall.png", "ugly", ""],
        ["a.mp4", "empty", "empty.png", "", ""],
        ["nobody.mp4", "x", "", "", ""],
        ["nobody.mp4", "reference", "", "", "a.mp4"],
        ["a.mp4", "reference", "", "", "nobody.mp4"],
        ["hidden.mp4", "x", "", "", ""],
        ["turns.mp4", "x", "", "", ""],
        ["leaves.mp4", "x", "", "", ""],
    )
    size = ["--height", 80, "--width", 80, "--num-frames", 9, "--fps", 16]
    out = call("--data", path, *size, *FACES, "--sheet", tmp_path / "sheet.png", expect=2)
    assert out == [
        f"line 3: problem: {tmp_path}/text.mp4: cannot be decoded (Invalid data found when processing input); "
        "it is damaged, or no video",
        f"line 3: problem: {tmp_path}/lost.mp4: no such file",
        "line 4: warning: video: 40 x 40 (height x width) is enlarged 2.00 times to 80 x 80",
        "line 5: warning: video: 80 x 80 leaves 50% of 80 x 160 (height x width)",
        "line 6: warning: image: 80 x 80 leaves 50% of 160 x 80 (height x width)",
        "line 7: warning: image: no face in the picture",
        f"line 8: problem: no face was found in {tmp_path}/nobody.mp4",
        "line 8: warning: video: nothing moves in its 9 frames",
        "line 9: warning: video: nothing moves in its 9 frames",
        f"line 10: problem: no face was found in {tmp_path}/nobody.mp4",
        "line 11: warning: video: no face in the middle frame",
        "line 12: warning: video: no face in the first frame, the middle frame, the last frame",
        f"line 13: problem: no face was found in {tmp_path}/leaves.mp4",
        "note: 1 of 12 rows have a negative_prompt, which has no effect: sample.negative_prompt is that of all rows",
        "note: 1 of 8 clips have less than half of the pixels of 80 x 80, and are enlarged; the smallest is line 4, "
        "tiny.mp4: 40 x 40 (height x width)",
        "12 rows: 8 can be used, 4 cannot",
        "80 x 80 (height x width): 8 rows",
        f"sheet: {tmp_path}/sheet.png",
    ]
    assert is_red(np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB")).astype(int)).sum() > 300


def test_a_damaged_clip_is_a_problem_and_problems_are_red(tmp_path):
    """Damage shows in decoding alone."""
    data.write_video(tmp_path / "a.mp4", person(), 16)
    content = bytearray((tmp_path / "a.mp4").read_bytes())
    for place in range(len(content) // 2, len(content) * 3 // 4, 97):
        content[place] ^= 0x55
    (tmp_path / "damaged.mp4").write_bytes(content)
    settings = config.DataConfig(file_name="-", height=64, width=64, num_frames=9)
    rows = data.load_metadata(write_csv(tmp_path, *([f"{name}.mp4", "x", "", "", ""] for name in ("a", "damaged"))))
    good, bad = (dataset.inspect(row, settings, None, takes_image=True) for row in rows)
    assert not good.problems and len(good.pictures) == 3 and good.size == (64, 64)
    assert len(bad.problems) == 1 and "damaged" in bad.problems[0] and not bad.pictures
    red = [is_red(np.asarray(dataset.contact_sheet([report])).astype(int)).any() for report in (good, bad)]
    assert red == [False, True]


@pytest.mark.parametrize("frames, words", [
    (person(), ""), (person()[:1].expand(9, -1, -1, -1), "nothing moves in its 9 frames"),
    (torch.cat([person()[:4], person(1)[4:]]), "5 of 8 later frames show another person than the first with a face"),
    (torch.cat([person()[:6], person()[5:6], person()[5:6], person()[6:]])[:9], ""),  # a pause
    (person()[:5].repeat_interleave(2, 0)[:9], "4 of 9 frames repeat the one before"),
])  # fmt: skip
def test_what_a_clip_shows_is_judged(tmp_path, frames, words):
    data.write_video(tmp_path / "a.mp4", frames, 16)
    path = write_csv(tmp_path, ["a.mp4", "x"], header=["video", "prompt"])
    out = call("--data", path, "--height", 80, "--width", 80, "--num-frames", 9, *FACES)
    assert [words in line for line in out if "warning" in line] == [True] * bool(words)


@pytest.mark.parametrize("source, rate, repeats", [
    (24, 24, 0), (12, 24, 40), (16, 24, 27), (24, 30, 16), (25, 30, 14), (12, 30, 48), (8, 24, 54),
])  # fmt: skip
def test_frames_that_a_conversion_of_rates_doubles(source, rate, repeats):
    picture = torch.rand(40, 8, 3, generator=torch.Generator().manual_seed(0)).repeat_interleave(12, 0)
    film = [(255 * picture[2 * i : 2 * i + 96].repeat_interleave(4, 1)).byte() for i in range(81)]
    warnings = dataset.motion_warnings(torch.stack([film[k * source // rate] for k in range(81)]))
    assert warnings == [f"video: {repeats} of 81 frames repeat the one before; leave them out"] * bool(repeats)


def test_sizes_under_max_pixels(tmp_path):
    for name, (height, width) in {"wide": (96, 160), "tall": (160, 96), "wide2": (108, 180)}.items():
        data.write_video(tmp_path / f"{name}.mp4", nobody(5, height, width), 16)
    path = write_csv(
        tmp_path, *([f"{name}.mp4", "x"] for name in ("wide", "tall", "wide2")), header=["video", "prompt"]
    )
    out = call("--data", path, "--num-frames", 5, "--max-pixels", 64 * 112)
    assert out == [
        *(f"line {line}: warning: video: nothing moves in its 5 frames" for line in (2, 3, 4)),
        "3 rows: 3 can be used, 0 cannot",
        "64 x 112 (height x width): 2 rows",
        "112 x 64 (height x width): 1 rows",
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give --config or --data, got neither"),
        (["--config", "a.yaml", "--data", "{csv}"], "give --config or --data, got both"),
        (["--data", "{csv}"], "metadata.csv): no usable row"),
        (["--data", "nowhere.csv"], f"--data: no such file: {Path.cwd()}/nowhere.csv"),
        (["--data", "{csv}", "--height", "60"], "data.height must be a multiple of 16, at most"),
        (["--data", "{csv}", "--num-frames", "1"], "data.num_frames must be 4k+1 for this VAE, from 5 to"),
    ],
)
def test_what_cannot_be_checked(tmp_path, arguments, message):
    path = write_csv(tmp_path)
    out = call(*(argument.format(csv=path) for argument in arguments), expect=2)
    assert out[0].startswith("error: ") and message in out[0]


def test_the_examples_are_what_is_read():
    paths = json.loads((ROOT / "examples" / "wan22_paths.json").read_text())
    assert set(paths) == {*I2V.original_parts, "tokenizer", "configs"}
    rows = data.load_metadata(ROOT / "examples" / "metadata.csv")
    assert all(not row.problem and row.prompt for row in rows)
    assert any(row.image for row in rows) and any(row.reference_video for row in rows)


@pytest.mark.parametrize("name", ["metadata.csv", "clip.mp4", "mine.png", "sheet.foo", "metadata.csv/sheet.png"])
def test_a_sheet_replaces_nothing_without_a_word(tmp_path, name):
    path = write_csv(tmp_path, ["clip.mp4", "x"], header=("video", "prompt"))
    data.write_video(tmp_path / "clip.mp4", person(), 8)
    (tmp_path / "mine.png").write_text("mine")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    arguments = ("--data", path, "--height", 64, "--width", 64, "--num-frames", 5)
    (line,) = call(*arguments, "--sheet", tmp_path / name, expect=2)
    assert line.startswith("error: --sheet")
    assert before == {file: file.read_bytes() for file in tmp_path.iterdir()}
    for name in ("sheet.png", "mine.png"):
        call(*arguments, "--sheet", tmp_path / name, "--overwrite")
