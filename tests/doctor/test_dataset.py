"""tools/check_dataset.py as a user runs it."""

import json
import shutil

import pytest
import torch
from conftest import ROOT, run_tool
from films import damage
from PIL import Image
from pipelines import I2V

from rewardfl import data
from rewardfl.doctor import dataset
from rewardfl_tools import check_dataset

WORLD = ROOT / "assets" / "tiny_world"
FACES = ("--faces", WORLD / "faces" / "reward", "--device", "cpu")
ANY_RATE = "data.fps=null"


def check(table, *arguments, expect=0):
    """Return the printed lines."""
    settings = ("--config", ROOT / "configs" / "tiny_face.yaml", f"data.file_name={table}")
    return run_tool(check_dataset.main, *settings, *arguments, expect=expect).splitlines()


def person(number=0):
    return data.read_video(WORLD / "train" / "videos" / f"{number:03d}.mp4")


def nobody(num_frames=9):
    return torch.full((num_frames, 80, 80, 3), 90, dtype=torch.uint8)


def write_csv(folder, *lines, header="video,prompt,image,negative_prompt,reference_video"):
    (folder / "metadata.csv").write_text("\n".join([header, *lines]) + "\n")
    return folder / "metadata.csv"


def test_a_good_dataset_by_its_configuration(tmp_path):
    rows = (WORLD / "train" / "metadata.csv").read_text().splitlines()[:4]
    (tmp_path / "metadata.csv").write_text("\n".join(rows).replace("videos/", f"{WORLD}/train/videos/") + "\n")
    note, *out = check(tmp_path / "metadata.csv", *FACES)
    assert note.startswith("note: 3 of 3 clips are trained on at 8 frames per second") and note.endswith("000.mp4)")
    assert out == ["3 rows: 3 can be used, 0 cannot", "80 x 80 (height x width): 3 rows"]


@pytest.mark.slow(2)
def test_every_problem_and_every_warning(tmp_path):
    """All rows are read, whatever is wrong with the first."""
    data.write_video(tmp_path / "a.mp4", person(), 16)
    shutil.copy(tmp_path / "a.mp4", tmp_path / "damaged.mp4")
    damage(tmp_path / "damaged.mp4")  # shows only in decoding
    data.write_video(tmp_path / "tiny.mp4", person(3)[:, ::2, ::2], 16)
    data.write_video(tmp_path / "nobody.mp4", nobody(), 16)
    hidden = torch.cat([person(5)[:1], nobody(7), person(5)[:1]])
    data.write_video(tmp_path / "hidden.mp4", hidden, 16)
    data.write_video(tmp_path / "leaves.mp4", torch.cat([person(6)[:1], nobody(8)]), 16)
    (tmp_path / "text.mp4").write_text("not a video")
    Image.fromarray(nobody(1)[0].numpy()).save(tmp_path / "empty.png")
    path = write_csv(
        tmp_path,
        "a.mp4,one,,,", "text.mp4,x,,,lost.mp4", "tiny.mp4,x,,,", "a.mp4,empty,empty.png,ugly,", "nobody.mp4,x,,,",
        "nobody.mp4,reference,,,a.mp4", "a.mp4,reference,,,nobody.mp4", "hidden.mp4,x,,,", "leaves.mp4,x,,,",
        "damaged.mp4,x,,,",
    )  # fmt: skip
    *out, damaged, note_1, note_2, count, sizes = check(path, ANY_RATE, *FACES, expect=2)
    assert out == [
        f"line 3: problem: {tmp_path}/text.mp4: cannot be decoded (Invalid data found when processing input); "
        "it is damaged, or no video",
        f"line 3: problem: {tmp_path}/lost.mp4: no such file",
        "line 5: warning: image: no face in the picture",
        f"line 6: problem: no face was found in {tmp_path}/nobody.mp4",
        "line 6: warning: video: nothing moves in its 9 frames",
        "line 7: warning: video: nothing moves in its 9 frames",
        f"line 8: problem: no face was found in {tmp_path}/nobody.mp4",
        "line 9: warning: hidden.mp4: its face is lost in 7 of 9 frames",
        f"line 10: problem: no face was found in {tmp_path}/leaves.mp4",
    ]
    assert damaged.startswith("line 11: problem: ") and "it is damaged" in damaged
    assert note_1.startswith("note: 1 of 10 rows have a negative_prompt, which has no effect")
    assert note_2.startswith(
        "note: 1 of 5 clips have less than half of the pixels of 80 x 80 (height x width), and are enlarged"
    )
    assert (count, sizes) == ("10 rows: 5 can be used, 5 cannot", "80 x 80 (height x width): 5 rows")


@pytest.mark.parametrize("frames, words", [
    (person(), ""), (person()[:1].expand(9, -1, -1, -1), "nothing moves in its 9 frames"),
    (torch.cat([person()[:4], person(1)[4:]]), "5 of 8 later frames show another person than the first with a face"),
    (torch.cat([person()[:6], person()[5:6], person()[5:6], person()[6:]])[:9], ""),  # a pause
    (person()[:5].repeat_interleave(2, 0)[:9], "4 of 9 frames repeat the one before"),
])  # fmt: skip
def test_stills_cuts_and_repeated_frames_are_warnings(tmp_path, frames, words):
    data.write_video(tmp_path / "a.mp4", frames, 16)
    out = check(write_csv(tmp_path, "a.mp4,x", header="video,prompt"), ANY_RATE, *FACES)
    assert [words in line for line in out if "warning" in line] == [True] * bool(words)


@pytest.mark.parametrize("source, rate, repeats", [
    (24, 24, 0), (12, 24, 40), (16, 24, 27), (24, 30, 16), (25, 30, 14), (12, 30, 48), (8, 24, 54),
])  # fmt: skip
def test_frames_that_a_conversion_of_rates_doubles(source, rate, repeats):
    picture = torch.rand(40, 8, 3, generator=torch.Generator().manual_seed(0)).repeat_interleave(12, 0)
    film = [(255 * picture[2 * i : 2 * i + 96].repeat_interleave(4, 1)).byte() for i in range(81)]
    warnings = dataset.motion_warnings(data.to_float(torch.stack([film[k * source // rate] for k in range(81)])))
    assert warnings == [f"video: {repeats} of 81 frames repeat the one before; leave them out"] * bool(repeats)


def test_settings_that_cannot_be_checked_are_refused(tmp_path):
    for setting, message in (
        (ANY_RATE, "metadata.csv): no usable row"),
        ("data.height=60", "data.height must be a mul"),
    ):
        out = check(write_csv(tmp_path), ANY_RATE, setting, expect=2)
        assert out[0].startswith("error: ") and message in out[0]


def test_the_examples_can_be_read():
    paths = json.loads((ROOT / "examples" / "wan22_paths.json").read_text())
    assert set(paths) == {*I2V.original_parts, "tokenizer", "configs"}
    rows = data.load_metadata(ROOT / "examples" / "metadata.csv")
    assert all(not row.problem and row.prompt for row in rows)
    assert any(row.image for row in rows) and any(row.reference_video for row in rows)


@pytest.mark.slow(4)
def test_photos_and_their_crops(tmp_path):
    """A photo of another person is a problem; a crop that cuts the face of a row's first frame is a warning."""
    photos = WORLD / "train" / "photos"
    names = ["003/0", "003/1", "003/2", "006/0"]
    lines = [
        f"x,,{photos}/003,", f"x,,{';'.join(f'{photos}/{name}.jpg' for name in names)},", f"x,{photos}/003/1.jpg,,",
        f"x,,{tmp_path}/cut.jpg,",
    ]  # fmt: skip
    content = (photos / "003" / "0.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(content[: len(content) // 2])  # shows only in decoding
    table = write_csv(tmp_path, *lines, header="prompt,image,photos,person")
    pack = ("--faces", WORLD / "faces" / "inner_face")
    first, cut, *rest = check(table, *pack, "data.max_pixels=6400", expect=2)
    assert first.startswith(f"line 3: problem: {photos}/006/0.jpg: shows another person (median cosine ")
    assert cut.startswith(f"line 5: problem: {tmp_path}/cut.jpg: cannot be decoded as a picture")
    assert rest == ["4 rows: 2 can be used, 2 cannot", "80 x 80 (height x width): 2 rows"]
    wide = check(table, *pack, "data.height=48", "data.width=80", expect=2)
    assert any(line.startswith("line 4: warning: image: the crop cuts the face of 1.jpg: the middle ") for line in wide)
