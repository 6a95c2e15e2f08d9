"""The eager engine: carries out a plan with saved-tensor hooks, on any PyTorch code."""
