"""What Dynamo captured, made runnable: a joint graph whose cut can change at every call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from belady.errors import GraphError, TraceError
from belady.graph import autograd, casts, doors, refusals
from belady.graph.alignment import align
from belady.graph.bits import Incoming, has_checkpointed_norms, reached, summed
from belady.graph.buffers import update_together
from belady.graph.captured import Captured
from belady.graph.channels import lay_channels_last
from belady.graph.counters import Counters
from belady.graph.host import Host
from belady.graph.joins import join_as_they_come
from belady.graph.joint import Joint, whole_graph
from belady.graph.layout import Layout
from belady.graph.masks import any_maker, drop_known
from belady.graph.pools import count_in_windows
from belady.graph.program import program_of
from belady.graph.state import State
from belady.graph.untraced import attends_without
from belady.ir.collector import seldom_collected
from belady.measure.starving import telling
from belady.memory.geometry import below_autograd


@dataclass(frozen=True, slots=True)
class Taken:
    """Which graphs are carried out; not all where no bit may change.

    Attributes
    ----------
    sums
        Those that sum gradients.
    several
        Those of which several results lead to one gradient: a loss may leave some of them out.
    """

    sums: bool = True
    several: bool = True


ALL = Taken()


class Capture(Captured):
    """Makes one graph runnable: `belady.graph.doors.Compilers`.

    Parameters
    ----------
    remembered
        The casts of its inputs that autocast makes once.
    taken
        Whether it is carried out.
    opaque
        Whether it calls functions that see to gradients themselves.
    sliced
        Whether modules in it run in slices.
    """

    def __init__(
        self,
        host: Host,
        remembered: casts.Remembered,
        *,
        taken: Taken = ALL,
        opaque: bool = False,
        sliced: bool = False,
    ) -> None:
        super().__init__(host.device, sliced=sliced)
        self._remembered = remembered
        self._host = host
        self._taken = taken
        self._opaque = opaque

    def partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **more: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Take the joint graph.

        Raises
        ------
        TraceError
            If this engine cannot carry it out with the bits of plain PyTorch.
        """
        if self.sliced:
            # Each slice has cast the parameters, which saves them as often.
            casts.share_all(joint)
        else:
            self.cast = self._remembered.share(joint, num_fwd_outputs)
        if not self._host.plain_bits:
            self._suit_kernels(joint)
        if self.sliced:
            join_as_they_come(joint)
        update_together(joint)
        parts = Joint.of(joint, num_fwd_outputs)
        refusals.refuse_other_bits(parts, self._host.device)
        refusals.refuse_other_draws(parts)
        if not self._taken.sums:
            refusals.refuse_shares(parts, self.cast)
        if not self._taken.several:
            refusals.refuse_several(parts)
        self.summed = summed(parts)
        self.reached = () if self._opaque else reached(parts)
        self.put(parts)
        self._host.captured(self)
        if has_checkpointed_norms(parts):
            self._host.differs(self, "checkpointed norms")
        return doors.stubs(
            parts.primals, parts.tangents, parts.forward_outputs, parts.backward_outputs
        )

    def _suit_kernels(self, joint: fx.GraphModule) -> None:
        """Have fast kernels run, where bits need not be those of plain PyTorch."""
        from belady.graph.inductor import prefers_channels_last

        align(joint, self._host.budget_bytes)
        if prefers_channels_last(joint):
            lay_channels_last(joint)
        count_in_windows(joint)

    def watching(self, run: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
        """``run``, which is this graph made runnable, with an eye on what of it is used.

        Parameters
        ----------
        inputs
            What the graph was captured for.
        """
        joint, host = self.joint, self._host
        if joint is None:
            return run
        # Dynamo captures anew where another input gets a gradient.
        given = [number for number, it in enumerate(inputs) if autograd.can_be_given(it)]
        incoming = Incoming(joint, self.reached)

        def look(gradients: Sequence[torch.Tensor | None] | None) -> None:
            for word in incoming.words(gradients):
                host.differs(self, word)

        def watched(*args: Any) -> Any:
            results = run(*args)
            several = [args[number] for number in given]
            autograd.when_in_part(results, several, len(joint.tangents), look)
            return results

        return watched

    def left_none(self, results: list[Any]) -> list[Any]:
        """Gradients of the backward under way, without those to which nothing leads that it got."""
        missing = autograd.missing()
        if not missing or not self.reached:
            return results
        pairs = zip(results, self.reached, strict=True)
        return [None if of and of <= missing else result for result, of in pairs]

    def forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> doors.Runner:
        """How forward runs."""
        return doors.as_boxed(self._forward)

    def backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> doors.Runner:
        """How backward runs."""
        return doors.as_boxed(self._backward)

    def inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> doors.Runner:
        """How a graph runs that nobody differentiates: each value goes when it is consumed.

        Raises
        ------
        TraceError
            As `partition`.
        """
        joint = whole_graph(module)
        refusals.refuse_other_draws(joint)
        program = program_of(joint, Layout.of(joint, self._host.device))

        def run(args: list[Any]) -> list[Any]:
            with below_autograd(), doors.beneath_functions(), seldom_collected():
                return program.forward(args, None, None)[0]

        return doors.as_boxed(run)

    def _forward(self, args: list[Any]) -> list[Any]:
        turn = self._host.enter(self, args)
        with below_autograd(), doors.beneath_functions(), seldom_collected():
            results, saved, versions = turn.program.forward(args, turn.contents, turn.watch)
            token = torch.empty(0, device="cpu")
        state = token._belady = State(self, turn, saved, versions)  # type: ignore[attr-defined]
        self._host.left(self, state, results)
        return [*results, token]

    def _backward(self, args: list[Any]) -> list[Any]:
        state = getattr(args.pop(0), "_belady", None)
        if not isinstance(state, State):
            raise GraphError(
                "a saved-tensor hook, as of belady.save_on, replaced what the graph engine saved: "
                "call the model outside of the hooks, as the engine moves what it saves; "
                "engine='eager' has room for others"
            )
        host, turn = self._host, state.turn
        host.enter_backward(state, args)
        keep = autograd.keeps_graph()
        if keep:
            autograd.when_asked_for_more(refusals.refuse_second_order)
        saved = state.take(keep=keep)
        with (
            below_autograd(),
            doors.beneath_functions(),
            seldom_collected(),
            telling(host.starved, host),
        ):
            results = turn.program.backward(saved, args, turn.contents, turn.watch)
        results = self.left_none(results)
        host.left_backward(state, results)
        return results


def backend_of(
    host: Host, taken: Taken = ALL, *, strict: bool = False, sliced: bool = False
) -> Callable[..., Any]:
    """A backend for `torch.compile` whose graphs ``host`` decides over.

    What it cannot carry out, or is not ``taken``, runs as Dynamo captured it, op by op under
    autograd; with ``strict`` it raises `TraceError` instead.
    Whoever calls holds ``host``: torch holds every backend for good.
    """
    known = weakref.ref(host)
    leaves = attends_without() if host.plain_bits else any_maker

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        alive = known()
        assert alive is not None
        drop_known(module, leaves)
        counters = Counters(module, inputs)
        try:
            opaque = doors.calls_own_functions(module)
            remembered = casts.Remembered.of(module, inputs, alive.device.type)
            captured = Capture(alive, remembered, taken=taken, opaque=opaque, sliced=sliced)
            run = captured.watching(doors.compile_joint(module, inputs, captured), inputs)
        except TraceError as error:
            if strict:
                raise
            alive.not_captured(str(error))
            counters.put_back()
            return module
        return counters.counting(run)

    return backend
