"""Small checkpoints made by hand, each for one reason; `generate.write_case` writes them."""

from dataclasses import replace

from tests.reference.describe import CaseSpec, Held, Knobs, TensorSpec

PLAIN = Knobs(padding=0, null_digests=0, extra_arrays=0)

WHOLE, LOW, HIGH = ((0, 0), (4, 4)), ((0, 0), (2, 4)), ((2, 0), (2, 4))

# What coordinates show of a 4 x 4 tensor on a mesh of pp 2, tp 2.
# (why this row is here, {(pp, tp): boxes (offset, extent)}, what pp does, what tp does); None: refused if the
# target has that axis
COORDINATES = [
    (
        "rows by pp, the same at both tp",
        {(0, 0): [LOW], (0, 1): [LOW], (1, 0): [HIGH], (1, 1): [HIGH]},
        0,
        "replicate",
    ),
    (
        "a part without elements is evidence",
        {(0, 0): [WHOLE], (0, 1): [((4, 0), (0, 4))]},
        {"stages": [0], "of": 2},
        0,
    ),
    (
        "a part without elements that would name two tensor axes is none",
        {(0, 0): [WHOLE], (0, 1): [((4, 4), (0, 0))]},
        {"stages": [0], "of": 2},
        "replicate",
    ),
    ("one stage, both tp", {(1, 0): [WHOLE], (1, 1): [WHOLE]}, {"stages": [1], "of": 2}, "replicate"),
    ("saved once", {(0, 1): [WHOLE]}, {"stages": [0], "of": 2}, "replicate"),
    ("everywhere", {(pp, tp): [WHOLE] for pp in (0, 1) for tp in (0, 1)}, "replicate", "replicate"),
    (
        "parts of two groups on each rank",
        {
            (0, 0): [((0, 0), (1, 4)), ((2, 0), (1, 4))],
            (0, 1): [((1, 0), (1, 4)), ((3, 0), (1, 4))],
        },
        {"stages": [0], "of": 2},
        0,
    ),
    (
        "the same two boxes on both tp",
        {(0, 0): [LOW, HIGH], (0, 1): [LOW, HIGH]},
        {"stages": [0], "of": 2},
        "replicate",
    ),
    (
        "split, although some coordinates hold nothing",
        {(0, 0): [LOW], (0, 1): [((2, 0), (1, 4))], (1, 1): [((3, 0), (1, 4))]},
        0,
        0,
    ),
    ("no two fragments differ in one mesh axis alone", {(0, 0): [LOW], (1, 1): [HIGH]}, None, None),
    (
        "two tensor axes follow one mesh axis",
        {(0, 0): [LOW], (0, 1): [((2, 0), (2, 2)), ((2, 2), (2, 2))]},
        {"stages": [0], "of": 2},
        None,
    ),
    (
        "boxes differ, but along each tensor axis the intervals are the same",
        {
            (0, 0): [((0, 0), (2, 2)), ((2, 2), (2, 2))],
            (0, 1): [((0, 2), (2, 2)), ((2, 0), (2, 2))],
        },
        {"stages": [0], "of": 2},
        None,
    ),
]


def tensor(name: str, content: int = 0, **more) -> TensorSpec:
    """A float32 parameter, on all ranks unless `more` says otherwise."""
    spec = TensorSpec(name, name, "model", "parameter", "float32", (4, 4), content, {}, ())
    return replace(spec, fused_in_one_array=False, **more)


def case_of(*tensors: TensorSpec, mesh: dict[str, int]) -> CaseSpec:
    nranks = 1
    for size in mesh.values():
        nranks *= size
    tensors = tuple(
        replace(t, uses={axis: t.uses.get(axis, Held()) for axis in mesh}, nesting=tuple(mesh)) for t in tensors
    )
    return CaseSpec("handmade", 1, mesh, tuple(range(nranks)), tensors, None, {"world_size": 1}, (), PLAIN)


def case_of_coordinates(rows: list) -> CaseSpec:
    """One tensor a row of `COORDINATES`."""
    tensors = [
        tensor(why, n, boxes=tuple((place, *box) for place, held in boxes.items() for box in held))
        for n, (why, boxes, _, _) in enumerate(rows)
    ]
    return case_of(*tensors, mesh={"pp": 2, "tp": 2})


def case_of_many_boxes(count: int) -> CaseSpec:
    """A tensor in `count` boxes on one rank."""
    boxes = tuple(((), (n, 0), (1, 4)) for n in range(count))
    return case_of(tensor("w", shape=(count, 4), boxes=boxes), mesh={})


def case_of_one_rank_with_everything() -> CaseSpec:
    """Five of six ranks hold nothing: only the mesh tells of them."""
    return case_of(tensor("w", uses={"dp": Held((2,)), "pp": Held((0,))}), mesh={"dp": 3, "pp": 2})


def case_of_clashing_keys() -> CaseSpec:
    """Two tensors of one name go by their ids, one of which is the name of a third."""
    return case_of(
        tensor("x", fqn="w"),
        tensor("y", 1, fqn="w"),
        tensor("z", 2, fqn="x"),
        mesh={"dp": 2},
    )


def case_of_a_key_that_headers_keep() -> CaseSpec:
    return case_of(tensor("w", fqn="__metadata__"), mesh={"dp": 2})
