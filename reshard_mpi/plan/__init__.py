"""Who moves which bytes, when, and to where. Opens no file, knows no MPI."""
