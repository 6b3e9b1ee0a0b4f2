"""Coverage-guided fuzzing with atheris, of one target after the other (the extra `fuzz`).

    python -m tests.fuzz --seconds 60 case shard

What a target has been fed and was new to it is kept in .fuzz/TARGET, from which the next run goes on; what broke a property,
hung or took too much memory is written to .fuzz/findings, and `python -m tests.fuzz --replay FILE TARGET` runs it alone.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from random import Random

FOLDER = Path(__file__).resolve().parents[2] / ".fuzz"
FINDINGS = FOLDER / "findings"
MOST_NBYTES = 1 << 16  # of a file
SECONDS_A_FILE = 20
MEMORY_MIB = 2048


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: 60)")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run the target with this file alone")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: all of them")
    options = parser.parse_args()
    from tests.fuzz.targets import TARGETS

    unknown = set(options.targets) - set(TARGETS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no target; there are {', '.join(TARGETS)}")
    if options.replay:
        TARGETS[options.targets[0]].run(options.replay.read_bytes())
        return 0
    FINDINGS.mkdir(parents=True, exist_ok=True)
    failed = [name for name in options.targets or TARGETS if not _fuzzed(name, options.seconds)]
    print(f"fuzz: {', '.join(failed)}: see {FINDINGS}" if failed else "fuzz: nothing found")
    return bool(failed)


def _fuzzed(name: str, seconds: int) -> bool:
    """Fuzz in a process of its own, which libFuzzer ends as it likes; whether nothing was found."""
    corpus = FOLDER / name
    corpus.mkdir(exist_ok=True)
    limits = [f"-max_total_time={seconds}", f"-timeout={SECONDS_A_FILE}", f"-rss_limit_mb={MEMORY_MIB}"]
    files = [f"-max_len={MOST_NBYTES}", f"-artifact_prefix={FINDINGS / name}-", str(corpus)]
    program = f"from tests.fuzz.__main__ import fuzz; fuzz({name!r})"
    command = [sys.executable, "-c", program, *limits, *files, "-print_final_stats=1"]
    done = subprocess.run(
        command, cwd=FOLDER.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    runs = [line.split()[-1] for line in done.stdout.splitlines() if "number_of_executed_units" in line]
    count, verdict = runs[0] if runs else "unknown", "something found" if done.returncode else "nothing found"
    print(f"{name}: {count} files in {seconds} s, {verdict}", flush=True)
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-40:]))
    return not done.returncode


def fuzz(name: str) -> None:
    """Never returns."""
    import atheris

    with atheris.instrument_imports(include=["reshard_mpi"]):
        from tests.fuzz.targets import TARGETS
    from tests.fuzz.mutations import bytes_changed

    target = TARGETS[name]
    for seed in target.seeds():
        (FOLDER / name / hashlib.sha1(seed).hexdigest()).write_bytes(seed)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        if not random.randint(0, 3):
            return atheris.Mutate(data, most)
        try:
            return target.mutate(data, random)[:most]
        except (ValueError, LookupError, RecursionError, TypeError):  # no JSON any more, or none of the kind
            return bytes_changed(data, random)[:most]

    atheris.Setup(sys.argv, target.run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(main())
