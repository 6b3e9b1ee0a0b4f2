"""What rank 0 alone knows of a job, and does: the plan, OUT.partial, the manifest, the report. No MPI.

All that reads manifests, lays out tensors and plans is imported from here, and this by rank 0 alone.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from reshard_mpi import __version__
from reshard_mpi.check.audit import equal_groups
from reshard_mpi.check.oracles import copy_oracles, oracle_file_faults
from reshard_mpi.check.whole import WholeTensor, whole_array, whole_tensor
from reshard_mpi.checkpoint.dtypes import DTYPES
from reshard_mpi.checkpoint.manifest import CASE_FILE, Case, Fragment, by_tensor, case_text
from reshard_mpi.checkpoint.wanted import rename_rules
from reshard_mpi.errors import ReshardError, UsageError, names, plural, raise_first
from reshard_mpi.formats.dcp import is_dcp
from reshard_mpi.formats.hdf5_target import write_global_view
from reshard_mpi.formats.hugging_face_target import assets_of, copy_assets, write_index
from reshard_mpi.layout.file import LAYOUT_FILE, NO_LAYOUT, LayoutFile, layout_for
from reshard_mpi.plan.changes import Changes, with_padding
from reshard_mpi.plan.earlier import Earlier, Ranges, joined
from reshard_mpi.plan.plan import Plan
from reshard_mpi.plan.planner import Resources, round_nbytes_of
from reshard_mpi.plan.prepare import Prepared, Selection, changed_source, outgoing_of, prepare, round_nbytes_for
from reshard_mpi.report import peak_rss_nbytes, summary_of, topology_text, warn
from reshard_mpi.run.commit import PartialFolder, check_apart, check_paths, finish_commit, partial_of
from reshard_mpi.run.journal import Durable
from reshard_mpi.run.lock import holder
from reshard_mpi.run.move import Names, News
from reshard_mpi.run.node_shards import Found, NodeShards, check_not_placed, check_target_template, node_shards
from reshard_mpi.storage.cast import CastArray
from reshard_mpi.storage.digests import algorithm_of, digest_name, digest_row
from reshard_mpi.storage.entries import FOLDER, Entry, check_entries, copy_entries, file_name, left_out
from reshard_mpi.storage.files import create_file
from reshard_mpi.storage.known import Known, Stamp
from reshard_mpi.storage.reordered import ReorderedArray
from reshard_mpi.storage.safetensors import StoredArray
from reshard_mpi.storage.shown import ShownArray
from reshard_mpi.storage.source import DIGEST_OF_NOTHING, Source, described_anew

if TYPE_CHECKING:
    from reshard_mpi.run.wanted import Job

MANIFEST_NBYTES = 2048  # of case.json, for a fragment


class Lead:
    """A job on rank 0, step by step: checked, prepared, begun, committed. A step that can't be done raises a ReshardError."""

    source: Source
    changed: Source  # as if its tensors were called and typed as they will be
    changes: Changes
    warnings: list[str]
    prepared: Prepared
    partial: PartialFolder
    layout: LayoutFile | None
    node_shards: NodeShards | None = None  # where the target's lie, if not in OUT
    continued_nbytes = 0  # of the tensors, what an earlier run has left

    def __init__(self, job: "Job", nranks: int):
        self.job, self.nranks = job, nranks
        round_nbytes_of(job.memory_nbytes)  # too little for any job is told before the source is read
        finish_commit(job.out)
        check_paths(job.source, job.out, job.overwrite)
        if job.source_template is not None:
            check_paths(Path(job.source_template.path(0)).parent, job.out, job.overwrite)
        if job.target_template is not None:
            check_target_template(job.target_template, job.format)
            if job.overwrite:
                raise UsageError(
                    "--overwrite",
                    "can't replace files on several nodes in one step; remove them, or write the shards elsewhere",
                )
        if job.assets is not None and job.format != "hf":
            raise UsageError("--hf-assets", "goes with --format hf; leave it out")
        if job.assets is not None:
            assets_of(job.assets)

    @property
    def case(self) -> Case:
        """What will be written, as yet without digests."""
        return self.prepared.outgoing.case

    # ---- before anything is written

    def prepare(self, source: Source | None) -> None:
        """Lay out and plan what is to be made of the source."""
        assert source is not None
        source.raise_first()
        job, self._stamps, self._readers = self.job, source.stamps, source.readers
        if job.keep_bytes:
            self._check_entries(source)
        assets = [job.assets] if job.assets else []
        self.layout = layout_for(job.source, job.layout, dict(job.layout_values), assets)
        if self.layout and self.layout.operations:
            source = described_anew(source, *self.layout.applied(source.case, source.headers))
            source.raise_first()
        selection = Selection(
            job.target,
            job.include,
            job.exclude,
            self.layout,
            as_is=job.layout == NO_LAYOUT,
            format=job.format,
            most_file_nbytes=job.most_file_nbytes,
            rename=rename_rules(job.rename),
            cast=job.cast,
            cast_except=job.cast_except,
        )
        self.changed, self.changes = changed_source(source, selection)
        outgoing, faults = outgoing_of(self.changed, selection)
        raise_first(faults)
        assert outgoing is not None
        self.changes = with_padding(self.changes, outgoing)
        if job.target_template is not None:
            self.node_shards = node_shards(job.target_template, job.out, outgoing.nranks, self.nranks)
            self._check_apart(self.node_shards)
        self.source, self.prepared = source, prepare(self.changed, outgoing, self._resources())
        self.warnings = [*source.warnings, *self.changes.warnings]
        warn(self.warnings)

    def _check_apart(self, shards: NodeShards) -> None:
        """Shards on nodes must not come to lie among those of the source, or in OUT, which isn't there yet."""
        job, folders = self.job, sorted({Path(place).parent for place in shards.places})
        read = {Path(path).parent for path in self._readers}  # of shards on nodes
        for folder in (job.source, *sorted(read)):
            check_apart(f"the source {folder}", folder, folders)
        for folder in (job.out, partial_of(job.out)):
            check_apart(f"OUT, {folder}", folder, folders)

    def _check_entries(self, source: Source) -> None:
        """Entries that are kept must be there; then they aren't told to be left out."""
        if not source.is_described or not is_dcp(source.folder):
            raise UsageError("--keep-bytes", "goes with a source that is PyTorch DCP; leave it out")
        check_entries(source.folder, source.others)
        told = list(left_out(source.folder, source.others))
        source.warnings = [warning for warning in source.warnings if warning not in told]

    @property
    def _entries(self) -> tuple[Entry, ...]:
        """What is kept beside tensors."""
        return self.source.others if self.job.keep_bytes else ()

    def _resources(self) -> Resources:
        round_nbytes = round_nbytes_for(self.changed, self.changes, self.job.memory_nbytes)
        readers = tuple(self._readers.values())
        return Resources(self.nranks, round_nbytes, self.job.writers, self.job.verify != "none", readers)

    def seen(self) -> tuple[Known, Mapping[str, tuple[int, ...]]]:
        """What the source's files were like when they were looked at, and which ranks see them, if not all do."""
        return self._stamps, self._readers

    def equal_groups(self) -> list[tuple[str, list[WholeTensor]]]:
        """What must be equal and can't be seen to be from digests."""
        return equal_groups(self.source, self._kept_tensors())

    def unread_arrays(self) -> dict[WholeTensor, str]:
        """The stored arrays of the kept tensors that the plan doesn't read, and their digests."""
        read, kept = set(self._arrays_read().values()), self._kept_tensors()
        return {
            whole_array(
                f.payload_file, f.payload_key, self._stored(f), algorithm_of(f.fragment_digest)
            ): f.fragment_digest
            for f in self.source.case.fragments
            if f.logical_tensor_id in kept
            and f.fragment_digest is not None
            and (f.payload_file, f.payload_key) not in read
        }

    def _kept_tensors(self) -> set[str]:
        """Their ids in the source."""
        ids = {fragment.logical_tensor_id for fragment in self.case.fragments}
        return {(self.changes.source_ids or {}).get(tensor, tensor) for tensor in ids}

    def _arrays_read(self) -> dict[int, tuple[str, str]]:
        """(file, key) of each source array of the plan that a round reads, as the source calls it.

        An alias that is stored once in the target is not read twice.
        """
        read = set(self.prepared.plan.source.array.tolist())
        return {
            number: (file, array.cast.key if array.cast else key)
            for number, (file, key, array) in enumerate(self._source_arrays())
            if number in read
        }

    def _stored(self, fragment: Fragment) -> StoredArray:
        return self.source.headers[fragment.payload_file][fragment.payload_key]

    def begin(self, found: Sequence[Found]) -> Names:
        """Claim OUT.partial, where there must be room for all that will be written; what the plan's numbers stand for.

        What an earlier run of the same job has left there, and on the nodes, where it was `found`, needs no doing again: then it
        is planned anew.
        """
        job = self.job
        identity = {
            "version": __version__,
            "source": str(job.source.resolve()),
            "manifest": self.source.parsed.text_digest,
            "source files": {file: self._stamps[file] for file in self.prepared.source_files if file},
            "target": self.case.topology.source,
            "include": list(job.include),
            "exclude": list(job.exclude),
            "rename": [str(rule) for rule in rename_rules(job.rename)],
            "cast": [[str(rule) for rule in job.cast], list(job.cast_except)],
            "layout": self.layout.decides() if self.layout else None,
            "digests": job.verify != "none",
            "keep bytes": job.keep_bytes,
            "target template": job.target_template.text if job.target_template else None,
            "format": [job.format, job.most_file_nbytes, str(job.assets.resolve()) if job.assets else None],
        }
        files = [] if self.node_shards else [file.name for file in self.prepared.target_files]
        self.partial = PartialFolder(job.out, identity, job.restart, files)
        try:
            if self._is_continued and not all(of_rank.is_all for of_rank in found):
                warn([f"{job.out}: what an earlier run has left on the nodes can't be found there; begun anew"])
                self.partial.begin_anew(identity)
            if not self._is_continued:
                check_not_placed(found)
            self.partial.check_space(self._expected_nbytes())
            if self._is_continued:
                all_nbytes = self.prepared.plan.slabs.volume.sum()
                self.prepared = prepare(self.changed, self.prepared.outgoing, self._resources(), self._earlier())
                self.continued_nbytes = int(all_nbytes - self.prepared.plan.slabs.volume.sum())
        except BaseException:
            self.partial.close()
            raise
        return self._names()

    @property
    def _is_continued(self) -> bool:
        return bool(self.partial.durable.written)

    def _earlier(self) -> Earlier:
        """What the journal says, in the numbers of the plan."""
        durable, prepared = self.partial.durable, self.prepared
        number = {tensor: index for index, tensor in enumerate(prepared.tensors)}
        size = dict(zip(prepared.tensors, _tensor_nbytes(prepared.plan), strict=True))
        odd = {
            tensor
            for tensor, parts in durable.written.items()
            if any(not 0 <= begin <= end <= size.get(tensor, -1) for begin, end in parts)
        }
        if odd:
            where, told = str(self.partial.path), names(sorted(odd))
            raise UsageError(
                where, f"its journal names parts of tensors that OUT hasn't: {told}; --restart begins anew"
            )
        written = [(number[tensor], *part) for tensor, parts in durable.written.items() for part in parts]
        verified = {(file, key) for file, keys in durable.verified.items() for key in keys}
        is_verified = [place in verified for place in self._source_places()]
        digests = [durable.digests.get(file, {}).get(key) for file, key in self._target_places()]
        rows = [digest_row(f"sha256:{digest}" if digest else None) for digest in digests]
        return Earlier(
            Ranges(*np.array(written, np.int64).reshape(-1, 3).T),
            np.array(is_verified, bool),
            np.array(rows, np.int64).reshape(-1, 4),
            np.array([digest is not None for digest in digests], bool),
        )

    def note(self, news: Sequence[News]) -> None:
        """Note in the journal what has become durable, on all ranks."""
        plan, source, target = self.prepared.plan, self._source_places(), self._target_places()
        durable = Durable()
        some = news[0].slabs
        tensor, begin = plan.slab_tensor[some], plan.slab_begin[some]
        ranges = joined(Ranges(tensor, begin, begin + plan.slabs.take(some).volume))
        for number, first, end in zip(*(column.tolist() for column in ranges), strict=True):
            durable.written.setdefault(self.prepared.tensors[number], []).append((first, end))
        for of_rank in news:
            for array in of_rank.verified:
                file, key = source[array]
                durable.verified.setdefault(file, []).append(key)
            for array, digest in of_rank.digests.items():
                file, key = target[array]
                durable.digests.setdefault(file, {})[key] = digest.hex()
            for number, count in of_rank.infinite.items():
                name = self.prepared.tensors[number]
                durable.infinite[name] = durable.infinite.get(name, 0) + count
        self.partial.note(durable)

    def _source_places(self) -> list[tuple[str, str]]:
        """(file, key) of each source array of the plan, as it is stored."""
        files = (fragments[0].payload_file for fragments in self.prepared.source_fragments)
        return list(zip(files, self._source_keys(), strict=True))

    def _target_places(self) -> list[tuple[str, str]]:
        """(file, key) of each target array of the plan."""
        outgoing = self.prepared.outgoing
        return [(outgoing.files[array.rank], array.key) for array in outgoing.arrays]

    def _expected_nbytes(self) -> int:
        """Bytes of OUT: the shards, the manifest (about), the oracles."""
        shards = 0 if self.node_shards else sum(file.nbytes for file in self.prepared.target_files)
        oracles = sum(math.prod(oracle.shape) * DTYPES[oracle.dtype].nbits // 8 for oracle in self.case.oracles)
        entries = sum(entry.nbytes for entry in self._entries)
        return shards + len(self.case.fragments) * MANIFEST_NBYTES + oracles + entries

    # ---- what is written

    def _names(self) -> Names:
        prepared = self.prepared
        return Names(
            self.job.source,
            prepared.source_files,
            self._source_keys(),
            self.partial.path,
            self._target_names(),
            self._shown(),
            self._casts(),
            self._orders(),
            source_stamps=self._stamps,
            target_stamps={
                name: Stamp(file.nbytes) for name, file in zip(self._target_names(), prepared.target_files, strict=True)
            },
            lock_holder=holder(),
        )

    def _target_names(self) -> tuple[str, ...]:
        """Of each target file, while it is written: its name in OUT.partial, or its path on a node."""
        return self.node_shards.partial if self.node_shards else tuple(file.name for file in self.prepared.target_files)

    def target_readers(self) -> dict[str, tuple[int, ...]]:
        """Which ranks see the files that are written, if not all do."""
        shards = self.node_shards
        return {name: (owner,) for name, owner in zip(shards.partial, shards.owners, strict=True)} if shards else {}

    def _source_keys(self) -> tuple[str, ...]:
        """Of each source array of the plan, its key in its file."""
        return tuple(
            array.order.key if array.order else array.cast.key if array.cast else key
            for _, key, array in self._source_arrays()
        )

    def _casts(self) -> dict[int, CastArray]:
        """The arrays whose elements are converted as they are read, by source array of the plan."""
        return {number: array.cast for number, (_, _, array) in enumerate(self._source_arrays()) if array.cast}

    def _orders(self) -> dict[int, ReorderedArray]:
        """The arrays whose rows are put in another order as they are read, by source array of the plan."""
        return {number: array.order for number, (_, _, array) in enumerate(self._source_arrays()) if array.order}

    def _source_arrays(self) -> Iterator[tuple[str, str, StoredArray]]:
        """(file, key, array) of each source array of the plan, as it is called in the changed source."""
        for fragment, *_ in self.prepared.source_fragments:
            file, key = fragment.payload_file, fragment.payload_key
            yield file, key, self.changed.headers[file][key]

    def _shown(self) -> dict[str, tuple[ShownArray, ...]]:
        """The source's arrays that are no span of their file, by file."""
        found = {
            file: tuple(array.shown for array in arrays.values() if array.shown)
            for file, arrays in self.source.headers.items()
        }
        return {file: arrays for file, arrays in found.items() if arrays}

    def heads(self) -> list[tuple[list[tuple[str, int, bytes]], bool]]:
        """For each rank, the files that it creates: name, length, first bytes; and whether they are there already."""
        shares: list[list[tuple[str, int, bytes]]] = [[] for _ in range(self.nranks)]
        for number, (name, file) in enumerate(zip(self._target_names(), self.prepared.target_files, strict=True)):
            owner = self.node_shards.owners[number] if self.node_shards else number % self.nranks
            shares[owner].append((name, file.nbytes, file.head))
        return [(share, self._is_continued) for share in shares]

    def written(self, digests: Iterable[Mapping[int, bytes]]) -> Case:
        """The case to write, with the digests of its arrays; its oracles have been copied."""
        written = self._with_digests(digests)
        if self.job.writes_case:
            copy_oracles(self.source.folder, self.changed.case, written, self.partial.path)
        return written

    def _with_digests(self, digests: Iterable[Mapping[int, bytes]]) -> Case:
        if self.job.verify == "none":
            return self.case
        known = {array: digest_name(digest) for by_rank in digests for array, digest in by_rank.items()}
        arrays = self.prepared.plan.target.arrays
        known |= {
            array: digest_name(arrays.digest[array].tobytes()) for array in np.flatnonzero(arrays.has_digest).tolist()
        }
        fragments = tuple(
            msgspec.structs.replace(f, fragment_digest=known[array] if 0 not in f.local_shape else DIGEST_OF_NOTHING)
            for f, array in zip(self.case.fragments, self.prepared.outgoing.array_of, strict=True)
        )
        return msgspec.structs.replace(self.case, fragments=fragments)

    def tell_infinite(self, found: Iterable[Mapping[int, int]]) -> None:
        """Warn of the elements that have become infinite, once: in this run, and in those that it goes on from."""
        counts = Counter(self.partial.durable.infinite)
        for by_rank in found:
            counts.update({self.prepared.tensors[tensor]: count for tensor, count in by_rank.items()})
        self.infinite = [{"tensor": tensor, "count": count} for tensor, count in sorted(counts.items())]
        if counts:
            tensors = names(f"{tensor}: {plural(count, 'element')}" for tensor, count in sorted(counts.items()))
            message = f"--cast: finite numbers are too large for the new type, and have become infinite: {tensors}"
            self.warnings.append(message)
            warn([message])

    def expected_digests(self, written: Case | None) -> tuple[dict[WholeTensor, str], list[ReshardError]]:
        """Every array that was written and its digest, every whole tensor that has an oracle; and what is wrong with oracles."""
        assert written is not None
        outgoing, files = self.prepared.outgoing, self._target_names()
        expected: dict[WholeTensor, str] = {}
        arrays: defaultdict[str, dict[str, StoredArray]] = defaultdict(dict)
        fragments = []
        for fragment, number in zip(written.fragments, outgoing.array_of, strict=True):
            file, array = files[outgoing.arrays[number].rank], self.prepared.target_arrays[number]
            arrays[file][fragment.payload_key] = array
            expected[whole_array(file, fragment.payload_key, array)] = fragment.fragment_digest or ""
            fragments.append(msgspec.structs.replace(fragment, payload_file=file))
        tensors = by_tensor(fragments)
        for oracle in written.oracles:
            expected[whole_tensor(tensors[oracle.logical_tensor_id], arrays)] = oracle.sha256
        return expected, oracle_file_faults(self.partial.path, written) if self.job.writes_case else []

    # ---- the end

    def commit(self, written: Case | None) -> None:
        """Write `case.json`, or what says it in another format, and make OUT of it all."""
        assert written is not None
        if self.job.format == "hdf5" and not self.node_shards:
            write_global_view(self.prepared.outgoing, self.partial.path)
        if self.job.writes_case:
            text = case_text(written)
            create_file(self.partial.path / CASE_FILE, len(text), text)
            if self.layout is not None and self.layout.lasts:  # for those who go on from here
                used = self.layout.text().encode()
                create_file(self.partial.path / LAYOUT_FILE, len(used), used)
        else:
            write_index(self.prepared.outgoing, self.partial.path)
            if self.job.assets:
                copy_assets(self.job.assets, self.partial.path)
        copy_entries(self.job.source, self._entries, self.partial.path, self.job.verify != "none")
        check_paths(self.job.source, self.job.out, self.job.overwrite)
        self.partial.commit()

    def _are_verifiable(self) -> list[bool]:
        """Of each source array that is read, whether it has a digest, or a checksum that it is held against in reading."""
        return [
            self.prepared.source_fragments[number][0].fragment_digest is not None
            or self.changed.headers[file][key].is_checked
            for number, (file, key) in self._arrays_read().items()
        ]

    def report(self, measured: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
        """What was done; the peak memory of this rank is that of now, when `case.json` has been put together too."""
        job, case, kept, read = self.job, self.case, self._kept_tensors(), set(self._arrays_read().values())
        verifiable = self._are_verifiable()
        measured = [{**measured[0], "peak_rss_nbytes": peak_rss_nbytes()}, *measured[1:]]
        unread_nbytes = sum(
            self._stored(f).nbytes
            for f in self.source.case.fragments
            if f.logical_tensor_id in kept
            and f.has_elements
            and f.replica.member_count > 1
            and f.fragment_digest is not None
            and (f.payload_file, f.payload_key) not in read
        )
        return summary_of(
            measured,
            source=str(job.source),
            out=str(job.out),
            target_template=job.target_template.text if job.target_template else None,
            source_topology=topology_text(case.topology.target),
            target_topology=topology_text(case.topology.source),
            ntensors=len(kept),
            nfragments=len(case.fragments),
            nshards=self.prepared.outgoing.nranks,
            nrounds=self.prepared.plan.nrounds,
            memory_nbytes=job.memory_nbytes,
            verify=job.verify,
            narrays_read=len(verifiable),
            narrays_unverifiable=verifiable.count(False),
            unread_replica_nbytes=unread_nbytes,
            continued_nbytes=self.continued_nbytes,
            noracles=len(case.oracles),
            changes=self.changes.facts(),
            infinite=self.infinite,
            kept_bytes=[
                {"entry": entry.name, "file": f"{FOLDER}/{file_name(entry.name)}", "nbytes": entry.nbytes}
                for entry in self._entries
            ],
            warnings=self.warnings,
            seconds=round(seconds, 3),
        )


def _tensor_nbytes(plan: Plan) -> list[int]:
    """Of each tensor of a plan in which nothing is done yet."""
    return np.bincount(plan.slab_tensor, plan.slabs.volume).astype(np.int64).tolist()
