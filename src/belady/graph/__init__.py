"""Executes plans by partitioning and rewriting the graphs that `torch.compile` captures."""

from belady.graph.engine import Compiled, compiled

__all__ = ["Compiled", "compiled"]
