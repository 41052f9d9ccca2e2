"""Messages that host 0 sends to all other hosts, which receive them in order.

They go through the key-value store of JAX's coordination service, so they do not wait for the programs of the devices.
A host that waits is ended by JAX, or by `specjax.parallel.hosts`, if another host fails.
"""

from __future__ import annotations

import jax

from specjax.parallel import hosts

SYNCHRONISED = 256
"""Messages between two barriers, after which host 0 deletes them."""
_POLL, _BARRIER = 1000, 600_000
"""Milliseconds until `receive` returns without a message, and until a barrier fails."""
_NUM_CHANNELS: dict[str, int] = {}


class Channel:
    """A sequence of messages from host 0. Every host creates its channels with the same names in the same order."""

    def __init__(self, name: str):
        """Open a channel. Two channels with the same name are different."""
        _NUM_CHANNELS[name] = number = _NUM_CHANNELS.get(name, 0) + 1
        self._folder, self._count, self._client = f"specjax/{name}/{number}", 0, hosts.coordination_client()
        assert self._client is not None, "there is one process"

    def send(self, message: bytes) -> None:
        """Send a message, on host 0."""
        self._client.key_value_set_bytes(f"{self._folder}/{self._count}", message)
        self._advance()

    def receive(self) -> bytes | None:
        """Return the next message, or None if there is none within a second."""
        key = f"{self._folder}/{self._count}"
        try:
            message: bytes = self._client.blocking_key_value_get_bytes(key, _POLL)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        self._advance()
        return message

    def reply(self, message: str) -> None:
        """Leave a message to host 0, which `replies` returns there. It replaces the previous one of this host."""
        key = f"{self._folder}-replies/{jax.process_index()}"
        self._client.key_value_set(key, message, allow_overwrite=True)

    def replies(self) -> list[str]:
        """Return the messages that other hosts have left."""
        return [value for _, value in self._client.key_value_dir_get(f"{self._folder}-replies")]

    def _advance(self) -> None:
        """Count a message. All hosts meet from time to time, after which no message so far is needed."""
        self._count += 1
        if self._count % SYNCHRONISED == 0:
            self._client.wait_at_barrier(f"{self._folder}/{self._count}", _BARRIER)
            if jax.process_index() == 0:
                for number in range(self._count - SYNCHRONISED, self._count):
                    self._client.key_value_delete(f"{self._folder}/{number}")
