"""What a generated checkpoint is like, before a byte of it exists: topology, tensors, what mesh axes do.

`describe(dice)` gives a `CaseSpec`; `generate.write_case` writes it.
"""

from dataclasses import dataclass, replace

from tests.reference import dtypes
from tests.reference.dice import Dice
from tests.reference.mesh import NESTING, in_order
from tests.reference.rules import EXPERT, LAYER

SUB_BYTE_UNIT = {
    "float4_e2m1fn": 2,
    "float6_e2m3fn": 4,
    "float6_e3m2fn": 4,
}  # elements that are a whole number of bytes
UNKNOWN_AXES = ("moe_dp", "zz")


@dataclass(frozen=True)
class Knobs:
    """How large and how odd. Percentages say how often; 0 turns a feature off."""

    max_ranks: int = 12
    max_tensors: int = 7
    max_extent: int = 9
    max_nelems: int = 600
    sub_byte: int = 15
    irregular: int = 30
    padding: int = 25
    fused: int = 20
    shared: int = 30
    tied: int = 30
    optimizer: int = 30
    null_digests: int = 20
    layout: int = 40
    saved_once: int = 20
    zero_size: int = 8
    unwritten_empty: int = 15  # parts without elements leave no fragment
    careless_empty: int = 15  # parts without elements are recorded with another box without elements
    odd_names: int = 15
    minor_version: int = 10
    extra_arrays: int = 15


# Knobs of a checkpoint whose cuts and stages are those of a target, so that its boxes come back as they were.
REGULAR = {
    "sub_byte": 0,
    "irregular": 0,
    "fused": 0,
    "layout": 0,
    "saved_once": 0,
    "zero_size": 0,
    "unwritten_empty": 0,
    "careless_empty": 0,
}


@dataclass(frozen=True)
class Split:
    """A mesh axis cuts a tensor axis; `irregular_seed` cuts at random places, None by torch.chunk's rule."""

    tensor_axis: int
    irregular_seed: int | None = None


@dataclass(frozen=True)
class Held:
    """Only these indices of a mesh axis hold the tensor; None: all do."""

    indices: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TensorSpec:
    """`content` names the bytes: tensors of the same content, dtype and shape are equal."""

    logical_tensor_id: str
    fqn: str
    component_id: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    content: int
    uses: dict[str, Split | Held]
    nesting: tuple[str, ...]  # mesh axes, outermost first
    tie_group_id: str | None = None
    fused_axis: int | None = None  # the groups lie one after the other on this tensor axis
    groups: tuple[int, ...] = ()  # extents of the groups, which are cut one by one
    fused_in_one_array: bool = True
    stored_with: str | None = None  # tensors of one name share the stored arrays
    stored_side_by_side: bool = False  # as parts of them (along tensor axis 0), else as the same elements
    padding_percent: int = 0
    unwritten_empty: bool = False
    careless_empty: bool = False
    boxes: tuple = ()  # (coordinates in the order of the mesh, offset, extent): these, whatever `uses` says


@dataclass(frozen=True)
class CaseSpec:
    case_id: str
    seed: int  # of every byte that has no other meaning
    mesh: dict[str, int]  # mesh axis -> size; empty: one rank without a mesh
    rank_order: tuple[int, ...]  # n-th coordinate tuple -> rank
    tensors: tuple[TensorSpec, ...]
    layout: dict[str, dict] | None
    target: dict[str, int]
    oracles: tuple[str, ...]
    knobs: Knobs
    schema_version: str = "1.0.0"
    unknown_keys: bool = False


def describe(dice: Dice, knobs: Knobs) -> CaseSpec:
    """One checkpoint, all choices from `dice`."""
    mesh = describe_mesh(dice, knobs)
    tensors = describe_tensors(dice, knobs, mesh)
    layout = describe_layout(dice, mesh, tensors) if dice.chance(knobs.layout) else None
    nranks = 1
    for size in mesh.values():
        nranks *= size
    minor = dice.chance(knobs.minor_version)
    return CaseSpec(
        case_id=dice.pick(["case", "run 7/step=100", "größe"]),
        seed=dice.integer(0, 2**32 - 1),
        mesh=mesh,
        rank_order=tuple(dice.shuffled(range(nranks)) if dice.chance(20) else range(nranks)),
        tensors=tuple(tensors),
        layout=layout,
        target=dice.pick([{"world_size": 1}, {"dp": 2}, {"pp": 2}]),
        oracles=tuple(dice.some([t.logical_tensor_id for t in tensors], dice.pick([0, 50, 100]))),
        knobs=knobs,
        schema_version="1.3.0" if minor else "1.0.0",
        unknown_keys=minor,
    )


def describe_mesh(dice: Dice, knobs: Knobs) -> dict[str, int]:
    """Some mesh axes in any order, few enough ranks; the commonest axes most often."""
    mesh, nranks = {}, 1
    names = ["tp"] * 4 + ["pp"] * 3 + ["fsdp"] * 2 + ["ep", "ep", "dp", "cp", dice.pick(UNKNOWN_AXES)]
    for axis in list(dict.fromkeys(dice.shuffled(names)))[: dice.pick([1, 2, 2, 2, 3, 3, 4, 0])]:
        size = dice.pick([2, 2, 2, 3, 3, 4, 1])
        if nranks * size <= knobs.max_ranks:
            mesh[axis] = size
            nranks *= size
    return mesh


# Tensors


def describe_tensors(dice: Dice, knobs: Knobs, mesh: dict[str, int]) -> list[TensorSpec]:
    tensors: list[TensorSpec] = []
    names = dice.shuffled(fqns(dice, knobs))[: dice.integer(1, knobs.max_tensors)]
    for fqn in names:
        tensor = describe_tensor(dice, knobs, mesh, fqn, content=len(tensors))
        tensors.append(tensor)
        if dice.chance(knobs.optimizer):
            tensors += optimizer_state(dice, knobs, mesh, tensor, content=len(tensors))
    tensors += companions(dice, knobs, mesh, tensors)
    return tensors


def fqns(dice: Dice, knobs: Knobs) -> list[str]:
    """Names with and without layers and experts; layers may be missing in the middle."""
    root = dice.pick(["", "model.", "transformer."])
    stack = dice.pick(["layers", "layer", "h", "blocks", "block"])
    names = [
        f"{root}{name}" for name in ("embed_tokens.weight", "wpe.weight", "norm.weight", "lm_head.weight", "scale")
    ]
    names += [f"{root}{stack}.{n}.attn.qkv.weight" for n in dice.some(range(7), 60)]
    names += [f"{root}{stack}.{n}.mlp.experts.{e}.w1" for n in range(2) for e in dice.some(range(5), 40)]
    names += [f"{root}{stack}.{n}.mlp.router.weight" for n in dice.some(range(3))]
    if dice.chance(knobs.odd_names):
        names += ["größe", "a|b#c", "with space", 'quote"d', "back\\slash", "layers.x.y", "experts.3"]
    return names


def describe_tensor(dice: Dice, knobs: Knobs, mesh: dict[str, int], fqn: str, content: int) -> TensorSpec:
    dtype = describe_dtype(dice, knobs)
    shape = describe_shape(dice, knobs, dtype)
    tensor = TensorSpec(
        logical_tensor_id=dice.pick([fqn, fqn, f"model:{fqn}"]),
        fqn=fqn,
        component_id="model",
        role=dice.pick(["parameter", "parameter", "buffer"]),
        dtype=dtype,
        shape=shape,
        content=content,
        uses=describe_uses(dice, knobs, mesh, fqn, dtype, shape),
        nesting=tuple(dice.shuffled(mesh)) if dice.chance(knobs.irregular) else tuple(in_order(mesh, NESTING)),
        padding_percent=dice.pick([20, 100]) if dice.chance(knobs.padding) else 0,
        unwritten_empty=dice.chance(knobs.unwritten_empty),
        careless_empty=dice.chance(knobs.careless_empty),
    )
    return fuse(dice, tensor) if dice.chance(knobs.fused) else tensor


def describe_dtype(dice: Dice, knobs: Knobs) -> str:
    sub_byte = dice.chance(knobs.sub_byte)
    return dice.pick([dtype for dtype in dtypes.DTYPES if (dtype in SUB_BYTE_UNIT) == sub_byte])


def describe_shape(dice: Dice, knobs: Knobs, dtype: str) -> tuple[int, ...]:
    """0-d to 4-d. Rows of a sub-byte dtype are whole bytes: only a cut of the last axis can go wrong."""
    ndim = dice.pick([0, 1, 1, 2, 2, 2, 3, 4])
    shape = [dice.integer(1, knobs.max_extent) for _ in range(ndim)]
    while dtypes.nelems(shape) > knobs.max_nelems:
        shape[shape.index(max(shape))] //= 2
    if dtype in SUB_BYTE_UNIT:
        shape = shape if len(shape) > 1 else [*shape, 1]
        shape[-1] = SUB_BYTE_UNIT[dtype] * max(1, shape[-1] // 2)
    if shape and dice.chance(knobs.zero_size):
        shape[dice.integer(0, len(shape) - 1)] = 0
    return tuple(shape)


def describe_uses(
    dice: Dice, knobs: Knobs, mesh: dict[str, int], fqn: str, dtype: str, shape
) -> dict[str, Split | Held]:
    return {axis: describe_use(dice, knobs, axis, size, fqn, dtype, shape) for axis, size in mesh.items()}


def describe_use(dice: Dice, knobs: Knobs, axis: str, size: int, fqn: str, dtype: str, shape) -> Split | Held:
    """What the axis is for most of the time, and now and then something else."""
    usual = {
        "pp": "place",
        "ep": "place" if EXPERT.search(fqn) else "split",
        "dp": "replicate",
        "cp": "replicate",
    }
    use = usual.get(axis, "split") if dice.chance(75) else dice.pick(["split", "replicate", "place"])
    if use == "split" and shape:
        seed = dice.integer(0, 2**16) if dtype in SUB_BYTE_UNIT or dice.chance(knobs.irregular) else None
        return Split(describe_split_axis(dice, axis, dtype, shape), seed)
    if use == "place" and axis in ("pp", "ep"):
        return Held(describe_stages(dice, fqn, axis, size))
    if axis not in ("pp", "ep") and dice.chance(knobs.saved_once):
        return Held((dice.integer(0, size - 1),))
    return Held()


def describe_split_axis(dice: Dice, axis: str, dtype: str, shape) -> int:
    """A tensor axis; of a sub-byte tensor seldom the last, whose chunks may fall off its bytes."""
    axes = list(range(len(shape)))
    if dtype in SUB_BYTE_UNIT and len(axes) > 1 and dice.chance(80):
        axes.pop()
    return 0 if axis == "fsdp" and dice.chance(80) else dice.pick(axes)


def describe_stages(dice: Dice, fqn: str, axis: str, size: int) -> tuple[int, ...]:
    """One stage; of tensors without a number sometimes several."""
    several = not (LAYER if axis == "pp" else EXPERT).search(fqn) and dice.chance(15)
    stages = dice.some(range(size)) if several else []
    return tuple(stages or [dice.integer(0, size - 1)])


def fuse(dice: Dice, tensor: TensorSpec) -> TensorSpec:
    """Cut an axis into groups, each of which is then cut by the mesh: gate and up, or query, key, value."""
    last = len(tensor.shape) - 1
    candidates = [
        a for a, extent in enumerate(tensor.shape) if extent >= 2 and not (tensor.dtype in SUB_BYTE_UNIT and a == last)
    ]
    if not candidates:
        return tensor
    axis = dice.pick(candidates)
    first = dice.integer(1, tensor.shape[axis] - 1)
    groups = (first, tensor.shape[axis] - first)
    if groups[1] >= 2 and dice.chance(40):
        groups = (first, 1, groups[1] - 1)
    return replace(tensor, fused_axis=axis, groups=groups, fused_in_one_array=dice.chance(80), careless_empty=False)


def optimizer_state(
    dice: Dice, knobs: Knobs, mesh: dict[str, int], tensor: TensorSpec, content: int
) -> list[TensorSpec]:
    """Moments of one parameter: of its fqn, or of fqns of their own; cut like it, or otherwise."""
    states = dice.pick([["exp_avg"], ["exp_avg", "exp_avg_sq"], ["master"]])
    same_fqn = dice.chance(70)
    shape = tensor.shape
    out = []
    for n, state in enumerate(states):
        dtype = tensor.dtype if tensor.dtype in SUB_BYTE_UNIT else "float32"
        other = dice.chance(30)
        out.append(
            replace(
                tensor,
                logical_tensor_id=f"{state}/{tensor.logical_tensor_id}",
                fqn=tensor.fqn if same_fqn else f"{state}.{tensor.fqn}",
                component_id=dice.pick(["optimizer", "ema"]),
                role="optimizer_state",
                dtype=dtype,
                content=content + n,
                uses=describe_uses(dice, knobs, mesh, tensor.fqn, dtype, shape) if other else tensor.uses,
            )
        )
    return out


def companions(dice: Dice, knobs: Knobs, mesh: dict[str, int], tensors: list[TensorSpec]) -> list[TensorSpec]:
    """Tensors tied to one that is there, or sharing its stored arrays."""
    out: list[TensorSpec] = []
    plain = [n for n, t in enumerate(tensors) if t.component_id == "model" and not t.groups]
    if plain and dice.chance(knobs.tied):
        n = dice.pick(plain)
        tensors[n] = replace(tensors[n], tie_group_id="tied")
        name = f"tied.{tensors[n].fqn}"
        uses = (
            describe_uses(dice, knobs, mesh, name, tensors[n].dtype, tensors[n].shape)
            if dice.chance(60)
            else tensors[n].uses
        )
        out.append(replace(tensors[n], logical_tensor_id=f"tied:{name}", fqn=name, uses=uses))
    if plain and dice.chance(knobs.shared):
        n = dice.pick(plain)
        side_by_side = (
            bool(tensors[n].shape)
            and not (tensors[n].dtype in SUB_BYTE_UNIT and len(tensors[n].shape) == 1)
            and dice.chance(60)
        )
        tensors[n] = replace(tensors[n], stored_with="storage", stored_side_by_side=side_by_side, careless_empty=False)
        name = f"view.{tensors[n].fqn}"
        content = 1000 if side_by_side and tensors[n].tie_group_id is None else tensors[n].content
        out.append(replace(tensors[n], logical_tensor_id=name, fqn=name, content=content))
    return out


# Layout


def describe_layout(dice: Dice, mesh: dict[str, int], tensors: list[TensorSpec]) -> dict[str, dict]:
    """As a chain of targets would have left it: rules for axes of this topology, and for some of others."""
    gone = {
        axis: dice.pick([2, 3, 4])
        for axis in ("pp", "dp", "fsdp", "ep", "tp", "zz")
        if mesh.get(axis, 1) == 1 and dice.chance(50)
    }
    layout = {}
    for tensor in tensors:
        if dice.chance(10):
            continue
        rules = {
            axis: rule_of_use(axis, size, tensor.uses[axis])
            for axis, size in mesh.items()
            if size > 1 and dice.chance(80)
        }
        rules |= {axis: former_rule(dice, tensor, axis, size) for axis, size in gone.items()}
        if "pp" in rules and isinstance(rules["pp"], dict) and dice.chance(30):
            size = dice.pick([2, 3, 4])
            rules["pp"] = {"stages": list(describe_stages(dice, tensor.fqn, "pp", size)), "of": size}
        layout[tensor.logical_tensor_id] = rules
    return layout


def rule_of_use(axis: str, size: int, use: Split | Held):
    if isinstance(use, Split):
        return use.tensor_axis
    if axis in ("pp", "ep") and use.indices is not None and len(use.indices) < size:
        return {"stages": list(use.indices), "of": size}
    return "replicate"


def former_rule(dice: Dice, tensor: TensorSpec, axis: str, size: int):
    """What an axis that the source no longer has did."""
    if axis in ("pp", "ep") and dice.chance(80):
        return {"stages": list(describe_stages(dice, tensor.fqn, axis, size)), "of": size}
    axes = [a for a in range(len(tensor.shape)) if not (tensor.dtype in SUB_BYTE_UNIT and a == len(tensor.shape) - 1)]
    return dice.pick(axes) if axes and axis != "dp" and dice.chance(80) else "replicate"
