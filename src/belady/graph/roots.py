"""Models whose forward runs as captured graphs, in place: put there, called, and given back."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from belady.forwards import Forward, called, is_patched, plain_forward, run_plain
from belady.graph import doors
from belady.graph.autograd import when_back
from belady.graph.breaks import breaks, why_not
from belady.graph.capture import Taken, backend_of
from belady.graph.passes import is_pass
from belady.graph.refusals import unmanaged
from belady.graph.session import Session
from belady.measure.calls import Frames
from belady.measure.starving import tell, telling
from belady.measure.uninitialized import why_uninitialized
from belady.sections.unrolled import Unrolling

# Takes a reason, a module, and the arguments of a call of it.
Instead = Callable[[str, torch.nn.Module, Any, Any], Any]


class Roots:
    """Follows the roots of one `VirtualMemory`, as `belady.eager.tracker.Tracker` does.

    Parameters
    ----------
    prepare
        Makes the session; called with the root of the first call of all.
    instead
        Runs a call in another way, given a reason, and all later calls. It is asked where nothing
        of any root was captured, before the next call; what else is not runs as plain PyTorch.
    undivided
        Whether it is asked, too, where the first call of a root cannot be captured as a whole,
        before anything of it runs.
    exact
        Whether no bit may change. Where a call is not captured as a whole, one part may add to a
        gradient that another has summed: parts that sum gradients then run as plain PyTorch.

    Attributes
    ----------
    roots
        The modules.
    conductor
        Decides how their graphs run; None before the first call.
    reasons, waiting
        Why calls run as plain PyTorch, and how often; and why some are not captured yet.
    under_way
        Whether a root is being called.
    """

    def __init__(
        self,
        prepare: Callable[[torch.nn.Module], Session],
        instead: Instead | None = None,
        *,
        undivided: bool = False,
        exact: bool = False,
    ) -> None:
        self.roots: list[torch.nn.Module] = []
        self.conductor: Session | None = None
        self.instead, self.undivided = instead, undivided
        self.exact = exact
        self.reasons: Counter[str] = Counter()
        self.waiting: dict[str, None] = {}
        self.under_way = False
        self._frames = Frames()
        # Roots that went back, and hold nothing, before anything of one was captured; else None.
        self._bare: set[int] | None = set()
        self._prepare = prepare
        self._places: list[_Compiled] = []
        # Also where nobody closes this.
        weakref.finalize(self, _give_back, self._places).atexit = False
        # By function, whether whole, and sections: modules of one class share their graphs.
        self._forwards: dict[tuple[Any, bool, Unrolling | None], Callable[..., Any]] = {}

    def add(self, module: torch.nn.Module) -> bool:
        """Capture ``module`` from its next call on; False when that is so already.

        Raises
        ------
        ValueError
            If somebody else has compiled it, or stands in the place of its forward.
        """
        if any(module is root for root in self.roots):
            return False
        if doors.is_compiled(module):
            raise ValueError(
                f"{type(module).__name__} is compiled already, which engine='graph' does itself: "
                "hand over the module without torch.compile, or use engine='eager'"
            )
        if is_patched(module):
            raise ValueError(
                f"the forward of {type(module).__name__} was replaced on the instance, and "
                "engine='graph' captures that of the class: take the replacement off, or use "
                "engine='eager'"
            )
        place = _Compiled(module, self)
        place.attach()
        self._places.append(place)
        self.roots.append(module)
        return True

    def whole(self) -> AbstractContextManager[None]:
        """Refuse to manage what is saved outside the roots.

        Raises
        ------
        RuntimeError
            Always.
        """
        raise RuntimeError(
            "engine='graph' manages what its roots save: for vm.iteration(), call the loss inside "
            "the module, or use engine='eager'"
        )

    def close(self) -> None:
        """Give every forward back. Idempotent."""
        _give_back(self._places)
        self._frames.close()
        if self.conductor is not None:
            self.conductor.close()

    def open(self, module: torch.nn.Module) -> Session:
        """The session, which is told that ``module`` is called; made in the first call of all."""
        if self.conductor is None:
            self.conductor = self._prepare(module)
            self.conductor.reasons.update(self.reasons)
            self.reasons = self.conductor.reasons
        self.conductor.calling = type(module).__name__
        return self.conductor

    def compiled(self, module: torch.nn.Module, *, whole: bool = False) -> Callable[..., Any]:
        """The forward of ``module`` as captured graphs.

        With ``whole`` a call raises where it is not captured as a whole.
        """
        session = self.open(module)
        sections = session.admission.in_force(module)
        name = type(module).forward, whole, sections
        if name not in self._forwards:
            taken = Taken(whole or not self.exact, not (whole and self.exact and self.undivided))
            backend = backend_of(session, taken, strict=whole, sliced=sections is not None)
            own = None if sections is None else sections.own
            forward = type(module).forward if own is None else own.run
            self._forwards[name] = doors.compile_forward(forward, backend, whole=whole)
        return self._forwards[name]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The roots are what they are without the engine in the block."""
        for place in self._places:
            place.detach()
        try:
            yield
        finally:
            for place in self._places:
                place.attach()

    def starved(self, error: torch.OutOfMemoryError) -> None:
        """The device ran out of memory: give the iteration up, tighten the plan of the next."""
        self._starved()
        tell(error, self.conductor)

    def _starved(self) -> None:
        if self.conductor is not None:
            self.conductor.starved()

    def rest(self) -> None:
        """A root is called without gradients, which needs memory as well."""
        if self.conductor is not None:
            self.conductor.launching.rest()

    def left_out(self, reasons: list[str]) -> None:
        """Note what of a call was not captured."""
        self.reasons.update(reasons)

    @property
    def said(self) -> list[str]:
        """What a user should know, with a plan or without one, one sentence each."""
        said = unmanaged(self.reasons) if self.conductor is None else self.conductor.said
        return [*said, *self.waiting]

    @contextmanager
    def calling(self) -> Iterator[None]:
        """A root is called in the block."""
        before, self.under_way = self.under_way, True
        try:
            with telling(self._starved, self.conductor), self._frames.counted():
                yield
        finally:
            self.under_way = before

    def called(self, module: torch.nn.Module, result: Any) -> None:
        """A call of ``module`` is over, with this result."""
        if self.conductor is not None and self.conductor.admission.began:
            self._bare = None
        elif self._bare is not None:
            when_back(result, partial(self._bare.add, id(module)))

    @property
    def captures_nothing(self) -> str:
        """Why nothing of any root was captured, once all that learn went back; or nothing."""
        learn = (it for it in self.roots if any(p.requires_grad for p in it.parameters()))
        bare = self._bare and self._bare.issuperset(map(id, learn))
        return next(iter(self.reasons), "") if bare else ""


class _Compiled(Forward):
    """Stands in the place of a root's forward; calls without gradients run as plain PyTorch."""

    def __init__(self, owner: torch.nn.Module, roots: Roots) -> None:
        super().__init__(owner)
        self._roots = weakref.ref(roots)
        # Whether a call was captured as a whole, and whether one was not.
        self._whole = self._parted = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if torch.compiler.is_compiling():
            _captured_inside(self.token)
            return run_plain(self.alive(), *args, **kwargs)
        module, roots = self.alive(), self._roots()
        if roots is None or not is_pass():
            if roots is not None and not torch.is_grad_enabled():
                roots.rest()
            return plain_forward(module)(*args, **kwargs)
        if why := why_uninitialized(module):
            roots.rest()
            roots.waiting[why] = None
            return plain_forward(module)(*args, **kwargs)
        if _get_current_dispatch_mode_stack():
            roots.left_out(["a call under a dispatch mode, of which Dynamo captures nothing"])
            return plain_forward(module)(*args, **kwargs)
        if roots.instead is not None and not roots.under_way and (why := roots.captures_nothing):
            why = f"nothing of a call could be captured: {why}"
            return roots.instead(why, module, args, kwargs)
        session, inside = roots.open(module), roots.under_way

        def run() -> Any:
            if (roots.undivided or roots.exact) and not self._parted:
                return self._as_a_whole(roots, args, kwargs)
            return self._in_parts(roots, args, kwargs)

        with roots.calling():
            if inside:
                return run()
            result = session.admission.admitted(module, (args, kwargs), run, roots.aside)
        roots.called(module, result)
        return result

    def captured_inside(self) -> None:
        """Somebody's capture has come across the module: note it, unless it is one of ours."""
        roots = self._roots()
        if roots is not None and not roots.under_way:
            name = type(self.alive()).__name__
            roots.left_out([f"{name} is called inside what torch.compile captures for itself"])

    def _in_parts(self, roots: Roots, args: Any, kwargs: Any) -> Any:
        self._parted = True
        run = roots.compiled(self.alive())
        with breaks(roots.left_out):
            return run(self.alive(), *args, **kwargs)

    def _as_a_whole(self, roots: Roots, args: Any, kwargs: Any) -> Any:
        """A call while every one before was captured as a whole."""
        module = self.alive()
        run = roots.compiled(module, whole=True)
        try:
            result = run(module, *args, **kwargs)
        except doors.NotCaptured as error:
            if not self._whole and roots.undivided and roots.instead is not None:
                why = f"a call could not be captured as a whole: {why_not(error)}"
                return roots.instead(why, module, args, kwargs)
        else:
            self._whole = True
            return result
        return self._in_parts(roots, args, kwargs)


def _give_back(places: list[_Compiled]) -> None:
    while places:
        places.pop().detach()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _captured_inside(token: str) -> None:
    """Run while Dynamo captures, and not by what it has captured."""
    place = called(token)
    assert isinstance(place, _Compiled)
    place.captured_inside()
