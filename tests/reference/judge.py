"""Hold a written checkpoint against `naive`, byte by byte, field by field, and say all that is different."""

import json
import os

from tests.reference import naive
from tests.reference.case import Case, load
from tests.reference.fragments import box_of, coordinates_of
from tests.reference.naive import Expected
from tests.reference.shards import StoredArray, offsets_of, read_shard


def judge(source: Case, target: dict | None, folder) -> Case:
    """The checkpoint in `folder` is that of `source` for `target`, in every respect. Returns it, loaded."""
    written = load(folder, full=True)
    aliases = {
        file: {k: v for k, v in shard.metadata.items() if k != "format"} for file, shard in written.shards.items()
    }
    faults = aliases_without_a_reason(source, written, aliases)
    if not faults:
        expected = naive.reshard(source, target, aliases)
        faults += differing_files(expected, folder)
        faults += differing_manifest(expected, written)
        faults += differing_fragments(expected, written)
        faults += differing_layout(source, expected, written)
        faults += differing_shards(expected, written)
    faults += ill_formed_json(os.path.join(folder, "case.json"))
    assert not faults, "\n".join(faults)
    return written


def aliases_without_a_reason(source: Case, written: Case, aliases: dict[str, dict[str, str]]) -> list[str]:
    """Arrays may be stored once for several tensors where the model ties them, or the source did so."""
    key_of = naive.payload_keys(source)
    tensor_of = {key: source.tensors[name] for name, key in key_of.items()}
    faults = []
    for file, kept_of in aliases.items():
        boxes = {f["logical_tensor_id"]: box_of(f) for f in written.manifest["fragments"] if f["payload_file"] == file}
        for alias, kept in kept_of.items():
            if alias not in tensor_of or kept not in tensor_of or kept in kept_of:
                faults.append(f"{file}: __metadata__ says {alias} -> {kept}")
                continue
            one, other = tensor_of[alias], tensor_of[kept]
            tied = one.tie_group_id is not None and one.tie_group_id == other.tie_group_id
            if not (tied or share_an_array(one.fragments, other.fragments)):
                faults.append(f"{file}: {alias} and {kept} are neither tied nor stored once in the source")
            if boxes.get(one.logical_tensor_id) != boxes.get(other.logical_tensor_id):
                faults.append(f"{file}: {alias} and {kept} are stored once with other boxes")
    return faults


def share_an_array(some: list[dict], others: list[dict]) -> bool:
    places = {(f["payload_file"], f["payload_key"]) for f in some}
    return any((f["payload_file"], f["payload_key"]) in places for f in others)


def differing_files(expected: Expected, folder) -> list[str]:
    want = {"case.json", *expected.shards} | ({expected.manifest["oracle_file"]} if expected.oracles else set())
    got = set(os.listdir(folder))
    faults = [f"files missing {sorted(want - got)}, unexpected {sorted(got - want)}"] if want != got else []
    if expected.oracles and expected.manifest["oracle_file"] in got:
        arrays = read_shard(os.path.join(folder, expected.manifest["oracle_file"])).arrays
        faults += [f"oracle {key} differs" for key, array in expected.oracles.items() if arrays.get(key) != array]
    return faults


def differing_manifest(expected: Expected, written: Case) -> list[str]:
    """All of case.json but the fragments and the layout. That its digest holds was checked by loading it."""
    elsewhere = {"fragments", "expected_manifest_digest", "topology"}
    want = {k: v for k, v in expected.manifest.items() if k not in elsewhere}
    got = {k: v for k, v in written.manifest.items() if k not in elsewhere}
    want |= {f"topology.{k}": v for k, v in expected.manifest["topology"].items() if k != "layout"}
    got |= {f"topology.{k}": v for k, v in written.manifest["topology"].items() if k != "layout"}
    return [
        f"{k}: {got.get(k)!r}, expected {want.get(k)!r}"
        for k in sorted(want.keys() | got.keys())
        if want.get(k) != got.get(k)
    ]


def differing_fragments(expected: Expected, written: Case) -> list[str]:
    want = {f["fragment_id"]: f for f in expected.manifest["fragments"]}
    got = {f["fragment_id"]: f for f in written.manifest["fragments"]}
    if list(want) != list(got):
        missing, unexpected = sorted(set(want) - set(got)), sorted(set(got) - set(want))
        return [
            f"fragments missing {missing}, unexpected {unexpected}"
            if missing or unexpected
            else f"order {list(got)}, expected {list(want)}"
        ]
    faults = []
    for name, fragment in want.items():
        for key in sorted(fragment.keys() | got[name].keys()):
            one, other = got[name].get(key), fragment.get(key)
            if key == "shared_storage_id":
                one, other = one is not None, other is not None
            if one != other:
                faults.append(f"fragment {name}: {key}: {one!r}, expected {other!r}")
    return faults


def differing_layout(source: Case, expected: Expected, written: Case) -> list[str]:
    """An axis of size 1 does nothing: whether it is remembered is left open."""
    want = {
        (n, axis): rule for n, rules in expected.manifest["topology"]["layout"].items() for axis, rule in rules.items()
    }
    got = {
        (n, axis): rule
        for n, rules in written.manifest["topology"].get("layout", {}).items()
        for axis, rule in rules.items()
    }
    sizes = source.manifest["topology"]["source"] | written.manifest["topology"]["source"]
    got = {
        place: rule
        for place, rule in got.items()
        if place in want or sizes.get(place[1], 0) > 1 or place[1] not in sizes
    }
    places = sorted(want.keys() | got.keys())
    return [
        f"layout of {n}, {axis}: {got.get((n, axis))}, expected {want.get((n, axis))}"
        for n, axis in places
        if got.get((n, axis)) != want.get((n, axis))
    ]


def differing_shards(expected: Expected, written: Case) -> list[str]:
    faults = []
    for file, arrays in expected.shards.items():
        shard = written.shards.get(file)
        if shard is None:
            continue
        if shard.metadata != expected.metadata[file]:
            faults.append(f"{file}: __metadata__ {shard.metadata}, expected {expected.metadata[file]}")
        if shard.data_start % 8:
            faults.append(f"{file}: data starts at {shard.data_start}")
        if (offsets := offsets_of(arrays)) != shard.data_offsets:
            faults.append(f"{file}: data_offsets {shard.data_offsets}, expected {offsets}")
        faults += [
            f"{file}: {key}: {what_differs(shard.arrays.get(key), array)}"
            for key, array in arrays.items()
            if shard.arrays.get(key) != array
        ]
    return faults


def what_differs(got: StoredArray | None, want: StoredArray) -> str:
    if got is None:
        return "missing"
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{got.dtype} {got.shape}, expected {want.dtype} {want.shape}"
    first = next(n for n, (one, other) in enumerate(zip(got.raw, want.raw, strict=True)) if one != other)
    return f"bytes differ from byte {first} of {len(want.raw)}"


def ill_formed_json(path: str) -> list[str]:
    """Keys sorted, indent 2."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    parsed = json.loads(text)
    forms = [json.dumps(parsed, sort_keys=True, indent=2, ensure_ascii=ascii_only) for ascii_only in (True, False)]
    return [] if text.rstrip("\n") in forms else [f"{path}: keys not sorted, or indent not 2"]


def boxes_by_coordinates(case: Case) -> list[tuple]:
    """(tensor, offset, extent, mesh coordinates) of every fragment with elements, whatever its rank is."""
    return sorted(
        (
            f["logical_tensor_id"],
            *box_of(f),
            sorted((a, i) for a, i in coordinates_of(f).items() if a in case.mesh),
        )
        for f in case.manifest["fragments"]
        if 0 not in f["element_extent"]
    )


def raw_tensors(case: Case) -> dict[str, bytes]:
    return {name: tensor.raw for name, tensor in case.tensors.items()}
