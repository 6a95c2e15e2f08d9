"""Why a saved value went where it went, and what any other choice would cost. Never imports torch.

`explain` asks the simulator and the judge about a `belady.ir.Run`; nothing here decides anything.
"""

from __future__ import annotations

from belady.explain.document import Choice, Explanation, ModuleStory, Outcome, ValueStory, Weighed
from belady.explain.story import explain
from belady.explain.subjects import UnknownSubjectError
from belady.explain.text import describe

__all__ = [
    "Choice",
    "Explanation",
    "ModuleStory",
    "Outcome",
    "UnknownSubjectError",
    "ValueStory",
    "Weighed",
    "describe",
    "explain",
]
