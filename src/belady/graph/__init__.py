"""Executes plans by partitioning and rewriting the graphs that `torch.compile` captures."""
