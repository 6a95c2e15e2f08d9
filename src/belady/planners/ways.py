"""How each value can leave the device for a while, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import inf
from types import MappingProxyType

from belady.ir.codecs import passes
from belady.ir.plan import Encode, Recompute
from belady.ir.replay import compared_share, hook_seconds, seconds_of
from belady.ir.trace import Source, Tier
from belady.planners.due import last_read
from belady.planners.moves import Case, encodings
from belady.planners.replays import cheapest

_NONE: Mapping[int, int] = MappingProxyType({})
# Part of the host's seconds that counts where the device is busier. From an eighth to a third plans
# for traces of ViT-L, GPT-2-medium and ResNet-152 are foretold to be about as fast; with none or
# half of them some are slower.
_UNHIDDEN = 0.25


class Ways:
    """Replays and encodings of values.

    Attributes
    ----------
    nbytes
        Device bytes of the values that may move.
    encodings
        The encoding of each value that has one.
    saved
        Device bytes that are free while a value is encoded, where it can be, or else away.
    cost
        Seconds of the cheapest replay or encoding for each byte that it saves, of the values that
        have one, as `cost_of` counts them.
    last_reads
        Boundary at which backward last takes a saved value back; -1 if it never does.
    """

    def __init__(self, case: Case, nbytes: dict[int, int]) -> None:
        self._case = case
        self._host_bound = case.trace.is_host_bound
        # On a CPU the host computes, and its seconds are in those of the ops. In a graph it issues
        # no more in forward for what backward makes again, and backward keeps the device busy.
        hidden = case.trace.device == "cpu" or case.trace.source is Source.GRAPH
        self._unhidden = 0.0 if hidden else _UNHIDDEN
        self.nbytes = nbytes
        self.last_reads = {value: last_read(case.trace, value) for value in case.trace.saved}
        self._known: dict[int, list[tuple[dict[int, bool], Recompute | None]]] = {}
        self._replays: dict[int, Recompute] = {}
        self._costs: dict[tuple[int, Encode | tuple[int, ...]], float] = {}
        for value in nbytes:
            replay = self.replay(value)
            if replay is not None:
                self._replays[value] = replay
        self.encodings = encodings(case, nbytes)
        held = case.hardware.allocator.held
        self.saved = nbytes | {v: nbytes[v] - held(it.nbytes) for v, it in self.encodings.items()}
        both = (*self._replays, *self.encodings)
        self.cost = {
            value: min(
                self.cost_of(value, self._replays.get(value)),
                self.cost_of(value, self.encodings.get(value)),
            )
            for value in both
        }

    def replay(
        self,
        value: int,
        dropped: Mapping[int, int] = _NONE,
        encoded: Collection[int] = (),
        reach: float = 0.0,
    ) -> Recompute | None:
        """Cheapest replay that starts from nothing ``dropped``, unless all with it is read soon.

        Parameters
        ----------
        dropped
            Of each recomputed value, the last of the first reads of what is made again with it.
        encoded
            Values that are encoded.
        reach
            Most ops from the first read of ``value`` to that of a value in ``dropped``.
        """
        trace = self._case.trace
        at = trace.values[value].first_read or 0

        def usable(source: int) -> bool:
            if source in encoded:
                return False
            if source in dropped:
                first = trace.values[source].first_read or 0
                return at <= first and dropped[source] - at <= reach
            return self.last_reads[source] >= at

        return self.cheapest(value, usable)

    def cheapest(self, value: int, usable: Callable[[int], bool]) -> Recompute | None:
        """Cheapest replay that starts from what is ``usable``."""
        for known, found in self._known.setdefault(value, []):
            if all(usable(source) is answer for source, answer in known.items()):
                return found
        # What the replay depends on, so that it is found again.
        answers: dict[int, bool] = {}

        def asked(source: int) -> bool:
            answers[source] = usable(source)
            return answers[source]

        replay = cheapest(self._case.trace, value, asked)
        self._known[value].append((answers, replay))
        return replay

    def worth(self, value: int, replay: Recompute, stretch: float) -> bool:
        """Whether a replay takes no more than ``stretch`` times what it does if all else stays."""
        seconds = seconds_of(self._case.trace, self._replays[value])
        return stretch == inf or seconds_of(self._case.trace, replay) <= stretch * seconds

    def cost_of(self, value: int, way: Recompute | Encode | None) -> float:
        """Seconds for each byte that is saved, of the host or the device, whichever is busier.

        Behind hooks a device that is busier does not hide all of the host's: it waits where much is
        issued for little, and at the beginning of each iteration that the program waits for.
        """
        if way is None:
            return inf
        name = value, way if isinstance(way, Encode) else way.ops
        if name not in self._costs:
            seconds = self._issuing(way)
            if not self._host_bound:
                seconds = self._computing(value, way) + self._unhidden * seconds
            nbytes = (self.saved if isinstance(way, Encode) else self.nbytes)[value]
            self._costs[name] = seconds / nbytes
        return self._costs[name]

    def _computing(self, value: int, way: Recompute | Encode) -> float:
        """Of the device; digests are taken of what is made again."""
        case = self._case
        nbytes = case.trace.storages[case.trace.values[value].storage].nbytes
        if isinstance(way, Encode):
            both = passes(way, nbytes)
            return case.hardware.memory_seconds(both.encode + both.decode)
        digests = 2 * compared_share(case.trace) * case.hardware.memory_seconds(nbytes)
        return seconds_of(case.trace, way) + digests

    def _issuing(self, way: Recompute | Encode) -> float:
        """Of the host, which takes the value over, and issues again what makes it.

        Where no replay is compared, as in a graph, nothing is taken over for one.
        """
        trace, hardware = self._case.trace, self._case.hardware
        link = hardware.link(Tier.DEVICE, Tier.DEVICE)
        takes = isinstance(way, Encode) or compared_share(trace) > 0
        taking = hook_seconds(trace, hardware) + (2 * link.issue_s if link and takes else 0.0)
        ops = way.ops if isinstance(way, Recompute) else ()
        return taking + sum(trace.ops[op].host_seconds for op in ops)
