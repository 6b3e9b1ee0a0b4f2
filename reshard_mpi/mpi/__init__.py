"""What ranks do together: agree, load, exchange. All that talks MPI to others is here or calls this."""
