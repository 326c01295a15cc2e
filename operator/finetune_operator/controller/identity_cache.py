"""Remembers the results of a pure function for its latest arguments, which are compared by identity."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Source = TypeVar("Source")
Result = TypeVar("Result")


class IdentityCache(Generic[Source, Result]):
    """Calls a pure function once per object, as long as the object is among the `max_entries` latest arguments.

    The caches replace an object when it changes and never modify it, so the same object has the same result. The
    entries keep their objects alive, so that the identity of an object is not used again.
    """

    def __init__(self, compute: Callable[[Source], Result], *, max_entries: int) -> None:
        self._compute = compute
        self._max_entries = max_entries
        self._entries: OrderedDict[int, tuple[Source, Result]] = OrderedDict()  # by id(), latest argument last

    def __call__(self, source: Source) -> Result:
        """Return the result for this object."""
        entry = self._entries.get(id(source))
        if entry is not None:
            self._entries.move_to_end(id(source))
            return entry[1]
        result = self._compute(source)
        self._entries[id(source)] = (source, result)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
        return result
