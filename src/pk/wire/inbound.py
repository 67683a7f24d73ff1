"""One budget for the memory of all frames that peers send to this process (rule L17).

A pure core: it counts bytes, and decides which streams may read and which are closed.
pk.wire.memory drives it.

Each stream has an `Account`.  Bytes are charged when they arrive, never when a peer announces them.
They are credited when their memory is free again: a small frame when its handler takes it, a large
frame when the last view of it is released.  Every account has a *floor* of FLOOR_BYTES of its own,
so that short frames never wait for other streams' large frames.  Bytes beyond the floor come out of
the *pool*, which all accounts share.  The accounts of proven brokers and controllers are
*reserved*: they take nothing out of the pool and are never refused.  Their memory is bounded by
their number, by the credits of their streams, and by the maximum frame size.

These rules alone would let the pool deadlock: 200 half-received frames could fill it, and none
could finish.  Therefore the *oldest* frame, which began first, may take all that is left of
the pool.  Any other frame must leave room for one whole frame, `frame_bytes_max`.

Invariants
  M1  The pool holds at most `pool_bytes`, whatever peers send or announce.
  M2  Once no handler holds a frame, the oldest frame has room for all its missing bytes.
  M3  A reserved account is never refused room.
  M4  While an account waits for room, `victim` names an account that holds pool memory without
      progress.  In this order: a frame whose peer sends less than STALL_BYTES in STALL_MS; an
      account whose handler takes nothing for UNTAKEN_MS; a frame that waits itself and is larger
      than another waiting frame; and last, if even the oldest frame has no room, the youngest
      frame.
  M5  Frames other than the oldest continue in the order of their sizes, and only when there is room
      for all their missing bytes.  The pool is thus not spread over frames that all wait, and large
      frames that never end do not delay smaller ones.
"""

from __future__ import annotations

from pk import limits

#: The bytes that each connection may hold outside the pool.
FLOOR_BYTES = 8 * limits.KIB
#: Bytes of a connection that its account does not count: the part of a short frame (socket_stream).
KEPT_BYTES = 8 * limits.KIB
CONNECTION_BYTES = FLOOR_BYTES + KEPT_BYTES
#: M4: a frame that receives less than STALL_BYTES in STALL_MS has stalled.
STALL_MS = 1_000
STALL_BYTES = 256 * limits.KIB
#: M4: an account whose handler takes nothing for so long has stalled.
UNTAKEN_MS = 5_000


class Account:
    """The memory that a stream holds.  `waiting` = the stream wants to read and has no room."""

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
        self.assembled = 0  #: part of `held`: bytes of the frame that is being received
        self.closed = False
        self.reserved = False
        self.waiting = False
        self.behind = False  #: it is not read, because its handler still has frames to take
        self.size = 0  #: size of the frame that is being received
        self.resumed_ms = now_ms  #: when it was last allowed to read again
        self.marked_ms = now_ms  #: when the frame had last grown by STALL_BYTES,
        self.marked_bytes = 0  #: and its bytes at that time
        self.taken_ms = now_ms  #: when the handler last freed some of its memory

    @property
    def lacks(self) -> int:
        """Return how many bytes the frame that is being received still lacks."""
        return self.size - self.assembled

    @property
    def pooled(self) -> int:
        """Return the bytes that the account takes out of the pool."""
        return 0 if self.reserved else max(0, self.held - FLOOR_BYTES)


class MemoryPool:
    """The budget of a process: `bytes_max`, with floors for `connections_max` connections."""

    def __init__(self, bytes_max: int, connections_max: int, frame_bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._general = bytes_max - connections_max * CONNECTION_BYTES
        self.frame_bytes_max = frame_bytes_max
        self.pooled = 0  #: bytes taken out of the pool
        self.reserved = 0  #: bytes that reserved accounts hold
        #: accounts that receive a frame, not reserved; the oldest first
        self._assembling: dict[Account, None] = {}
        self._holding: dict[Account, None] = {}  #: accounts above their floor, not reserved
        self._waiting: dict[Account, None] = {}

    @property
    def frame_bytes_max(self) -> int:
        """The largest frame that is accepted."""
        return self._frame_bytes_max

    @frame_bytes_max.setter
    def frame_bytes_max(self, size: int) -> None:
        self._frame_bytes_max = size
        #: at least the largest frame, which otherwise could never arrive
        self.pool_bytes = max(self._general, size)
        #: below this, every account has room
        self.easy_bytes = self.pool_bytes - size

    @property
    def held(self) -> int:
        """Return the bytes charged to the pool and to reserved accounts."""
        return self.pooled + self.reserved

    @property
    def contended(self) -> bool:
        """Return whether an account waits for room."""
        return bool(self._waiting)

    # -- accounts ----------------------------------------------------------------------------------

    def reserve(self, account: Account) -> None:
        """Reserve the account: its peer has proved to be a broker or controller."""
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
        """Close the account; frames that handlers still hold stay charged until they are freed."""
        account.closed = True
        self._charge(account, -account.assembled)
        account.assembled = account.size = 0
        self._assembling.pop(account, None)
        self._waiting.pop(account, None)
        account.waiting = False

    # -- frames ------------------------------------------------------------------------------------

    def room(self, account: Account, wanted: int) -> int:
        """Return how many of `wanted` bytes the account may take now."""
        if account.reserved:
            return wanted
        free = self.pool_bytes - self.pooled
        if account is not self._oldest():
            free -= self.frame_bytes_max
        spare = max(0, FLOOR_BYTES - account.held)
        return min(wanted, spare + max(0, free))

    def wait(self, account: Account) -> None:
        """Note that the account has no room; its stream is not read until `ready` returns it."""
        account.waiting = True
        self._waiting[account] = None

    def begin(self, account: Account, size: int, now_ms: int) -> None:
        """Note that a frame of `size` bytes begins, which is received into its own memory."""
        account.size = size
        account.marked_ms, account.marked_bytes = now_ms, 0
        if not account.reserved:
            self._assembling[account] = None

    def grew(self, account: Account, size: int) -> bool:
        """Charge `size` more bytes of the frame.

        Returns True when the frame has grown by STALL_BYTES: then call `mark`.  This runs once per
        read and must be cheap, because a large frame takes many reads.
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
        """Note that the account's frame makes progress."""
        account.marked_ms, account.marked_bytes = now_ms, account.assembled

    def finished(self, account: Account, now_ms: int) -> None:
        """Note that the frame is whole; `freed` credits it when its memory is free."""
        if account.held - account.assembled <= FLOOR_BYTES:
            account.taken_ms = now_ms
        account.assembled = account.size = 0
        self._assembling.pop(account, None)

    def arrived(self, account: Account, size: int, now_ms: int) -> None:
        """Charge whole short frames; `freed` credits them when the handler takes them."""
        if account.held - account.assembled <= FLOOR_BYTES:
            account.taken_ms = now_ms
        self._charge(account, size)

    def ebbed(self, account: Account, size: int) -> bool:
        """Credit `size` bytes quickly, if the account is within its floor and nothing waits.

        Returns False if the caller must use `freed` instead.
        """
        if account.held > FLOOR_BYTES or account.reserved or account.waiting:
            return False
        account.held -= size
        return True

    def freed(self, account: Account, size: int, now_ms: int) -> None:
        """Credit the memory of whole frames that is free again."""
        account.taken_ms = now_ms
        self._charge(account, -size)

    def behind(self, account: Account, behind: bool, now_ms: int) -> None:
        """Note whether the stream is not read because its handler is `behind`."""
        account.behind = behind
        account.resumed_ms = now_ms

    # -- who waits, who goes -----------------------------------------------------------------------

    def ready(self, now_ms: int) -> list[Account]:
        """Return the waiting accounts that may continue: the oldest frame, and others by M5."""
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
        """Return the account to close next with `ThrottledError` (M4); None if none must close."""
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
        """Return the largest waiting frame if it is stalled (STALL_MS) and a smaller one waits."""
        others = [account for account in self._others_waiting(oldest) if account.size]
        if not others or others[-1].size == others[0].size:
            return None
        largest = others[-1]
        return largest if largest.pooled and now_ms - largest.marked_ms >= STALL_MS else None

    def _untaken(self, account: Account, now_ms: int) -> bool:
        """Return whether the account holds whole frames and its handler takes none of them."""
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
