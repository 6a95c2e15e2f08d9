"""The backward under way: every internal name of autograd that the graph engine uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from belady.measure.static import tensors_of

_MISSING = "belady: gradients that nobody gives"
_INPUTS = "belady: what a graph was given that others made"


def keeps_graph() -> bool:
    """Whether the backward under way may be asked for again (``retain_graph``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


class _Depends(torch.autograd.Function):
    """Nothing, which is made of some tensors without holding their bytes."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("what is made of it refuses before")


class _Refused(torch.autograd.Function):
    """The first tensors as they are, which are made of all; no gradient can be had of them."""

    @staticmethod
    def forward(
        ctx: Any, refuse: Callable[[], None], number: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.refuse = refuse
        return tensors[:number]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.refuse()


def when_asked_for_more(refuse: Callable[[], None]) -> None:
    """Call ``refuse`` when somebody differentiates the gradients of the backward under way.

    By whatever the graph was given: torch refuses it where all is asked for, in words that do not
    say what to do, and by one input alone the gradient would be missing, and nobody would say so.
    """

    def after(gradients: Sequence[torch.Tensor | None], _: object) -> Any:
        handle.remove()
        if not torch.is_grad_enabled():
            return None
        node: Any = torch._C._current_autograd_node()
        given = [it for it in gradients if it is not None]
        leaves = [of.variable for of, _ in node.next_functions if hasattr(of, "variable")]
        others = node.metadata.get(_INPUTS, ())
        made = iter(_Refused.apply(refuse, len(given), *given, *leaves, *others))  # type: ignore[no-untyped-call]
        return tuple(None if it is None else next(made) for it in gradients)

    # A node that its own hook held would live for good where the backward is cut short.
    handle = torch._C._current_autograd_node().register_hook(after)


def when_back(result: Any, then: Callable[[], None]) -> None:
    """Call ``then`` in each backward that reaches a tensor of a result; never, if it has none."""
    for it in tensors_of(result):
        # One that is a parameter gets gradients of others, too.
        if it.grad_fn is not None:
            it.register_hook(lambda _: then())  # type: ignore[no-untyped-call]


def can_be_given(value: Any) -> bool:
    """Whether an input may come from another op of autograd's: a parameter does not."""
    tensor = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return tensor and bool(value.requires_grad)


def when_in_part(
    results: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    number: int,
    tell: Callable[[Sequence[torch.Tensor | None] | None], None],
) -> None:
    """Look before each backward of a graph at the ``number`` gradients that it is given.

    Those that nobody gives are zeros then; `missing` has their numbers.

    Parameters
    ----------
    results
        Of the graph's forward.
    inputs
        Of it, those that `can_be_given`.
    tell
        Called with them, None for each that nobody gives; or with None instead of all, where some
        are not given and they cannot be told apart.
    """
    theirs = {it.grad_fn for it in inputs}
    tensors = [it for it in results if isinstance(it, torch.Tensor) and it.grad_fn]
    edges: list[tuple[Any, int]] = [(it.grad_fn, it.output_nr) for it in tensors]
    # A view is made of what the graph gives, beside it.
    edges += [edge for node, _ in edges for edge in node.next_functions if edge[0]]
    nodes = [node for node, _ in edges if node not in theirs]
    ours = next((node for node in nodes if node.name() == "CompiledFunctionBackward"), None)
    places = sorted({place for node, place in edges if node is ours})
    known = len(places) == number

    def look(gradients: Sequence[torch.Tensor | None]) -> None:
        given = [gradients[place] for place in places]
        absent = frozenset(number for number, it in enumerate(given) if it is None)
        node: Any = torch._C._current_autograd_node()
        node.metadata[_MISSING] = absent if known else frozenset()
        if known:
            tell(given)
        elif sum(it is not None for it in gradients) < number:
            tell(None)

    if ours is not None:
        ours.register_prehook(look)
        if passed := [it for it in inputs if it.grad_fn is not None]:
            ours.metadata[_INPUTS] = (_Depends.apply(*passed),)  # type: ignore[no-untyped-call]


def missing() -> frozenset[int]:
    """Numbers of the gradients that the backward under way was not given, where they are known."""
    node: Any = torch._C._current_autograd_node()
    found: frozenset[int] = node.metadata.get(_MISSING, frozenset())
    return found


@dataclass(frozen=True, slots=True)
class Joined:
    """Calls ``tell`` where gradients of the backward under way are not all that their tensors get.

    Attributes
    ----------
    later
        Whether also where all others come after ours, and are added to it.
    """

    tell: Callable[[], None]
    later: bool

    def when(
        self, places: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> list[RemovableHandle]:
        """Look at these gradients.

        Parameters
        ----------
        places
            Of the gradients, among the tensors that the forward took.

        Returns
        -------
        list of RemovableHandle
            To be removed when the backward is over, in case that it was cut short.
        """
        following = torch._C._current_autograd_node().next_functions
        return [
            self._look(*following[place], gradient)
            for place, gradient in zip(places, gradients, strict=True)
        ]

    def _look(self, node: Any, number: int, gradient: torch.Tensor) -> RemovableHandle:
        ours, version = TensorWeakRef(gradient), gradient._version
        leaf, task = getattr(node, "variable", None), torch._C._current_graph_task_id()

        def look(found: Any) -> None:
            if torch._C._current_graph_task_id() != task:
                return  # of another backward: this one did not ask for the tensor's gradient
            handle.remove()
            it = found[number] if leaf is None else found
            # What came later was added to ours, in its place, as plain PyTorch does.
            if ours() is not it or (self.later and it._version != version):
                self.tell()

        if leaf is None:
            handle: RemovableHandle = node.register_prehook(look)
        else:
            # Others' hooks may replace the gradient: this one goes first.
            handle = leaf.register_hook(look)
            others = {key: hook for key, hook in leaf._backward_hooks.items() if key != handle.id}
            leaf._backward_hooks.clear()
            leaf._backward_hooks.update({handle.id: look, **others})
        return handle
