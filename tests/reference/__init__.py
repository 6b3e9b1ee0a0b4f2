"""A second answer to every question: the specification followed over whole arrays, in one process.

In reading order: `shards` and `dtypes` know the files, `fragments`, `checks` and `case` read and join a case,
`rules` and `mesh` know what is where in a target, `naive` puts them together. `describe`, `handmade` and
`generate` make cases. `judge` holds the output of another program against `naive`.

Nothing here is fast, and nothing here imports `reshard_mpi`: where the two disagree, one of them has misread
the specification.
"""
