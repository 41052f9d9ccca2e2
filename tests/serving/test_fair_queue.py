"""A client with many requests does not delay those of others."""

import pytest

from specjax.serving.fair_queue import FairQueue


def test_clients_take_turns_by_their_tokens():
    queue = FairQueue()
    for i in range(4):
        queue.push("long", f"long{i}", 100)
    for i in range(4):
        queue.push("short", f"short{i}", 50)
    order = [queue.pop() for _ in range(8)]
    assert [x for x in order if x.startswith("long")] == [f"long{i}" for i in range(4)]
    assert order.index("short3") < order.index("long3") and order.index("long1") < order.index("short3")
    assert len(queue) == 0
    with pytest.raises(ValueError):
        queue.pop()


def test_a_client_saves_nothing_while_it_is_away():
    queue = FairQueue()
    for i in range(10):
        queue.push("busy", i, 10)
    for _ in range(8):
        queue.pop()
    for name in "ab":
        queue.push("new", name, 10)
    assert [queue.pop() for _ in range(4)] in (["a", 8, "b", 9], ["a", 8, 9, "b"])
    assert not queue._items and len(queue._accounts) <= 2


def test_items_leave():
    queue = FairQueue()
    items = [object(), object()]
    for item in items:
        queue.push("a", item, 1)
    assert queue.remove(items[0]) and not queue.remove(items[0])
    assert list(queue) == items[1:] and queue.pop() is items[1] and not queue._items
