"""Pictures: the tiles and colours that are drawn, which tensors are chosen, the files written, and what is refused."""

import math
import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest

from reshard_mpi.checkpoint.mesh import parse_target
from reshard_mpi.cli import parse
from reshard_mpi.commands import run_alone
from reshard_mpi.errors import StorageError, UsageError
from reshard_mpi.plan.plan import shard_traffic, traffic
from reshard_mpi.plan.prepare import Prepared, Selection
from reshard_mpi.sample import write_sample
from reshard_mpi.show import pictures
from reshard_mpi.show.drawing import FEW_COLOURS, MOST_BANDS, MOST_VECTORS, rank_colours
from reshard_mpi.show.inspection import tensor_tiles
from reshard_mpi.show.page import save
from reshard_mpi.show.pictures import plan_picture, tensor_picture
from reshard_mpi.show.planning import refusals_of
from reshard_mpi.show.tilings import Tiling
from reshard_mpi.storage.source import Source, load_alone
from tests.jobs.outcome import CASES
from tests.needed import needed
from tests.unit.test_tilings import cut

if not os.environ.get("CI"):  # there, a missing matplotlib is a failure
    needed("matplotlib")

UNEVEN = CASES / "tp3-uneven-to-tp2"
PNG = b"\x89PNG\r\n\x1a\n"


def facts_of(tiling: Tiling, name: str = "w") -> dict:
    """As `tensor_tiles` tells of a tensor."""
    nranks = max((rank for tile in tiling.tiles for rank in tile.ranks), default=0) + 1
    return {
        "tensor": name,
        "dtype": "float32",
        "shape": list(tiling.shape),
        "nbytes": 4 * math.prod(tiling.shape),
        "layout": {},
        "source_topology": {"tp": nranks},
        "tiles": [
            {
                "rank": rank,
                "coordinates": {"tp": rank},
                "offset": list(tile.start),
                "extent": [b - a for a, b in zip(tile.start, tile.stop, strict=True)],
            }
            for tile in tiling.tiles
            for rank in tile.ranks
        ],
    }


def drawn(figure, what: str) -> list:
    """The `tiles` or `bands` of each slice that is drawn."""
    return [found for axes in figure.axes for found in axes.collections if found.get_gid() == what]


def ntiles(figure) -> list[int]:
    return [len(found.get_paths()) for found in drawn(figure, "tiles")]


def colours(figure) -> set[tuple[float, ...]]:
    return {tuple(colour) for found in drawn(figure, "bands") for colour in found.get_facecolors()}


def texts(figure) -> list[str]:
    return [text.get_text() for part in (figure, *figure.axes) for text in part.texts]


def matrices(figure) -> list[np.ma.MaskedArray]:
    images = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    return [image for image in images if image.ndim == 2]  # the others are strips of colours


# Tiles


@pytest.mark.parametrize(
    "why, shape, parts, drawn_tiles",
    [
        ("0-d", (), (), [1]),
        ("1-d, 4 ranks", (10,), (4,), [4]),
        ("1-d, 64 ranks", (1000,), (64,), [63]),  # parts of 16: the last rank has nothing
        ("2-d, 4 ranks", (8, 6), (2, 2), [4]),
        ("2-d, 64 rows", (128, 6), (64, 1), [64]),
        ("2-d, 8 x 8", (64, 64), (8, 8), [64]),
        ("3-d, cut on all axes", (4, 6, 8), (2, 2, 2), [4, 4]),
        ("3-d, one slice", (64, 6, 8), (16, 1, 4), [64]),
        ("4-d, more slices than are drawn", (16, 4, 4, 4), (4, 4, 4, 4), [16] * 9),
        ("no elements", (0, 4), (2, 1), []),
    ],
)
def test_every_tile_is_drawn_in_the_colour_of_its_rank(why, shape, parts, drawn_tiles):
    tiling = cut(shape, parts)
    figure = tensor_picture(facts_of(tiling))
    assert ntiles(figure) == drawn_tiles
    every = rank_colours(max(len(tiling.tiles), 1))
    assert colours(figure) <= {tuple(colour) for colour in every}
    if len(drawn_tiles) == 1:
        assert len(colours(figure)) == len(tiling.tiles)
        assert np.array_equal(drawn(figure, "bands")[0].get_facecolors(), every[: len(tiling.tiles)])


@pytest.mark.parametrize("nholders, shown", [(2, 2), (8, 8), (64, MOST_BANDS)])
def test_a_tile_of_several_ranks_has_the_colours_of_all_or_many_of_them(nholders, shown):
    figure = tensor_picture(facts_of(cut((12,), (1,), replicas=nholders)))
    assert ntiles(figure) == [1]
    assert len(colours(figure)) == shown
    assert any(f"0-{nholders - 1}" in text or "0,1" in text for text in texts(figure))


def test_tiles_say_whose_they_are_where_there_is_room():
    assert "rank 3\ntp 3\n[4:8, 3:6]" in texts(tensor_picture(facts_of(cut((8, 6), (2, 2)))))
    many = texts(tensor_picture(facts_of(cut((64, 128), (8, 8)))))
    assert sum("rank" in text for text in many) >= 64
    rows = texts(tensor_picture(facts_of(cut((640, 640), (64, 1)))))
    assert {"0", "3", "63"} <= set(rows) and "1" not in rows  # beside the tiles, as many as have room


def test_what_no_rank_holds_is_hatched():
    tiling = cut((8, 6), (2, 2))
    figure = tensor_picture(facts_of(Tiling(tiling.shape, tiling.tiles[:3])))
    assert ntiles(figure) == [3]
    assert [axes.patch.get_hatch() for axes in figure.axes if axes.collections] == ["/////"]


def test_very_many_tiles_are_pixels(tmp_path):
    figure = tensor_picture(facts_of(cut((100, 60), (100, 60))))
    assert len(figure.axes[1].texts) == 0 and 100 * 60 > MOST_VECTORS
    save(figure, tmp_path / "many.svg")
    assert (tmp_path / "many.svg").stat().st_size < 200_000


@pytest.mark.parametrize("nranks", [1, 4, 8, 9, 64, 1000])
def test_ranks_have_different_colours_that_are_not_the_white_between_tiles(nranks):
    found = rank_colours(nranks)
    assert found.shape == (nranks, 4)
    assert len(np.unique(found, axis=0)) >= min(nranks, 200)
    assert found[:, :3].min(axis=1).max() < 0.7
    assert len(set(FEW_COLOURS)) == 8


# Plans


def prepared_of(source: Source, target: str, **changes) -> Prepared:
    resources = {"nranks": 4, "memory_nbytes": 64 << 20, "writers": "owner", "hashing": True} | changes
    planned, faults = refusals_of(source, Selection(parse_target(target)), **resources)
    assert planned is not None, faults
    return planned[0]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Source:
    folder = tmp_path_factory.mktemp("llama") / "ckpt"
    write_sample(folder, 1 << 20, parse_target("pp=2,tp=2"), "bfloat16", 0, False)
    return load_alone(folder)


def test_the_largest_tensor_of_each_kind_is_drawn_before_and_after(llama):
    figure = plan_picture(llama, prepared_of(llama, "tp=4"))
    assert ntiles(figure) == [2, 2, 1, 4, 4, 1]  # cut into rows, into columns, replicated; all before, then all after
    assert [len(found.get_paths()) for found in drawn(figure, "bands")][3:5] == [4, 4]
    ntensors = len({fragment.logical_tensor_id for fragment in llama.case.fragments})
    assert any(f"{ntensors} tensors: 3 shown, {ntensors - 3} cut as one of these" in text for text in texts(figure))
    assert any("before: pp=2,tp=2, 4 shards" in text for text in texts(figure))
    assert any(text.startswith("lm_head.weight   bfloat16") and "more cut alike" in text for text in texts(figure))


def test_what_is_cut_in_other_ways_is_said_to_be_left_out(llama, monkeypatch):
    monkeypatch.setattr(pictures, "MOST_TENSORS", 2)
    figure = plan_picture(llama, prepared_of(llama, "tp=4"))
    assert len(ntiles(figure)) == 4
    assert any("cut in other ways and left out: model.layers.0." in text for text in texts(figure))


def test_at_64_ranks_all_tiles_are_there(llama):
    figure = plan_picture(llama, prepared_of(llama, "fsdp=16,tp=4", nranks=64))
    found = ntiles(figure)
    assert found[len(found) // 2 :] == [56, 64, 64, 16, 16]  # 14 rows of a tp rank are on 14 of its 16 fsdp ranks
    assert len(colours(figure)) >= 64


def test_the_matrices_are_the_traffic_of_the_plan(llama):
    prepared = prepared_of(llama, "tp=4")
    figure = plan_picture(llama, prepared)
    squares = matrices(figure)
    shards, ranks = (square.filled(0) for square in squares)
    assert np.array_equal(ranks, traffic(prepared.plan).matrix())
    assert np.array_equal(shards, shard_traffic(prepared.plan, (4, 4)).matrix())
    assert ranks.sum() - np.trace(ranks) > 0


def test_what_comes_from_shards_is_what_the_target_shards_hold():
    source = load_alone(UNEVEN)
    for nranks, writers in ((1, "owner"), (2, "shared"), (5, "shared")):
        prepared = prepared_of(source, "tp=2", nranks=nranks, writers=writers)
        moved = shard_traffic(prepared.plan, (3, 2)).matrix()
        held = [file.nbytes - len(file.head) for file in prepared.target_files]
        assert moved.shape == (3, 2) and moved.sum(axis=0).tolist() == held


def test_a_matrix_of_very_many_ranks_keeps_all_bytes(llama):
    prepared = prepared_of(llama, "tp=4", nranks=300)
    figure = plan_picture(llama, prepared)
    squares = [
        axes.images[0].get_array() for axes in figure.axes if axes.images and axes.images[0].get_array().ndim == 2
    ]
    assert squares[1].shape == (100, 100)
    assert squares[1].sum() == traffic(prepared.plan).nbytes.sum()


def test_a_cut_into_1024_is_seen(llama):
    """White lines would cover such tiles, and a matrix with 4 rows as long as its 1024 columns would be a line."""
    figure = plan_picture(llama, prepared_of(llama, "fsdp=1024"))
    finest = max(drawn(figure, "tiles"), key=lambda found: len(found.get_paths()))
    assert len(finest.get_paths()) > 100 and not np.any(finest.get_linewidths())
    coarse = drawn(figure, "tiles")[0]
    assert np.all(np.array(coarse.get_linewidths()) >= 0.1)
    shards = next(axes for axes in figure.axes if axes.get_ylabel() == "from source shard")
    assert shards.images[0].get_array().shape == (4, 128)
    assert shards.get_position().height * figure.get_figheight() > 1
    assert [label.get_text() for label in shards.get_yticklabels()] == ["0", "1", "2", "3"]


# Files


@pytest.mark.parametrize("suffix, begins", [(".svg", b"<?xml"), (".PNG", PNG)])
def test_a_picture_is_the_same_every_time_and_replaces_what_was_there(suffix, begins, tmp_path):
    path = tmp_path / f"picture{suffix}"
    path.write_text("older")
    contents = []
    for _ in range(2):
        save(tensor_picture(facts_of(cut((8, 6), (2, 2)))), path)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1] and contents[0].startswith(begins)
    assert b"matplotlib.org" not in contents[0] and b"dc:date" not in contents[0]
    assert os.listdir(tmp_path) == [path.name]


def test_a_name_is_shown_as_it_is(tmp_path):
    name = "a$b$c <&> \\frac{1}\n" + 200 * "x" + ".weight"
    save(tensor_picture(facts_of(cut((8,), (2,)), name)), tmp_path / "p.svg")
    shown = "".join(xml.etree.ElementTree.parse(tmp_path / "p.svg").getroot().itertext())
    assert "a$b$c <&> \\frac{1}\\n" in shown and "x.weight" in shown


def test_a_place_that_can_not_be_written_to_is_an_io_error_and_leaves_nothing(tmp_path, monkeypatch):
    figure = tensor_picture(facts_of(cut((8,), (2,))))
    path = tmp_path / "p.svg"
    path.write_text("older")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match=r"p\.svg: can't write the picture to: No space left"):
        save(figure, path)
    assert os.listdir(tmp_path) == ["p.svg"] and path.read_text() == "older"


def test_pictures_leave_the_settings_of_matplotlib_alone_and_use_no_pyplot(tmp_path):
    (tmp_path / "matplotlibrc").write_text("axes.facecolor: red\nlines.linewidth: 17\nsavefig.dpi: 7\n")
    program = f"""
import sys, matplotlib
def settings():  # reading the backend alone would choose one, and import pyplot
    return {{key: matplotlib.rcParams[key] for key in matplotlib.rcParams if "backend" not in key}}
before = settings()
from reshard_mpi.cli import parse
from reshard_mpi.commands import run_alone
run_alone(parse(["inspect", {str(UNEVEN)!r}, "w.col", "--plot", "p.png"]))
assert settings() == before and before["lines.linewidth"] == 17
assert "matplotlib.pyplot" not in sys.modules
"""
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environ, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    save(tensor_picture(tensor_tiles(load_alone(UNEVEN), "w.col")), tmp_path / "q.png")
    assert (tmp_path / "p.png").read_bytes() == (tmp_path / "q.png").read_bytes()


# Commands


def test_plan_and_inspect_draw_beside_what_they_print(tmp_path, capsys):
    for words in (["plan", str(UNEVEN)], ["inspect", str(UNEVEN), "w.col"], ["plan", str(UNEVEN), "--json"]):
        assert run_alone(parse(words)) == 0
        plain = capsys.readouterr().out
        assert run_alone(parse([*words, "--plot", str(tmp_path / "p.svg")])) == 0
        assert capsys.readouterr().out == plain
        assert (tmp_path / "p.svg").read_bytes().startswith(b"<?xml")
        (tmp_path / "p.svg").unlink()


@pytest.mark.parametrize(
    "why, words, told",
    [
        ("a suffix that is no picture's", ["plan", str(UNEVEN), "--plot", "p.pdf"], r"p\.pdf.*\.svg or \.png"),
        ("no suffix", ["inspect", str(UNEVEN), "w.col", "--plot", "svg"], r"'svg'.*\.svg or \.png"),
        ("within SOURCE", ["plan", str(UNEVEN), "--plot", str(UNEVEN / "p.svg")], "a file elsewhere"),
        ("of no tensor", ["inspect", str(UNEVEN), "--plot", "p.svg"], "say which"),
        ("of an unknown tensor", ["inspect", str(UNEVEN), "nothing", "--plot", "p.svg"], "names no tensor"),
        ("of no files", "plan --simulate llama-8b --from tp=8 --target tp=4 --plot p.svg".split(), "--plot"),
    ],
)
def test_what_can_not_be_drawn_is_a_usage_error(why, words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(UNEVEN))
    with pytest.raises(UsageError, match=told):
        run_alone(parse(words))
    assert not os.listdir(tmp_path) and sorted(os.listdir(UNEVEN)) == before


def test_a_folder_that_is_not_there_is_an_io_error(tmp_path):
    with pytest.raises(StorageError, match="can't be written to"):
        run_alone(parse(["plan", str(UNEVEN), "--plot", str(tmp_path / "none" / "p.svg")]))


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'reshard_mpi\[plot\]'"):
        run_alone(parse(["plan", str(UNEVEN), "--plot", str(tmp_path / "p.svg")]))
    assert capsys.readouterr().out == "" and not os.listdir(tmp_path)
