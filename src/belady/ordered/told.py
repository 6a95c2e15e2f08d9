"""What users are told of the coordinated order."""

from __future__ import annotations

BY_POLICY, BY_NEED = "as the policy has it", "the budget is too small otherwise"


def said(why: str) -> str:
    """One sentence for a user."""
    return (
        "convolutions and linear layers take the gradients of their parameters first, and ReLUs "
        "the signs of their outputs, so that the gradient of the input takes the input's place "
        f"({why}): results are the same"
    )
