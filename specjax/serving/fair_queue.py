"""A queue that is fair between clients.

Goyal, Vin, Cheng: Start-time Fair Queuing (SIGCOMM 1996), with equal weights.

Rule: each client has an account of the tokens that its items have cost. The next item is the oldest one of the client
with the lowest account. A client that comes back starts at the account of the last client that was served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items of several clients, in the order in which they are served."""

    def __init__(self) -> None:
        self._items: dict[str, deque[tuple[Item, float]]] = {}
        self._accounts: dict[str, float] = {}
        self._level = 0.0  # account of the last client that was served

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def __iter__(self) -> Iterator[Item]:
        return (item for items in self._items.values() for item, _ in items)

    def push(self, client: str, item: Item, cost: float) -> None:
        """Add an item that costs a number of tokens."""
        if client not in self._items:
            self._items[client] = deque()
            self._accounts[client] = max(self._accounts.get(client, 0.0), self._level)
        self._items[client].append((item, cost))

    def pop(self) -> Item:
        """Remove and return the next item. Raises: ValueError if there is none."""
        client = min(self._items, key=lambda client: self._accounts[client])
        item, cost = self._items[client].popleft()
        self._level = self._accounts[client]
        self._accounts[client] += cost
        self._forget()
        return item

    def remove(self, item: Item) -> bool:
        """Remove an item. Return False if it is not in the queue."""
        for items in self._items.values():
            for entry in items:
                if entry[0] is item:
                    items.remove(entry)
                    self._forget()
                    return True
        return False

    def _forget(self) -> None:
        """Drop queues without items, and accounts that have no effect any more."""
        self._items = {client: items for client, items in self._items.items() if items}
        self._accounts = {
            client: account for client, account in self._accounts.items()
            if client in self._items or account > self._level
        }  # fmt: skip
