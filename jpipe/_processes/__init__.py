"""Several processes: how they share a mesh, agree, and notice that one of them is stuck."""
