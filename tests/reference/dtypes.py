"""Element types as raw cells: numpy never has to know what the bytes mean.

An array is held as uint8 with one more axis at the end, the *cell* of one element: its bytes, or its bits
where an element is narrower than a byte. Slicing the other axes is slicing elements, for any dtype.
"""

import numpy as np

# name in a manifest: (name in a safetensors header, bits of one element)
DTYPES = {
    "bool": ("BOOL", 8),
    "uint8": ("U8", 8),
    "int8": ("I8", 8),
    "uint16": ("U16", 16),
    "int16": ("I16", 16),
    "uint32": ("U32", 32),
    "int32": ("I32", 32),
    "uint64": ("U64", 64),
    "int64": ("I64", 64),
    "float16": ("F16", 16),
    "bfloat16": ("BF16", 16),
    "float32": ("F32", 32),
    "float64": ("F64", 64),
    "complex64": ("C64", 64),
    "float8_e4m3fn": ("F8_E4M3", 8),
    "float8_e5m2": ("F8_E5M2", 8),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 8),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 8),
    "float8_e8m0fnu": ("F8_E8M0", 8),
    "float6_e2m3fn": ("F6_E2M3", 6),
    "float6_e3m2fn": ("F6_E3M2", 6),
    "float4_e2m1fn": ("F4", 4),
}
NAMES_IN_HEADERS = {header_name: name for name, (header_name, _) in DTYPES.items()}


def bits(dtype: str) -> int:
    """Bits of one element."""
    return DTYPES[dtype][1]


def nelems(shape) -> int:
    """Elements of an array; 1 for a 0-d one."""
    count = 1
    for extent in shape:
        count *= extent
    return count


def to_cells(raw: bytes, dtype: str, shape) -> np.ndarray:
    """Packed row-major bytes -> uint8 array of `shape` + (bytes of an element,), or + (its bits,).

    >>> to_cells(b"abcd", "uint16", [2]).shape
    (2, 2)
    >>> to_cells(b"abc", "float6_e2m3fn", [2, 2]).shape
    (2, 2, 6)
    """
    cells = np.frombuffer(raw, np.uint8)
    if bits(dtype) < 8:
        return np.unpackbits(cells, bitorder="little").reshape(*shape, bits(dtype))
    return cells.reshape(*shape, bits(dtype) // 8)


def to_bytes(cells: np.ndarray, dtype: str) -> bytes:
    """The reverse of `to_cells`."""
    if bits(dtype) < 8:
        assert cells.size % 8 == 0, "a sub-byte array that is no whole number of bytes"
        return np.packbits(cells.reshape(-1), bitorder="little").tobytes()
    return np.ascontiguousarray(cells).tobytes()


def empty_cells(dtype: str, shape) -> np.ndarray:
    """Zeroed cells of an array of `shape`."""
    return np.zeros([*shape, bits(dtype) if bits(dtype) < 8 else bits(dtype) // 8], np.uint8)
