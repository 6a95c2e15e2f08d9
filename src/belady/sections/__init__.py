"""Runs modules in slices along the batch or the tokens, as a plan's sections say."""
