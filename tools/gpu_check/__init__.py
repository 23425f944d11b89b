"""The first hour on a cluster: what the tests prove on a CPU, asked of real GPUs. `make test-gpu`, docs/cluster.md."""
