"""Turn a distributed model checkpoint saved in one parallel topology into the shards of another, as an MPI job."""

__version__ = "0.1.0"
