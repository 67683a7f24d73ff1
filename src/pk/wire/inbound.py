"""One budget for the memory of all frames that peers send to this process (rule L17).

A pure core: it counts, and says who may read and who must go.  pk.wire.memory drives it.

Each stream has an `Account`.  What a stream holds is charged when the bytes arrive, never when a
peer announces them, and is credited when the memory is free again: a small frame when its handler
took it, a large one when the last view of it is gone.  Every account has a *floor* of FLOOR_BYTES
of its own, so that short frames never wait for the large frames of others.  What it holds beyond
its floor comes out of the *pool*, which all accounts share.  The accounts of proven brokers and
controllers are *reserved*: they take nothing out of the pool and are never refused.  What bounds
them is their number, the credits of their streams, and the bound of a frame.

Without more rules the pool would hang: 200 half-received frames fill it, and none can finish.  So
the frame that began first, the *oldest*, may take all that is left of the pool.  Any other may only
take what leaves room for one whole frame, `frame_bytes_max`.

Invariants
  M1  the pool holds at most `pool_bytes`, whatever peers send or announce
  M2  once no handler holds a frame, the oldest frame has room for all that it lacks
  M3  a reserved account is never refused room
  M4  while an account waits for room, whoever keeps the pool without progress is named by `victim`:
      a frame whose peer sends less than STALL_BYTES in STALL_MS, an account whose handler takes
      nothing for UNTAKEN_MS, a frame that waits itself and is larger than another one that waits,
      and at last the youngest frame, if even the oldest has no room
  M5  frames other than the oldest go on in the order of their sizes, and only when all that they
      lack has room: so the pool is not spread over frames that all wait, and large frames that
      never end do not delay smaller ones
"""

from __future__ import annotations

from pk import limits

#: What each connection may hold besides the pool.
FLOOR_BYTES = 8 * limits.KIB
#: Bytes of one connection that are not in its account: the part of a short frame (socket_stream).
KEPT_BYTES = 8 * limits.KIB
CONNECTION_BYTES = FLOOR_BYTES + KEPT_BYTES
#: M4: a frame that receives less than STALL_BYTES in STALL_MS has stalled.
STALL_MS = 1_000
STALL_BYTES = 256 * limits.KIB
#: M4: an account has stalled whose handler took nothing for so long.
UNTAKEN_MS = 5_000


class Account:
    """What one stream holds.  `waiting` = it wants to read and has no room."""

    __slots__ = (
        "assembled",
        "behind",
        "closed",
        "held",
        "marked_bytes",
        "marked_ms",
        "reserved",
        "resumed_ms",
        "size",
        "taken_ms",
        "waiting",
    )

    def __init__(self, now_ms: int) -> None:
        self.held = 0
        self.assembled = 0  #: of `held`: bytes of the frame that is being received
        self.closed = False
        self.reserved = False
        self.waiting = False
        self.behind = False  #: it is not read, because its handler has enough to do
        self.size = 0  #: of the frame that is being received
        self.resumed_ms = now_ms  #: when it was last let read again
        self.marked_ms = now_ms  #: when the frame had last grown by STALL_BYTES,
        self.marked_bytes = 0  #: and how much of it there was then
        self.taken_ms = now_ms  #: when something of it was last freed

    @property
    def lacks(self) -> int:
        """What the frame that is being received still needs."""
        return self.size - self.assembled

    @property
    def pooled(self) -> int:
        """Its part of the pool."""
        return 0 if self.reserved else max(0, self.held - FLOOR_BYTES)


class Inbound:
    """The budget of a process: `bytes_max`, of which each of `connections_max` has its floor."""

    def __init__(self, bytes_max: int, connections_max: int, frame_bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._general = bytes_max - connections_max * CONNECTION_BYTES
        self.frame_bytes_max = frame_bytes_max
        self.pooled = 0  #: what is taken out of the pool
        self.reserved = 0  #: what reserved accounts hold
        self._assembling: dict[Account, None] = {}  #: not reserved; the oldest first
        self._holding: dict[Account, None] = {}  #: not reserved, and hold more than their floor
        self._waiting: dict[Account, None] = {}

    @property
    def frame_bytes_max(self) -> int:
        """The largest frame that is taken."""
        return self._frame_bytes_max

    @frame_bytes_max.setter
    def frame_bytes_max(self, size: int) -> None:
        self._frame_bytes_max = size
        #: the pool takes the largest frame at least, or that frame could never arrive
        self.pool_bytes = max(self._general, size)
        #: below this everybody has room
        self.easy_bytes = self.pool_bytes - size

    @property
    def held(self) -> int:
        """All that is charged to the pool and to reserved accounts."""
        return self.pooled + self.reserved

    @property
    def contended(self) -> bool:
        """Whether an account waits for room."""
        return bool(self._waiting)

    # -- accounts ----------------------------------------------------------------------------------

    def reserve(self, account: Account) -> None:
        """Its peer is a proven broker or controller, from now on."""
        if account.reserved:
            return
        held = account.held
        self._charge(account, -held)
        self._assembling.pop(account, None)
        self._waiting.pop(account, None)
        account.waiting = False
        account.reserved = True
        self._charge(account, held)

    def close(self, account: Account) -> None:
        """The stream is gone; what handlers still have of it stays charged until it is freed."""
        account.closed = True
        self._charge(account, -account.assembled)
        account.assembled = account.size = 0
        self._assembling.pop(account, None)
        self._waiting.pop(account, None)
        account.waiting = False

    # -- frames ------------------------------------------------------------------------------------

    def room(self, account: Account, wanted: int) -> int:
        """How many of `wanted` bytes the account may take now."""
        if account.reserved:
            return wanted
        free = self.pool_bytes - self.pooled
        if account is not self._oldest():
            free -= self.frame_bytes_max
        spare = max(0, FLOOR_BYTES - account.held)
        return min(wanted, spare + max(0, free))

    def wait(self, account: Account) -> None:
        """It has no room and is not read until `ready` names it."""
        account.waiting = True
        self._waiting[account] = None

    def begin(self, account: Account, size: int, now_ms: int) -> None:
        """A frame of `size` bytes begins that is received into memory of its own."""
        account.size = size
        account.marked_ms, account.marked_bytes = now_ms, 0
        if not account.reserved:
            self._assembling[account] = None

    def grew(self, account: Account, size: int) -> bool:
        """`size` more bytes of that frame arrived.  True = it has grown by STALL_BYTES: `mark` it.

        Once a read, and cheap: a large frame takes many.
        """
        account.assembled += size
        if account.reserved or account.held < FLOOR_BYTES:
            self._charge(account, size)
        else:
            if account.held == FLOOR_BYTES:
                self._holding[account] = None
            account.held += size
            self.pooled += size
        return account.assembled - account.marked_bytes >= STALL_BYTES

    def mark(self, account: Account, now_ms: int) -> None:
        """Its frame makes progress."""
        account.marked_ms, account.marked_bytes = now_ms, account.assembled

    def finished(self, account: Account, now_ms: int) -> None:
        """That frame is whole; it is `freed` when its memory is."""
        if account.held - account.assembled <= FLOOR_BYTES:
            account.taken_ms = now_ms
        account.assembled = account.size = 0
        self._assembling.pop(account, None)

    def arrived(self, account: Account, size: int, now_ms: int) -> None:
        """Whole short frames arrived; they are `freed` when the handler takes them."""
        if account.held - account.assembled <= FLOOR_BYTES:
            account.taken_ms = now_ms
        self._charge(account, size)

    def ebbed(self, account: Account, size: int) -> bool:
        """`freed` for who holds no more than its floor: nothing else depends on that.

        False = use `freed`.
        """
        if account.held > FLOOR_BYTES or account.reserved or account.waiting:
            return False
        account.held -= size
        return True

    def freed(self, account: Account, size: int, now_ms: int) -> None:
        """Memory of whole frames is free again."""
        account.taken_ms = now_ms
        self._charge(account, -size)

    def behind(self, account: Account, behind: bool, now_ms: int) -> None:
        """Its socket is not read because its handler is `behind`, or is read again."""
        account.behind = behind
        account.resumed_ms = now_ms

    # -- who waits, who goes -----------------------------------------------------------------------

    def ready(self, now_ms: int) -> list[Account]:
        """The accounts that waited and may go on: the oldest frame, and others by M5."""
        oldest = self._oldest()
        chosen: list[Account] = []
        if oldest is not None and oldest.waiting and self.room(oldest, 1):
            chosen.append(oldest)
        left = self.pool_bytes - self.pooled - self.frame_bytes_max
        for account in self._others_waiting(oldest):
            if not account.held:
                chosen.append(account)
            elif max(account.lacks, FLOOR_BYTES) <= left:
                chosen.append(account)
                left -= max(account.lacks, FLOOR_BYTES)
        for account in chosen:
            del self._waiting[account]
            account.waiting = False
            account.resumed_ms = now_ms
        return chosen

    def victim(self, now_ms: int) -> Account | None:
        """M4: who is closed next with `ThrottledError`, if anybody is.  Nobody without need."""
        if not self._waiting:
            return None
        for account in self._assembling:
            still_ms = now_ms - max(account.marked_ms, account.resumed_ms)
            if not (account.waiting or account.behind) and still_ms >= STALL_MS:
                return account
        idle = [each for each in self._holding if self._untaken(each, now_ms)]
        if idle:
            return max(idle, key=lambda account: account.held)
        oldest = self._oldest()
        if found := self._outweighed(oldest, now_ms):
            return found
        whole = self.pooled - sum(account.pooled for account in self._assembling)
        if oldest is None or not oldest.waiting or whole > 0 or self.room(oldest, 1):
            return None
        youngest = next(reversed(self._assembling))
        return youngest if youngest is not oldest else None

    def _others_waiting(self, oldest: Account | None) -> list[Account]:
        found = [account for account in self._waiting if account is not oldest]
        return sorted(found, key=lambda account: account.size)  # stable: first come, first served

    def _outweighed(self, oldest: Account | None, now_ms: int) -> Account | None:
        """A frame that has not grown for STALL_MS, in favour of a smaller one."""
        others = [account for account in self._others_waiting(oldest) if account.size]
        if not others or others[-1].size == others[0].size:
            return None
        largest = others[-1]
        return largest if largest.pooled and now_ms - largest.marked_ms >= STALL_MS else None

    def _untaken(self, account: Account, now_ms: int) -> bool:
        """Whether whole frames wait in it, and its handler takes none."""
        whole = account.held > account.assembled
        return whole and not account.closed and now_ms - account.taken_ms >= UNTAKEN_MS

    # -- inside ------------------------------------------------------------------------------------

    def _oldest(self) -> Account | None:
        return next(iter(self._assembling), None)

    def _charge(self, account: Account, size: int) -> None:
        if account.reserved:
            account.held += size
            self.reserved += size
            return
        before = account.pooled
        account.held += size
        after = account.pooled
        self.pooled += after - before
        if after and not before:
            self._holding[account] = None
        elif before and not after:
            self._holding.pop(account, None)
