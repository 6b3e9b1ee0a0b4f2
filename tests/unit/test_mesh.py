"""Meshes: rank order, coordinates, and targets as people type them."""

from itertools import product

import pytest

from reshard_mpi.checkpoint.mesh import MOST_RANKS, Mesh, canonical, mesh_from_topology, nesting_order, parse_target
from reshard_mpi.errors import InputError, UsageError


@pytest.mark.parametrize(
    "text, spelled",
    [
        ("single", "single"),
        (" single ", "single"),
        ("tp=4", "tp=4"),
        ("tp=4,pp=2", "pp=2,tp=4"),
        ("tp=2,cp=3,ep=4,fsdp=5,dp=6,pp=7", "pp=7,dp=6,fsdp=5,ep=4,cp=3,tp=2"),
        ("zz=2,tp=2,aa=3", "aa=3,zz=2,tp=2"),
        ("dp_replicate=2,dp_shard=4", "dp=2,fsdp=4"),
        (" tp = 4 , pp = 2 ", "pp=2,tp=4"),
        ("tp=1", "tp=1"),
        ("tp=004", "tp=4"),
    ],
)
def test_a_target_is_spelled_in_rank_order(text, spelled):
    assert str(parse_target(text)) == spelled


@pytest.mark.parametrize(
    "why, text, told",
    [
        ("nothing", "", "no mesh axis"),
        ("no size", "tp", "no mesh axis with a size"),
        ("no size after the sign", "tp=", "no mesh axis with a size"),
        ("no axis", "=4", "no mesh axis with a size"),
        ("a trailing comma", "tp=4,", "no mesh axis with a size"),
        ("zero", "tp=0", "size 0"),
        ("negative", "tp=-1", "no mesh axis with a size"),
        ("a fraction", "tp=1.5", "no mesh axis with a size"),
        ("another alphabet", "tp=٣", "no mesh axis with a size"),
        ("twice", "tp=2,tp=2", "twice"),
        ("twice, under its other name", "dp=2,dp_replicate=2", "twice"),
        ("twice, under its other name, the other way round", "dp_shard=2,fsdp=2", "twice"),
        ("rank is no axis", "rank=2", "reserved"),
        ("world_size says nothing of axes", "world_size=4", "tp=4, say"),
        ("single with more", "single,tp=2", "no mesh axis with a size"),
        ("more ranks than names", "tp=100001", "at most 100000"),
        ("more ranks than names, together", "tp=1000,dp=1000", "at most 100000"),
        ("a number as long as memory", "tp=" + "9" * 5000, "no mesh axis with a size"),
    ],
)
def test_what_is_no_target_is_a_usage_error_that_shows_how_to_write_it(why, text, told):
    with pytest.raises(UsageError, match=told) as refused:
        parse_target(text)
    assert refused.value.where == "--target"


@pytest.mark.parametrize(
    "topology, axes",
    [
        ({"world_size": 1}, ()),
        ({"tp": 2, "pp": 3}, (("pp", 3), ("tp", 2))),
        ({"tp": 1}, (("tp", 1),)),
        ({"dp_shard": 2}, (("fsdp", 2),)),
        ({"größe": 2, "tp": 2}, (("größe", 2), ("tp", 2))),
    ],
)
def test_a_topology_of_a_manifest_is_a_mesh(topology, axes):
    assert mesh_from_topology(topology, "w").axes == axes


@pytest.mark.parametrize(
    "why, topology",
    [
        ("no axes", {}),
        ("which axes?", {"world_size": 4}),
        ("ranks said twice", {"world_size": 4, "tp": 4}),
        ("an axis of nobody", {"tp": 0}),
        ("an axis under two names", {"dp": 2, "dp_replicate": 2}),
        ("an axis without a name", {"": 2}),
        ("more ranks than names", {"tp": 1 << 40}),
    ],
)
def test_what_is_no_topology_is_bad_input(why, topology):
    with pytest.raises(InputError):
        mesh_from_topology(topology, "w")


def test_which_axes_would_do_is_said_where_only_a_world_size_is_given():
    with pytest.raises(InputError, match="pp, dp, fsdp, ep, cp, tp"):
        mesh_from_topology({"world_size": 8}, "w")


def test_the_last_axis_runs_fastest():
    mesh = Mesh.of({"tp": 2, "pp": 3, "zz": 2})
    expected = [dict(zip(("zz", "pp", "tp"), at, strict=True)) for at in product(range(2), range(3), range(2))]
    assert [mesh.coordinates(rank) for rank in range(mesh.size)] == expected
    assert [list(mesh.coordinates(rank)) for rank in (0, 11)] == [["zz", "pp", "tp"]] * 2


def test_a_mesh_without_axes_is_one_rank():
    single = Mesh(())
    assert (single.size, single.coordinates(0), single.topology(), str(single)) == (1, {}, {"world_size": 1}, "single")


def test_axes_of_size_1_split_nothing_but_are_written():
    mesh = Mesh.of({"tp": 1, "pp": 2})
    assert mesh.split_axes == {"pp": 2}
    assert mesh.topology() == {"pp": 2, "tp": 1}
    assert mesh.coordinates(1) == {"pp": 1, "tp": 0}


def test_as_many_ranks_as_can_be_named_are_allowed():
    assert parse_target(f"tp={MOST_RANKS}").size == MOST_RANKS


def test_fsdp_splits_what_tp_left():
    axes = dict.fromkeys(("tp", "fsdp", "dp", "pp", "ep", "cp", "zz", "aa"), 2)
    assert nesting_order(axes) == ["aa", "zz", "pp", "ep", "cp", "tp", "dp", "fsdp"]
    assert nesting_order({}) == []


def test_an_axis_has_one_name():
    assert [canonical(axis) for axis in ("dp_replicate", "dp_shard", "dp", "tp", "zz")] == [
        "dp",
        "fsdp",
        "dp",
        "tp",
        "zz",
    ]
