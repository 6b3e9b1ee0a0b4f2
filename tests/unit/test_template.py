"""Where nodes keep the shards of ranks: what is a path with a rank in it, and what isn't."""

import pytest

from reshard_mpi.checkpoint.template import shard_template
from reshard_mpi.errors import UsageError


@pytest.mark.parametrize(
    "text, path",
    [
        ("/local/rank-{rank:05d}.safetensors", "/local/rank-00012.safetensors"),
        ("/local/{rank}.h5", "/local/12.h5"),
        ("/local/{rank:3d}.h5", "/local/012.h5"),
        ("/local/{rank:02d}/shard-{rank:05d}.h5", "/local/12/shard-00012.h5"),
    ],
)
def test_the_rank_stands_in_its_place(text, path):
    assert shard_template(text).path(12) == path


@pytest.mark.parametrize(
    "why, text",
    [
        ("no rank in it: all would be one file", "/local/shard.safetensors"),
        ("each process may have another working folder", "local/rank-{rank:05d}.safetensors"),
        ("an unknown field", "/local/{host}/rank-{rank:05d}.safetensors"),
        ("an attribute of the rank", "/local/{rank.__class__}{rank}.safetensors"),
        ("a brace too many", "/local/{rank}}.safetensors"),
        ("thousands of digits", "/local/{rank:9999d}.safetensors"),
        ("the format isn't known", "/local/rank-{rank:05d}.pt"),
        ("no path can have it", "/local/\0{rank}.h5"),
        ("nothing", ""),
    ],
)
def test_anything_else_is_refused(why, text):
    with pytest.raises(UsageError, match="no absolute path with a rank"):
        shard_template(text)
