"""What a plan is given before it is carried out: host and managed memory, a piece of the device."""

from __future__ import annotations

from belady.ir.curves import host_room, managed_room
from belady.ir.trace import Trace
from belady.measure.trial import Trial
from belady.memory.carrier import Carrier
from belady.memory.paging import Claim
from belady.memory.piece import Piece
from belady.simulate.blocks import in_blocks


def claimed(trial: Trial, trace: Trace, carrier: Carrier) -> Claim | None:
    """Have host memory for the copies of a plan, and managed memory; None where nothing moves.

    Raises
    ------
    TierFullError, TierError
        If either is not to be had.
    """
    plan = trial.plan
    if plan.moves_nothing:
        return None
    pinned, blocks = host_room(trace, plan)
    carrier.reserve(pinned)
    return carrier.paging.claim(blocks, managed_room(trace, plan, trial.hardware.allocator))


def piece_for(trial: Trial, trace: Trace, peak_bytes: int, carrier: Carrier) -> Piece:
    """What a plan with this peak takes its blocks from."""
    plan, allocator, device = trial.plan, trial.hardware.allocator, carrier.device
    foretold = in_blocks(trace, plan, allocator).nbytes if device.type == "cuda" else 0
    room = trial.room(peak_bytes, foretold) - managed_room(trace, plan, allocator)
    return Piece(device, room, trial.holes)
