"""Order, noise, group plans over many geometries, starts, loaders and windows."""

import itertools
from collections import Counter

import pytest
import torch

from rewardfl import data, group_plan
from rewardfl.group_plan import Geometry
from rewardfl.windows import Windows, draw_window

IDS = [f"clip-{i}" for i in range(7)]
SHAPE = (1, 2, 3), "cpu"


def plan(epoch=0, rank=0, sample_ids=IDS, seed=0, **geometry):
    return group_plan.plan(epoch, rank, Geometry(**({"group_size": 4, "groups": 6} | geometry)), sample_ids, seed)


def epoch_of(world, **geometry):
    """All members of an epoch, rank by rank."""
    return [
        member for rank in range(world) for forward in plan(world=world, rank=rank, **geometry) for member in forward
    ]


# worlds, batches, sizes of groups, and numbers of them
GRID = list(itertools.product(range(1, 9), range(1, 5), (2, 3, 4, 5, 6, 7, 8, 12, 24), (1, 2, 3, 4, 5, 6, 8, 12, 32)))


def divides(world, batch, group_size, groups):
    return groups * group_size % (world * batch) == 0


def chained(parts):
    return list(itertools.chain.from_iterable(parts))


def test_every_geometry_that_divides_gives_every_position_once():
    """In the documented order, of every number of updates: rank by rank."""
    accepted = [geometry for geometry in GRID if divides(*geometry)]
    assert (len(GRID), len(accepted)) == (2592, 1105)
    for world, batch, group_size, count in accepted:
        geometry = Geometry(group_size=group_size, groups=count, world=world, batch=batch)
        everything = range(0, group_size * count, batch)  # where the forward passes start
        for updates in {1, 2, 3, geometry.forwards} if geometry.forwards < 32 else {1, 2}:
            if geometry.forwards % updates:
                continue
            geometry = Geometry(group_size=group_size, groups=count, world=world, batch=batch, updates=updates)
            lists = [group_plan.positions(geometry, rank) for rank in range(world)]
            assert {len(forwards) for forwards in lists} == {geometry.forwards}
            assert {(len(at), at.step) for at in chained(lists)} == {(batch, 1)}
            share = geometry.forwards_per_update
            of_update = [[forwards[u : u + share] for forwards in lists] for u in range(0, geometry.forwards, share)]
            assert [at.start for forwards in of_update for at in chained(forwards)] == list(everything)
            if group_size % batch == 0:  # no forward pass mixes rows: the first and the last of it are one group's
                assert all(at[0] // group_size == at[-1] // group_size for at in chained(lists))


def test_what_is_left_is_trained_in_as_few_equal_passes_as_possible():
    """Of every geometry, against a loop over positions; groups are trained at random, all, or none."""
    for number, (world, batch, group_size, count) in enumerate(g for g in GRID if divides(*g) and g[3] < 32):
        geometry = Geometry(group_size=group_size, groups=count, world=world, batch=batch)
        trained = torch.rand(count, generator=torch.Generator().manual_seed(number)) < (0, 0.3, 0.5, 2)[number % 4]
        part, size, chosen = range(geometry.forwards // 3, geometry.forwards), world * batch, []
        for rank in range(world):
            at = group_plan.positions(geometry, rank)
            chosen.append({n: [bool(trained[position // group_size]) for position in at[n]] for n in part})
        most = max(1, *(sum(map(any, each.values())) for each in chosen))
        total = sum(sum(chained(each.values())) for each in chosen)
        for rank, each in enumerate(chosen):
            weights, rest, left_out = group_plan.passes_to_train(geometry, rank, slice(part.start, part.stop), trained)
            assert sorted([*weights, *rest]) == [*part] and len(weights) == most and not any(any(each[n]) for n in rest)
            expected = [[most * size / max(1, total) * is_left for is_left in each[n]] for n in weights]
            assert torch.stack([*weights.values()]).tolist() == [pytest.approx(row) for row in expected]
            assert left_out == pytest.approx(1 - total / (size * len(part)))


def test_a_position_is_the_same_member_whatever_the_geometry():
    """One process has the members one by one: group after group, and in each member after member."""
    accepted = [geometry for geometry in GRID if divides(*geometry)]
    for world, batch, group_size, count in accepted[:: len(accepted) // 40]:
        members = chained(plan(epoch=3, group_size=group_size, groups=count))
        assert [(m.group_id, m.member) for m in members] == [*itertools.product(range(count), range(group_size))]
        geometry = dict(group_size=group_size, groups=count, world=world, batch=batch)
        for rank in range(world):
            expected = [[members[i] for i in at] for at in group_plan.positions(Geometry(**geometry), rank)]
            assert plan(epoch=3, rank=rank, **geometry) == expected


def test_equal_prompts_with_other_images_are_two_groups(tmp_path):
    (tmp_path / "metadata.csv").write_text("video,prompt,image\na.mp4,she smiles,a.png\na.mp4,she smiles,b.png\n")
    rows = data.load_metadata(tmp_path / "metadata.csv")
    members = epoch_of(2, groups=2, sample_ids=[row.id for row in rows])
    assert rows[0].prompt == rows[1].prompt and rows[0].image != rows[1].image
    assert {(m.group_id, m.row) for m in members} in ({(0, 0), (1, 1)}, {(0, 1), (1, 0)})
    assert Counter(m.group_id for m in members) == {0: 4, 1: 4}
    assert len({m.noise_seed for m in members}) == len({m.step_seed for m in members}) == 8


def test_a_group_is_one_row_with_different_noises():
    seeds, steps = Counter(), Counter()
    for epoch in range(5):
        members = epoch_of(2, epoch=epoch, batch=2, groups=10)  # more groups than rows: some come twice
        rows = {}
        for m in members:
            assert rows.setdefault(m.group_id, m.row) == m.row
            seeds[m.noise_seed] += 1
            steps[m.step_seed] += 1
        assert max(Counter(rows.values()).values()) == 2
    assert len(seeds) == len(steps) == 5 * 10 * 4 and not seeds.keys() & steps.keys()


def test_same_noise_shares_only_the_first_noise():
    different, same = epoch_of(1, epoch=2), epoch_of(1, epoch=2, same_noise=True)
    by_group = {group: [m for m in same if m.group_id == group] for group in range(6)}
    assert all(len({m.noise_seed for m in members}) == 1 for members in by_group.values())
    assert len({m.noise_seed for m in same}) == 6
    assert len({m.step_seed for m in same}) == 24
    assert [m._replace(noise_seed=0) for m in different] == [m._replace(noise_seed=0) for m in same]


def test_epochs_depend_only_on_seed_and_epoch():
    rows = [m.row for epoch in range(7) for m in epoch_of(1, epoch=epoch) if m.member == 0]
    assert [Counter(rows[i : i + 7]) for i in range(0, 42, 7)] == [Counter(range(7))] * 6
    assert rows[:7] != rows[7:14]
    assert plan(epoch=5) == plan(epoch=5) != plan(epoch=4)
    assert plan(seed=1) != plan(seed=0)
    assert [forward[0].row for forward in plan(seed=1)] != [forward[0].row for forward in plan(seed=0)]
    # a row keeps its noise when the number of groups per epoch changes
    few = {(m.row, m.member): m.noise_seed for e in range(2) for m in epoch_of(1, epoch=e, groups=3)}
    assert few == {(m.row, m.member): m.noise_seed for m in epoch_of(1, groups=6)}


@pytest.mark.parametrize("same, batch", [(True, 2), (True, 3), (False, 2)])  # a batch of 3 mixes groups of four
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_process_has_every_start_that_it_needs(same, batch, world):
    """needs_prefix is true exactly where a process's pass has a start that its pass before lacked."""
    geometry = dict(world=world, batch=batch, same_noise=same, groups=3 * batch)
    plans = [plan(4, rank, list("abcde"), 1, **geometry) for rank in range(world)]
    new = group_plan.needs_prefix(plans)
    assert new[0] and len(new) == len(plans[0])
    for i in range(1, len(new)):
        lacking = [{m.start for m in plan[i]} - {m.start for m in plan[i - 1]} for plan in plans]
        assert new[i] == any(lacking)
    if same and batch == 2:
        assert sum(new) < len(new)  # the second half of a group needs nothing
    if not same:
        assert all(new)


def test_the_noise_of_a_step_does_not_depend_on_the_batch():
    members = [group_plan.Member(0, 0, m, noise_seed=7, step_seed=100 + m, group_seed=7) for m in range(3)]
    both = group_plan.draw_step_noise(members, *SHAPE, 5)
    single, later = (group_plan.draw_step_noise(*drawn) for drawn in ((members[1:2], *SHAPE, 5), (members, *SHAPE, 6)))
    assert both.shape == (3, 2, 3) and torch.equal(both[1:2], single)
    assert not torch.equal(both[0], both[1]) and not torch.equal(both, later)


def window(rule, num_steps, *, epoch, seed, **settings):
    return draw_window(Windows(rule=rule, **{"usable": range(num_steps)} | settings), epoch, seed)


def test_windows_are_the_requested_steps():
    assert window("list", 8, epoch=3, seed=0, steps=(5, 1, 2)) == (1, 2, 5)
    usable = range(7)
    seen = {window("random", 8, epoch=e, seed=0, usable=usable, size=3, bounds=(1, 6)) for e in range(60)}
    assert seen == {(1, 2, 3), (2, 3, 4), (3, 4, 5)}
    assert {window("random", 8, epoch=e, seed=0, usable=[0, 1, 3, 4, 5], size=2) for e in range(60)} == {
        (0, 1), (3, 4), (4, 5),
    }  # fmt: skip
    drawn = [window("fraction", 16, epoch=e, seed=0, usable=range(15), fraction=0.6) for e in range(60)]
    assert all(len(set(w)) == 9 and w == tuple(sorted(w)) and set(w) <= set(range(15)) for w in drawn)
    assert len(set(drawn)) > 50 and set().union(*drawn) == set(range(15))
    assert len(window("fraction", 4, epoch=0, seed=0, fraction=0.01)) == 1
    assert window("fraction", 8, epoch=0, seed=0, fraction=1.0, bounds=(2, 5)) == (2, 3, 4)


def test_windows_depend_only_on_seed_and_epoch():
    def draw(seed):
        return [window("random", 20, epoch=e, seed=seed, size=2) for e in range(30)]

    first = draw(0)
    torch.manual_seed(123)
    torch.rand(5)
    assert draw(0) == first != draw(1)
