import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from films import encode, gradients, turned_picture
from PIL import Image

from rewardfl import data
from rewardfl.data import DataError, clips
from rewardfl.files import digest_files, sha256

HEADER = "video,prompt,image,reference_video"


@pytest.fixture
def folder(tmp_path):
    data.write_video(tmp_path / "a.mp4", gradients(), fps=16)
    data.write_video(tmp_path / "short.mp4", gradients(4), fps=16)
    (tmp_path / "text.mp4").write_text("not a video" * 100)
    content = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(content[: len(content) // 2])
    return tmp_path


def load(folder, *lines, header="video,prompt", key="data.file_name"):
    """Return the rows of a table of these lines."""
    (folder / "metadata.csv").write_text("\n".join([header, *lines]) + "\n")
    return data.load_metadata(folder / "metadata.csv", key)


def save_pictures(folder, *names, size=(40, 30)):
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((*size, 3), 20 * i + 20, dtype=np.uint8)).save(folder / name)


# ---- the table


def test_a_table_has_its_rows_in_order(folder):
    lines = ["a.mp4,a person speaks", 'a.mp4,"one, two\nand three"', f"{folder / 'a.mp4'}, a person speaks "]
    # spreadsheets write rows of empty cells, and a byte order mark
    rows = load(folder, *lines, ",", " , ,", header="\ufeffvideo,prompt")
    assert [row.index for row in rows] == [0, 1, 2] and [row.line for row in rows] == [2, 4, 5]
    assert [row.prompt for row in rows] == ["a person speaks", "one, two\nand three", "a person speaks"]
    assert all(row.video == folder / "a.mp4" and row.problem == "" for row in rows)


def test_a_path_may_lead_into_a_zip_archive(folder):
    """A packed clip has the same frames and hash, and the archive is not in its id; faults are named."""
    save_pictures(folder, "b.png", "c.png")
    names, header = ["a.mp4", "b.png", "c.png"], "video,prompt,image,photos"
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        for name in names:
            archive.write(folder / name, f"in/{name}")
    (folder / "bad.zip").write_bytes(b"PK\x03\x04")
    (plain,) = load(folder, "a.mp4,x,b.png,c.png", header=header)
    lines = ["all.zip/b.png,x,,", "all.zip/../b.png,x,,", "bad.zip/b.png,x,,"]
    packed, missing, outside, damaged = load(
        folder, "all.zip/in/a.mp4,x,all.zip/in/b.png,all.zip/in/c.png", *lines, header=header
    )
    assert data.inspect_row(packed, 5) == data.inspect_row(plain, 5)
    for read in (sha256, lambda path: digest_files([path])):
        assert [read(path) for path in packed.files.values() if path] == [read(folder / name) for name in names]
    assert packed.id.startswith("in/a.mp4#")
    contents = [data.load_example(row, 32, 48, 5) for row in (packed, plain)]
    assert torch.equal(contents[0].video, contents[1].video) and torch.equal(contents[0].image, contents[1].image)
    assert torch.equal(data.load_pictures(packed)[0], data.load_pictures(plain)[0])
    assert data.inspect_row(missing, 1).problems == (f"{folder}/all.zip/b.png: no such file",)
    assert data.inspect_row(outside, 1).problems == (f"{folder}/all.zip/../b.png: no such file",)
    (problem,) = data.inspect_row(damaged, 1).problems
    assert problem.startswith(f"{folder}/bad.zip/b.png: the archive is damaged")


REFUSED = {  # content of a table: the refusal
    **{f"video,prompt,{name}\na.mp4,x,b": f"unknown column '{name}', did you mean '{column}'" for name, column in {
        "Video": "video", "PROMPT": "prompt", "reference_vid": "reference_video", "heigth": "height",
        "reference video": "reference_video", "images": "image"}.items()},
    "video,prompt,image,image\na.mp4,x,,": "the first line names the column 'image' twice; remove one",
    "prompt,image,input_image\nx,b.png,b.png": "names the column 'image' twice",
    'video,prompt\na.mp4,"never closed\nb.mp4,x': r"metadata.csv: line 3: .*close every double quote up to there",
    "video,prompt\na.mp4,Zo\xeb\n": "metadata.csv: line .*'utf-8' codec.*; save it as UTF-8",
    "video,text\na.mp4,x": "must name the column 'prompt', it names video, text",
    "": "must name the column 'prompt', it names nothing",
    "video,prompt\n": r"data.file_name \(.*metadata.csv\): no usable row",
}  # fmt: skip


def test_a_table_that_cannot_be_read_is_refused(folder):
    """Columns of the user pass; names that are nearly ours are typing errors."""
    for content, message in REFUSED.items():
        (folder / "metadata.csv").write_bytes(content.encode("latin-1"))
        with pytest.raises(DataError, match=message):
            data.load_metadata(folder / "metadata.csv")
    for name in ("video_id", "split", "person", "weight", "prompt_source", ""):
        assert len(load(folder, "a.mp4,x,b", header=f"video,prompt,{name}")) == 1
    with pytest.raises(DataError, match="data.file_name: is a folder, not a file of rows"):
        data.load_metadata(folder)
    with pytest.raises(DataError, match=r"evaluation.eval_clips: .*none\.csv"):
        data.load_metadata(folder / "none.csv", "evaluation.eval_clips")


def test_ids_do_not_depend_on_the_other_rows(folder):
    first = load(folder, "a.mp4,one", "a.mp4,two", "b.mp4,one")
    other = load(folder, "b.mp4,one", "a.mp4,two")
    assert len({row.id for row in first}) == 3
    assert [row.id for row in other] == [first[2].id, first[1].id]
    (old,) = load(folder, "a.mp4,x")
    assert old.id == "a.mp4#b1ba07e5"  # blake2b of the prompt only; runs that resume know it
    (named,) = load(folder, "a.mp4,x,anna", header="video,prompt,person")
    rows = load(folder, "a.mp4,x,,", "a.mp4,x,b.png,", "a.mp4,x,,b.png", "a.mp4,x,,", "a.mp4,x,,", header=HEADER)
    assert named.id == rows[0].id == old.id and [row.id for row in rows[3:]] == [f"{old.id}-2", f"{old.id}-3"]
    assert len({row.id for row in rows}) == 5 and not any(row.id.startswith(old.id) for row in rows[1:3])


def test_optional_columns_are_read(folder):
    header = "prompt, image ,video,reference_video,negative_prompt"
    lines = ["x,b.png,a.mp4,r.mp4,ugly", f"x,{folder}/b.png,a.mp4,,", "x,,a.mp4"]
    full, image, plain = rows = load(folder, *lines, header=header)
    assert (full.image, full.reference_video, full.negative_prompt) == (folder / "b.png", folder / "r.mp4", "ugly")
    assert full.reference == folder / "r.mp4" and plain.reference == folder / "a.mp4"
    assert image.image == folder / "b.png" and image.reference_video is None and image.negative_prompt == ""
    assert (plain.image, plain.reference_video, plain.negative_prompt) == (None, None, "")
    (note,) = data.notes(rows)
    assert note.startswith("1 of 3 rows have a negative_prompt, which has no effect") and data.notes(rows[1:]) == []


def test_a_pair_is_two_clips_of_one_prompt(folder):
    """Its clips have one size and length, and from one input also nearly one first frame."""
    data.write_video(folder / "b.mp4", gradients().flip(2), fps=16)
    data.write_video(folder / "alike.mp4", torch.cat([gradients()[:1], gradients()[1:].flip(2)]), fps=16)
    data.write_video(folder / "small.mp4", gradients()[:, ::2, ::2], fps=16)
    lines = ["a.mp4,alike.mp4,x,,", "a.mp4,b.mp4,x,,", "a.mp4,b.mp4,x,b.png,", "a.mp4,small.mp4,x,,", "a.mp4,,x,,"]
    lines += ["a.mp4,short.mp4,x,,", "a.mp4,alike.mp4,x,,a.mp4", "a.mp4,gone.mp4,x,,"]
    rows = load(folder, *lines, header="chosen,rejected,prompt,image,reference_video")
    save_pictures(folder, "b.png")
    assert rows[0].video == folder / "a.mp4" and rows[0].rejected == folder / "alike.mp4"
    assert len({row.id for row in rows}) == len(rows) and rows[0].id.startswith("a.mp4#")
    problems = [" ".join(data.inspect_row(row, 4).problems) for row in rows]
    expected = [
        "", "the first frames of chosen and rejected are .* name it in the column image", "",
        "48 x 64 .* with 9 frames, and rejected 24 x 32 .* with 9", "chosen and rejected are .* one is missing",
        "and rejected 48 x 64 .* with 4 frames", "reference_video has no effect next to chosen",
        "gone.mp4: no such file",
    ]  # fmt: skip
    assert all(map(re.search, expected, problems)) and problems[0] == problems[2] == "", problems
    assert not data.inspect_row(rows[1], 4, takes_image=False).problems and not data.inspect_row(rows[1], 1).problems


def test_a_text_file_has_a_prompt_on_each_line(folder):
    """Whatever it holds; the rows equal a table's with only that column."""
    prompts = ["a red ball, left of a blue one", 'a sign that says "stop', "prompt"]
    (folder / "prompts.txt").write_text("\ufeff" + "\n\n".join(prompts) + "\n", encoding="utf-8")
    rows = data.load_metadata(folder / "prompts.txt")
    assert [(row.prompt, row.line) for row in rows] == [(prompts[0], 1), (prompts[1], 3), (prompts[2], 5)]
    (same,) = load(folder, f'"{prompts[0]}"', header="prompt")
    assert same.id == rows[0].id and rows[0].offers == ("nothing",)
    (folder / "prompts.txt").write_text("\n \n")
    with pytest.raises(DataError, match=r"data.file_name \(.*prompts.txt\): no usable row"):
        data.load_metadata(folder / "prompts.txt")


# ---- problems and notes of rows


NO_VIDEO = "cannot be decoded (Invalid data found when processing input); it is damaged, or no video"
BAD = {
    ",a prompt": "no video, and no image that this model could start from",
    "a.mp4,": "empty prompt for a.mp4",
    "a.mp4": "empty prompt for a.mp4",
    "a.mp4,smiles, then laughs": "more cells than columns; put a prompt that holds commas in double quotes",
    "gone.mp4,x": "{folder}/gone.mp4: no such file",
    "text.mp4,x": f"{{folder}}/text.mp4: {NO_VIDEO}",
    "cut.mp4,x": f"{{folder}}/cut.mp4: {NO_VIDEO}",
    "short.mp4,x": "{folder}/short.mp4: holds 4 frames, 5 are needed",
}


def problems_of(rows, num_frames):
    return [(row.line, problem) for row in rows for problem in data.inspect_row(row, num_frames).problems]


def test_every_bad_row_is_named(folder, monkeypatch):
    monkeypatch.setattr(clips, "_decode_frames", lambda container, stream: pytest.fail("decoded"))
    rows = load(folder, "a.mp4,good", *BAD, "a.mp4,good too")
    expected = [f"line {i}: {text.format(folder=folder)}" for i, text in enumerate(BAD.values(), start=3)]
    expected[1:3] = [expected[1].replace("line 4", "lines 4, 5 (2 rows)")]  # one line for one problem
    with pytest.raises(DataError) as error:
        data.usable_rows(rows, problems_of(rows, 5), skip_bad_rows=False)
    first, *lines = str(error.value).splitlines()
    file = folder / "metadata.csv"
    assert first == (f"data.file_name ({file}): 8 of 10 rows cannot be used; mend them or set data.skip_bad_rows: true")
    assert lines == expected
    good, problems = data.usable_rows(rows, problems_of(rows, 5), skip_bad_rows=True)
    assert [row.prompt for row in good] == ["good", "good too"] and problems == expected
    with pytest.raises(DataError, match=r"data.file_name \(.*metadata.csv\): no usable row\nline 2: .*a.mp4: holds 9"):
        data.usable_rows(rows[:1], problems_of(rows[:1], 13), skip_bad_rows=True)
    with pytest.raises(DataError, match=r"evaluation.eval_clips \(.*metadata\.csv\).*\nline 2: "):
        data.usable_rows(load(folder, "gone.mp4,x", key="evaluation.eval_clips"), [(2, "gone")], skip_bad_rows=False)


def test_the_lines_of_a_frequent_problem_are_shortened(folder):
    rows = load(folder, *["a.mp4,x"] * 7)
    _, bad = data.usable_rows(rows, [(line, "slow") for line in range(8, 2, -1)], skip_bad_rows=True)
    assert bad == ["lines 3, 4, 5, 6, 7, ... (6 rows): slow"]


HD, SMALL = (480, 832), (16, 16)
MIXED = [(HD, 30.0), (HD, None), (HD, 16.0)]


@pytest.mark.parametrize("clips_of, max_pixels, fps, rate, words", [
    ([(HD, 24.0)] * 3 + [(HD, 23.976)], None, None, 24, ()),
    ([(HD, 24.0)] * 3 + [(SMALL, 24.0), ((400, 400), 24.0)], None, None, 24, ("2 of 5 clips", "(first line 5, 3.mp4)")),
    ([(HD, 24.0)] * 3 + [(SMALL, 24.0)], 480 * 832, None, 24, ()),  # none is enlarged
    (MIXED, None, None, 24, ("2 of 3 clips are trained on at 30 frames per second", "(first line 2,", "data.fps: 24")),
    (MIXED, None, 16, 16, ()), (MIXED, None, 16, 24, ("3 of 3 clips are trained on at 16",)),
    (MIXED, None, None, 1, ()),  # an image model takes one frame
    ([], 480 * 832, None, 16, ()),
])  # fmt: skip
def test_small_clips_and_other_rates_are_noted(clips_of, max_pixels, fps, rate, words):
    rows = [data.Row(index=i, line=i + 2, id=str(i), video=Path(f"{i}.mp4"), prompt="x") for i in range(len(clips_of))]
    infos = [data.HeaderInfo(header=clips.Header(size, stored, ())) for size, stored in clips_of]
    notes = data.clip_notes(rows, infos, *HD, max_pixels, fps, rate)
    assert len(notes) == bool(words) and all(word in note for note in notes for word in words)


@pytest.mark.parametrize("settings, words", [
    ({}, []), ({"pixels": "yuv420p10le", "curve": 16}, ["HDR"]), ({"curve": 18}, ["HDR"]),
    ({"options": {"flags": "+ildct+ilme", "x264-params": "tff=1"}}, ["interlaced", "bwdif"]),
    ({"height": 720}, ["BT.601", "BT.709"]),
    ({"height": 720, "options": {"x264-params": "colormatrix=bt709"}}, []),
])  # fmt: skip
def test_oddities_of_a_clip_are_noted(folder, settings, words):
    """HDR is read as SDR, interlaced frames as they are, and an unnamed matrix as BT.601."""
    stream = ("libx264", settings.pop("pixels", "yuv420p"), gradients(9, settings.pop("height", 48)), 0)
    encode(folder / "odd.mp4", stream, times=range(0, 90, 10), **settings)
    rows = load(folder, "a.mp4,x", "odd.mp4,x")
    infos = [data.inspect_row(row, 5) for row in rows]
    assert not any(info.problems for info in infos)
    notes = data.clip_notes(rows, infos, 48, 64, None, 10, 10)
    assert len(notes) == bool(words)
    assert all(word in note for note in notes for word in [*words, "line 3, odd.mp4", "1 of 2"])


def test_every_problem_of_a_row_is_named(folder):
    save_pictures(folder, "good.png")
    lines = ["short.mp4,,gone.png,text.mp4", "a.mp4,x,good.png,short.mp4", "a.mp4,x,gone.jpg,short.mp4"]
    bad, good, gone = load(folder, *lines, header=HEADER)
    assert data.inspect_row(bad, 5).problems == (
        "empty prompt for short.mp4",
        f"{folder}/short.mp4: holds 4 frames, 5 are needed",
        f"{folder}/gone.png: no such file",
        f"{folder}/text.mp4: {NO_VIDEO}",
    )
    assert data.inspect_row(good, 5).problems == ()  # a reference may be shorter
    slow = [f"{folder}/{name}: has 16 frames per second, data.fps is 30" for name in ("a.mp4", "short.mp4")]
    assert [problem.split(";")[0] for problem in data.inspect_row(good, 5, 30).problems] == slow
    assert len(data.inspect_row(gone, 12).problems) == 2
    with pytest.raises(DataError, match=f"^{re.escape('; '.join(data.inspect_row(gone, 12).problems))}$"):
        data.load_example(gone, 32, 32, 12)
    data.write_video(folder / "still.mp4", gradients(1), fps=16)
    (row,) = load(folder, "a.mp4,x,,still.mp4", header=HEADER)
    assert data.inspect_row(row, 5).problems == (f"{folder}/still.mp4: holds 1 frames, 2 are needed",)


# ---- the content of rows


def test_an_image_and_a_reference_are_loaded(folder):
    turned_picture(folder / "b.jpg", 6)
    data.write_video(folder / "wide.mp4", gradients(3, 48, 96), fps=16)
    row, plain = load(folder, "a.mp4,smiles,b.jpg,wide.mp4", "a.mp4,smiles,,", header=HEADER)
    example = data.load_example(row, 32, 32, 5)
    picture = data.read_picture(folder / "b.jpg")
    assert torch.equal(example.image, data.to_float(data.fit(picture[None], 32, 32))[:, 0])
    assert torch.equal(example.video, data.to_float(data.read_clip(folder / "a.mp4", 32, 32, 5)))
    assert torch.equal(example.reference, data.to_float(data.fit(data.read_video(folder / "wide.mp4"), 32, 32)))
    shaped = data.load_example(row, 32, 32, 5, max_pixels=48 * 96, fps=8)
    assert shaped.video.shape == (3, 5, 48, 64) and shaped.image.shape == (3, 48, 64)
    assert shaped.reference.shape == (3, 2, 48, 96)  # its shape and length
    example = data.load_example(plain, 32, 32, 5)
    assert example.reference is example.video and torch.equal(example.image, example.video[:, 0])


def test_rows_without_a_clip_are_loaded(folder):
    Image.new("RGB", (48, 64)).save(folder / "who.png")
    rows = load(folder, "a cat", "a dog", "a cat", "a face,who.png", header="prompt,image")
    assert len({row.id for row in rows}) == 4 and all(row.video is None for row in rows)
    assert [row.offers for row in rows[2:]] == [("nothing",), ("nothing", "picture")]
    assert [data.inspect_row(row, 5, takes_image=False).problems for row in rows] == [()] * 4
    problem = "no video, and no image that this model could start from"
    assert [data.inspect_row(row, 5).problems for row in rows] == [(problem,)] * 3 + [()]
    prompt, picture = (data.load_example(row, 32, 48, 5) for row in (rows[0], rows[3]))
    assert prompt.size == picture.size == (32, 48) and prompt.video is picture.video is None
    assert prompt.image is None and prompt.reference.shape == (3, 0, 32, 48)
    assert picture.reference.shape == (3, 2, 32, 48)  # the face of its second frame is pooled
    assert torch.equal(picture.reference, picture.image[:, None].repeat(1, 2, 1, 1))
    height, width = data.read_picture(folder / "who.png").shape[:2]
    size = data.load_example(rows[3], 32, 48, 5, max_pixels=32 * 32).size  # the picture's shape
    assert size == data.clip_size((height, width), 32, 48, 32 * 32) != (32, 48)
    with pytest.raises(DataError, match="neither a video nor an image whose shape data.max_pixels could keep"):
        data.load_example(rows[0], 32, 48, 5, max_pixels=32 * 32)


def test_photos_are_a_folder_or_pictures(tmp_path):
    save_pictures(tmp_path, "anna/2.png", "anna/1.JPG", "b.png", "c.webp", "odd;name.png")
    (tmp_path / "anna" / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    lines = ["x,,anna", "x,,b.png", "x,b.png,b.png; c.webp;anna", "x,,odd;name.png", "x,,empty", "x,,gone"]
    rows = load(tmp_path, *lines, header="prompt,input_image,photos")
    names = [[str(path.relative_to(tmp_path)) for path in row.photos] for row in rows]
    anna = ["anna/1.JPG", "anna/2.png"]
    assert names == [anna, ["b.png"], ["b.png", "c.webp", *anna], ["odd;name.png"], [], ["gone"]]
    assert rows[2].image == tmp_path / "b.png" and rows[2].pictures == rows[2].photos[1:]
    assert rows[2].checked_pictures == (*rows[2].photos[1:], rows[2].image)
    formats = ".bmp, .gif, .jpeg, .jpg, .png, .tif, .tiff, .webp"
    assert rows[4].problem == f"photos: no picture in {tmp_path / 'empty'} ({formats})"
    (problem,) = data.inspect_row(rows[5], 5, takes_image=False).problems
    assert "gone" in problem and rows[0].who != rows[1].who


def test_the_rows_of_a_person_start_from_the_photos_in_turn(tmp_path):
    """The seed draws the first one, and a row's first frame is not in its pool if two others are there."""
    save_pictures(tmp_path, "a/0.png", "a/1.png", "a/2.png", "b/0.png", "b/1.png")
    lines = ["x,a,anna", "y,b,", "y,a,anna", "z,a,anna", "x,b,", "again,a,anna"]
    rows = load(tmp_path, *lines, header="prompt,photos,person")
    firsts = set()
    for seed in range(9):
        assigned = data.assign_images(rows, seed)
        names = [row.image.parent.name + row.image.stem for row in assigned]
        anna = [names[i] for i in (0, 2, 3, 5)]
        assert {*anna} == {"a0", "a1", "a2"} and anna[3] == anna[0] and {names[1], names[4]} == {"b0", "b1"}
        firsts.add(names[0])
    assert len(firsts) == 3 and [len(row.pictures) for row in assigned] == [2] * 6
    assert all((row.image in row.pictures) == (row.photos[0].parent.name == "b") for row in assigned)
    assert [row.id for row in assigned] == [row.id for row in rows]
    (filmed,) = load(tmp_path, "x,a,b/0.png", header="prompt,photos,image")
    assert data.assign_images([filmed], 0) == [filmed]


def test_large_photos_are_shrunk_and_others_keep_their_sizes(tmp_path, monkeypatch):
    save_pictures(tmp_path, "a/0.png", "a/1.png", size=(40, 30))
    save_pictures(tmp_path, "a/2.png", size=(60, 90))
    monkeypatch.setattr("rewardfl.data.metadata.LONGEST_PHOTO", 60)
    photos = data.load_pictures(load(tmp_path, "x,a", header="prompt,photos")[0])
    assert [tuple(photo.shape) for photo in photos] == [(3, 40, 30), (3, 40, 30), (3, 40, 60)]
    assert photos[1].unique().tolist() == [pytest.approx(40 / 127.5 - 1)]
