"""Where nodes keep the shards of ranks: a path with the rank in it."""

import os
import re
from typing import NamedTuple

from reshard_mpi.errors import UsageError

_RANK = re.compile(r"\{rank(?::0?(\d{1,2})d)?\}")


class ShardTemplate(NamedTuple):
    """The path of a rank's shard on its node, as `/local/ckpt/rank-{rank:05d}.safetensors`."""

    text: str

    def path(self, rank: int) -> str:
        """
        >>> ShardTemplate("/local/{rank}/shard-{rank:03d}.h5").path(7)
        '/local/7/shard-007.h5'
        """
        return _RANK.sub(lambda field: f"{rank:0{field[1] or 1}d}", self.text)


def shard_template(text: str) -> ShardTemplate:
    """The template; UsageError when it is none."""
    is_sound = _RANK.search(text) and not re.search(r"[{}\0]", _RANK.sub("", text))
    if not is_sound or not os.path.isabs(text) or not text.endswith((".safetensors", ".h5")):
        raise UsageError(repr(text), "is no absolute path with a rank, like /local/ckpt/rank-{rank:05d}.safetensors")
    return ShardTemplate(text)
