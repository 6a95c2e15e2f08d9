"""Pictures of a Run, made without torch."""
