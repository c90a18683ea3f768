"""MiniGPT in NumPy: pure forward and backward, no MPI, no files."""

from mpi_ckpt.model.config import ModelConfig, Parameter
from mpi_ckpt.model.gpt import MiniGPT

__all__ = ["MiniGPT", "ModelConfig", "Parameter"]
