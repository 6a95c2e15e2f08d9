"""Runs modules in slices along the batch, as a plan's sections say."""
