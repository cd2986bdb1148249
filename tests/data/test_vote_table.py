"""examples/vote_table.py: votes on pairs of clips become a table of pairs, as training reads it."""

from conftest import ROOT, run_python

from rewardfl import data


def test_votes_become_pairs(tmp_path):
    for name in ("1.mp4", "2.mp4", "3.mp4", "i.png"):
        (tmp_path / name).touch()
    head, win, tie = "a,b,vote,prompt,image", '2.mp4,1.mp4,a,"one, two",', "2.mp4,3.mp4,tie,x,i.png"

    def run(*lines, options=()):
        (tmp_path / "votes.csv").write_text("\n".join(lines) + "\n")
        command = [ROOT / "examples" / "vote_table.py", "--votes", "votes.csv", "--out", "t.csv", *options]
        return run_python(command, cwd=tmp_path)

    # in turn: two of three votes for 1.mp4; a tie; a vote each way; another prompt or image is another pair
    votes = ['1.mp4,2.mp4,a,"one, two",', win, '2.mp4,1.mp4,b,"one, two",', tie, "1.mp4,3.mp4,a,x,", "1.mp4,3.mp4,b,x,"]
    done = run(head, *votes, "1.mp4,3.mp4,b,y,i.png")
    assert (done.returncode, done.stdout) == (0, "t.csv: 2 pairs; 2 ties are left out\n"), done.stderr
    rows = data.load_metadata(tmp_path / "t.csv")
    pairs = [(row.video.name, row.rejected.name, row.prompt, row.image and row.image.name) for row in rows]
    assert pairs == [("1.mp4", "2.mp4", "one, two", None), ("3.mp4", "1.mp4", "y", "i.png")]
    assert not any(row.problem for row in rows) and rows[0].video == tmp_path / "1.mp4"
    refused = {
        (head, win): "--out t.csv exists", (head, tie): "no pair with a winner", ("a,b,vote", win): "'prompt'",
        (head, "1.mp4,2.mp4,both,x,"): "line 2: needs a clip a", (head, win, "1.mp4,1.mp4,a,x,"): "line 3: needs",
        (head, "1.mp4,4.mp4,a,x,"): f"line 2: no such file: {tmp_path}/4.mp4", ("a,vote,prompt", "1.mp4,a,x"): "line 2",
    }  # fmt: skip
    for lines, words in refused.items():
        done = run(*lines, options=() if "exists" in words else ["--overwrite"])
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert len(data.load_metadata(tmp_path / "t.csv")) == 2
