"""Sharded, verified, crash-safe checkpoints for MPI programs."""
