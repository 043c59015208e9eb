"""Slots of recurrent states: one slot has the whole state of one sequence. Bookkeeping only, on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidFree, InvalidInput
from quire.memory.allocator.id_pool import IdPool
from quire.spec.ids import Ids

HOST = "cpu"


class MambaSlotAllocator:
    """Allocates slots 1 to `size`, int32 on the host; padded sequences write to slot 0. `name` is the group. Freed
    slots are reused last, or as `ids` of an arena decide. A batch sets aside the slots it may need:

        |-- free --|-- set aside for the open group --|-- out --|
                    alloc takes from here only, and alloc_group_end frees the rest
    """

    def __init__(self, size: int, *, name: str = "state", ids: IdPool | None = None) -> None:
        if size < 1:
            raise InvalidInput(f"a pool of {size} states holds none.", fix="make size at least 1.")
        self.size = size
        self.name = name
        self.ids = ids or IdPool(size, "last", group=name, noun="slot")
        self.clear()

    def available_size(self) -> int:
        """Slots that are free, without those set aside for an open group."""
        return self.ids.num_free

    @property
    def num_set_aside(self) -> int:
        """Slots left in the open group; 0 outside a group."""
        return 0 if self._group is None else len(self._group)

    def clear(self) -> None:
        """Free all slots, in ascending order, and close the group."""
        self.ids.clear()
        self._group: Ids | None = None

    def alloc(self, need_size: int) -> Ids:
        """`need_size` slots, int32, inside a group from those set aside; the caller owns them. Raises OutOfPages."""
        if self._group is None:
            return self.ids.take(need_size)
        self.ids.check_room(need_size, len(self._group))
        slots, self._group = self._group[:need_size], self._group[need_size:]
        self.ids.mark_out(slots)
        return slots

    def alloc_group_begin(self, num_requests: int) -> None:
        """Set slots aside for `alloc` calls. Groups do not nest. Raises OutOfPages, and then opens no group."""
        assert self._group is None, "alloc groups do not nest"
        self._group = self.ids.set_aside(num_requests)

    def alloc_group_end(self) -> None:
        """Close the group and free its remaining slots."""
        assert self._group is not None, "alloc_group_end without alloc_group_begin"
        self.ids.put(self._group)
        self._group = None

    def free(self, free_index: npt.ArrayLike) -> None:
        """Free distinct slots, given as a list or an array on the host; inside a group also at once. Raises
        InvalidFree, changing nothing, for slots that are not allocated or given twice, for a dtype without integers,
        and for an array on another device: to read it, the host would have to wait."""
        device = getattr(free_index, "device", HOST)
        where = getattr(device, "type", device)  # a tensor's device has a type, an array's is a string
        if where != HOST:
            raise InvalidFree(
                f"group '{self.name}': slots given back as an array on '{where}', but ids live on the host.",
                fix="keep the ids that alloc returned and give those back.",
            )
        slots = np.asarray(free_index).reshape(-1)
        if not len(slots):
            return
        if slots.dtype.kind not in "iu":
            raise InvalidFree(f"group '{self.name}': slots given back as {slots.dtype}, but ids are integers.")
        slots = slots.astype(np.int64)
        self.ids.take_back(slots)
        self.ids.put(slots.astype(np.int32))
