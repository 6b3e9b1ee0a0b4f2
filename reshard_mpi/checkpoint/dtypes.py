"""Element types: torch/ml_dtypes names, their widths, and how safetensors spells them.

The spellings are those of the safetensors 0.8 parser; shapes count elements there too, also of types narrower than a byte.
"""

from dataclasses import dataclass

from reshard_mpi.errors import InputError


@dataclass(frozen=True)
class DType:
    """One element type; `nbits` is the width of an element, packed without gaps."""

    name: str
    nbits: int
    safetensors: str


DTYPES = {
    name: DType(name, nbits, spelling)
    for name, nbits, spelling in [
        ("bool", 8, "BOOL"),
        ("uint8", 8, "U8"),
        ("int8", 8, "I8"),
        ("uint16", 16, "U16"),
        ("int16", 16, "I16"),
        ("uint32", 32, "U32"),
        ("int32", 32, "I32"),
        ("uint64", 64, "U64"),
        ("int64", 64, "I64"),
        ("float16", 16, "F16"),
        ("float32", 32, "F32"),
        ("float64", 64, "F64"),
        ("bfloat16", 16, "BF16"),
        ("complex64", 64, "C64"),
        ("float8_e4m3fn", 8, "F8_E4M3"),
        ("float8_e5m2", 8, "F8_E5M2"),
        ("float8_e4m3fnuz", 8, "F8_E4M3FNUZ"),
        ("float8_e5m2fnuz", 8, "F8_E5M2FNUZ"),
        ("float8_e8m0fnu", 8, "F8_E8M0"),
        ("float6_e2m3fn", 6, "F6_E2M3"),
        ("float6_e3m2fn", 6, "F6_E3M2"),
        ("float4_e2m1fn", 4, "F4"),
    ]
}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES.values()}


def dtype_named(name: str, where: str) -> DType:
    """The type called `name`; InputError at `where` when there is none."""
    if name not in DTYPES:
        raise InputError(where, f"dtype {name!r} is not known; expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def nbytes_of(nelems: int, dtype: DType, where: str) -> int:
    """Bytes of `nelems` packed elements; InputError when they don't fill whole bytes.

    >>> nbytes_of(6, DTYPES["float4_e2m1fn"], "w")
    3
    """
    nbits = nelems * dtype.nbits
    if nbits % 8:
        raise InputError(
            where,
            f"{nelems} elements of {dtype.name} are {nbits} bits, no whole number of bytes; cut it on a byte boundary",
        )
    return nbits // 8
