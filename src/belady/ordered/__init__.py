"""Changes the order inside a layer's backward, so that a gradient takes its input's place."""
