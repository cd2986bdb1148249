"""Records of a stopped evaluation, and settings that must not differ."""

import json

import pytest
from evaluation_records import pair, real, record

from rewardfl.evaluation.records import SETTINGS, Writer, join_records, merge_settings, read_records
from rewardfl.weights.shards import InputError


def test_records_survive_a_kill_in_the_middle_of_a_line(tmp_path):
    first, second = pair("a", 0, 0.4, 0.6)
    Writer(tmp_path, 0).add(first)
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write(json.dumps(second)[:50])
    assert [*read_records(tmp_path)] == [("a", "base", 0)]
    Writer(tmp_path, 0).add(second)
    Writer(tmp_path, 3).add(real("a"))
    assert [line["arm"] for line in join_records(tmp_path)] == ["real", "base", "latest"]
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("text", ["null", '{"row": 1, "arm": "base"}', "[" * 100_000])
def test_a_damaged_record_is_refused(tmp_path, text):
    (tmp_path / "records.jsonl").write_text(f"{json.dumps(record('a', 'base'))}\n{text}\n")
    with pytest.raises(InputError, match=r"records\.jsonl: line 2 is not a record; .*--overwrite"):
        read_records(tmp_path)


def test_records_of_other_settings_are_refused(tmp_path):
    settings = {"judges": {"held_out": "1"}, "adapters": {"latest": "a"}}
    for saved in (settings, settings | {"adapters": {"best": "b"}}):  # one more adapter
        (tmp_path / SETTINGS).write_text(json.dumps(merge_settings(tmp_path, saved)))
    for other, problem in (
        ({"judges": {"held_out": "2"}}, "held_out was 1, and is 2"),
        ({"adapters": {"latest": "c"}}, "latest was a, and is c"),
        ({"judges": {"held_out": "1", "third": "1"}}, "third was not there"),
    ):
        with pytest.raises(InputError, match=f"{problem}.*--overwrite"):
            merge_settings(tmp_path, settings | other)
    Writer(tmp_path, 0).add(real("a"))
    (tmp_path / SETTINGS).unlink()
    with pytest.raises(InputError, match="holds records, and no settings.json"):
        merge_settings(tmp_path, settings)
