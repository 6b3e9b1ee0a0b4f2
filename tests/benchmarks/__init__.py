"""Benchmarks: how long resharding takes, beside `cp` of the same bytes and beside other programs that do the same work.

    make bench ARGS='--size 4G --json figures.json'
    python -m tests.benchmarks --size 64M --rounds 1 --works tp4 --contenders 'cp,ours-4-*'
    python -m tests.benchmarks --list

They print, and assert nothing about time: no test. `__main__` reads the command line, in this order:

    works        what is resharded: a source and a target        sources     writes the sources (a program)
    contenders   the programs that do it                         naive, consolidate, dcp: the peers (programs)
    measure      one run: quiet machine, warm memory, clock      check       are the bytes right? (a program)
    table        medians and ratios as Markdown                  machine     on what this was measured
    layouts      boxes of a source and of a target, for the peers and the check      shards, gloo   what these share

Whatever takes memory is a program of its own. A process starts its life with the peak memory of the one that started it
(`ru_maxrss` outlives exec), so the one that measures has to stay small.
"""
