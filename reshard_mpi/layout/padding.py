"""Padding that a layout file asks for: arrays of the target that are larger than the tensors in them, by zeros at the end.

    [padding]
    "embed_tokens.weight" = { multiple = "128 * tp" }   # along `axis` (0 if it isn't said); a mesh axis is its size in the target
    "lm_head.weight" = { to = 32128 }

    vocabulary of 10 rows, padded to 12, tp = 4     |0 1 2|3 4 5|6 7 8|9 . .|

Trainers want a vocabulary that tp divides (Megatron's make_vocab_size_divisible_by). The tensor keeps its shape: what is added is
`padding` of its fragments, of which the case format says that it is storage only. So nothing is made up that could be taken for
values of the model, `compare` sees the same tensor, and a job that goes on from the target reads past the padding. It belongs to
one target alone: the next one has none unless its layout asks for it. What mesh axes split is the padded size.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec import Struct

from reshard_mpi.checkpoint.mesh import RANK_ORDER
from reshard_mpi.errors import InputError, ReshardError
from reshard_mpi.layout.patterns import matches
from reshard_mpi.layout.rules import Tensor

MOST_ELEMENTS = 1 << 58  # of any type: offsets in bytes stay far inside int64

Number = Callable[
    [str, int | str, Mapping[str, int]], int
]  # (where, size as the file has it, further names) -> elements


class Says(Struct, frozen=True, forbid_unknown_fields=True):
    """How far an axis is padded, as the file has it: `to` so many elements, or to the next `multiple` of them."""

    to: int | str | None = None
    multiple: int | str | None = None
    axis: int = 0


@dataclass(frozen=True)
class Pad:
    """One line of [padding]; `where` names it."""

    where: str
    pattern: str
    says: Says

    def shape_of(self, tensor: Tensor, size: int) -> tuple[int, ...]:
        """The shape to which the tensor is padded; `size` is the value of `to` or `multiple`."""
        axis, shape = self.says.axis, tensor.shape
        if not 0 <= axis < len(shape):
            raise InputError(self.where, f"pads axis {axis} of tensor {tensor.tensor_id}, which has {len(shape)} axes")
        wanted = size if self.says.to is not None else -(-shape[axis] // size) * size
        if wanted < shape[axis]:
            raise InputError(
                self.where,
                f"{wanted} elements are fewer than the {shape[axis]} along axis {axis} of tensor {tensor.tensor_id}; "
                "give as many or more, or trim it",
            )
        padded = (*shape[:axis], wanted, *shape[axis + 1 :])
        if math.prod(padded) >= MOST_ELEMENTS:
            raise InputError(
                self.where, f"pads tensor {tensor.tensor_id} to {list(padded)}: more elements than a file holds"
            )
        return padded


class Padded(NamedTuple):
    """Tensors and the shapes to which they are padded, and what is wrong with what is asked for."""

    shapes: dict[str, tuple[int, ...]]
    faults: list[ReshardError]


def parse_pad(pattern: str, raw: object, where: str) -> Pad:
    """One line of [padding]; InputError at `where` when it is none."""
    try:
        says = msgspec.convert(raw, Says)
    except msgspec.ValidationError as error:
        raise InputError(where, f"{error}; expected {{ to = N }} or {{ multiple = N }}, and axis") from error
    if (says.to is None) == (says.multiple is None):
        raise InputError(where, "says how far twice, or not at all; expected one of to and multiple")
    return Pad(where, pattern, says)


def padded(pads: Sequence[Pad], tensors: Iterable[Tensor], sizes: Mapping[str, int], number: Number) -> Padded:
    """The shapes to which tensors are padded in a target whose mesh axes have these sizes. The first pad that matches counts."""
    found, axis_sizes, idle = Padded({}, []), dict.fromkeys(RANK_ORDER, 1) | dict(sizes), set(pads)
    for tensor in tensors:
        pad = next((pad for pad in pads if matches(pad.pattern, tensor.fqn)), None)
        if pad is None:
            continue
        idle.discard(pad)
        says = pad.says
        try:
            size = number(pad.where, says.multiple if says.to is None else says.to, axis_sizes)  # type: ignore[arg-type]
            if size < 1:
                raise InputError(pad.where, f"pads to {size} elements; expected 1 or more")
            shape = pad.shape_of(tensor, size)
            if shape != tensor.shape:
                found.shapes[tensor.tensor_id] = shape
        except InputError as fault:
            found.faults.append(fault)
    found.faults.extend(
        InputError(pad.where, "matches no tensor that isn't padded by a line before it; change the pattern")
        for pad in pads
        if pad in idle
    )
    return found
