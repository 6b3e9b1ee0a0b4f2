"""The oracle file of a case: whole tensors to check against, carried through to the output."""

import os
from pathlib import Path

from reshard_mpi.check.whole import whole_array
from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.checkpoint.manifest import CASE_FILE, Case, Oracle
from reshard_mpi.errors import InputError, IntegrityError, ReshardError, raise_first
from reshard_mpi.storage.files import COPY_NBYTES, Files, create_file
from reshard_mpi.storage.safetensors import StoredArray, build_header, read_header


def oracle_arrays(folder: Path, case: Case) -> tuple[dict[str, StoredArray], list[ReshardError]]:
    """The array of each oracle, by logical tensor; and what is wrong with a file that is missing or contradicts the manifest."""
    if not case.oracles or case.oracle_file is None:
        return {}, []
    found: dict[str, StoredArray] = {}
    faults: list[ReshardError] = []
    try:
        with Files(folder) as files:
            arrays = read_header(files.descriptor(case.oracle_file), str(folder / case.oracle_file))
    except ReshardError as fault:
        return {}, [fault]
    for oracle in case.oracles:
        try:
            found[oracle.logical_tensor_id] = _array_of(oracle, arrays, str(folder / case.oracle_file))
        except ReshardError as fault:
            faults.append(fault)
    return found, faults


def _array_of(oracle: Oracle, arrays: dict[str, StoredArray], where: str) -> StoredArray:
    array = arrays.get(oracle.payload_key)
    if array is None or (array.dtype, array.shape) != (oracle.dtype, oracle.shape):
        found = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
        raise InputError(
            where,
            f"{oracle.payload_key!r} is {found}, {CASE_FILE} says {oracle.dtype} {list(oracle.shape)} for the "
            f"oracle of {oracle.logical_tensor_id}",
        )
    return array


def copy_oracles(folder: Path, source: Case, written: Case, into: Path) -> None:
    """The oracle file of `written`: the arrays of its oracles, byte for byte."""
    if not written.oracles or source.oracle_file is None or written.oracle_file is None:
        return
    arrays, faults = oracle_arrays(folder, source)
    raise_first(faults)
    # Tensors may share a key of the old file; largest items first, so that all are aligned.
    keys = {oracle.payload_key: arrays[oracle.logical_tensor_id] for oracle in written.oracles}
    order = sorted(keys, key=lambda key: (-DTYPES[keys[key].dtype].nbits, key))
    head, spans = build_header([(key, keys[key].dtype, keys[key].shape) for key in order], {"format": "pt"})
    create_file(into / written.oracle_file, len(head) + sum(span.nbytes for span in spans), head)
    with Files(folder) as read, Files(into, os.O_RDWR) as write:
        for key, span in zip(order, spans, strict=True):
            for done in range(0, span.nbytes, COPY_NBYTES):
                part = memoryview(bytearray(min(COPY_NBYTES, span.nbytes - done)))
                read.read(source.oracle_file, keys[key].begin + done, part)
                write.write(written.oracle_file, span.begin + done, part)
        write.sync(written.oracle_file)


def oracle_file_faults(folder: Path, case: Case) -> list[ReshardError]:
    """What contradicts the manifest, or the digests, in the oracle file itself."""
    arrays, faults = oracle_arrays(folder, case)
    where = str(folder / (case.oracle_file or ""))
    with Files(folder) as files:
        for oracle in case.oracles if arrays else ():
            array = arrays.get(oracle.logical_tensor_id)
            if array is None:
                continue
            try:
                digest = whole_array(case.oracle_file or "", oracle.payload_key, array).digest(files)
            except ReshardError as fault:
                faults.append(fault)
                continue
            if digest != oracle.sha256:
                said = f"the oracle of {oracle.logical_tensor_id} is {oracle.sha256}"
                faults.append(IntegrityError(where, f"array {oracle.payload_key!r} has digest {digest}, {said}"))
    return faults
